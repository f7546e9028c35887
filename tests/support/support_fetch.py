"""A workspace whose runs are on a cluster: this machine under another name, reached by an `ssh` that is a shell script.

`collect fetch` and the program that sends the runs are the real programs. A test can cut the connection, or kill the command,
after a number of bytes, change files on the cluster in the middle of the conversation, or answer in place of the cluster.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import support_collect as support
from support_e2e import HANG_S
from support_trust import make_own

from shardlab.remote import remote_workspace
from shardlab.remote.remote_workspace import RemoteWorkspace

# The stand-in of `ssh`. These files in the folder of the test control it. `fault`: one line with the number of a connection
# (from 1), a number of bytes, and what happens to this connection after these bytes (cut, kill or none). `answer`: is sent on
# the first connection instead of the cluster's own answer. `between`: a script that runs on the cluster after it has offered
# its runs, and before it learns which runs are wanted. `sent`: if it exists, all that the cluster sends is appended to it.
SSH = """\
#!/bin/sh
for word; do test "$word" != -G || exit 0; done
while :; do case $1 in --) shift; break ;; -o | -i | -p | -l) shift 2 ;; -*) shift ;; *) break ;; esac; done
shift
cd / && exec 3< "@/fault" && read -r which bytes what <&3 && exec 3<&-
echo >> "@/connections"
if test -e "@/answer" && test "$(wc -l < "@/connections")" = 1; then
    script=$(printf %s "$*" | sed 's/.*(echo \\([A-Za-z0-9+/=]*\\) .*/\\1/' | base64 -d)
    mark=${script#echo }
    echo "${mark%%;*}"
    cat "@/answer"
    exec cat > /dev/null
fi
if test -x "@/between"; then
    { IFS= read -r asked; printf '%s\\n' "$asked"; IFS= read -r wanted; "@/between"; printf '%s\\n' "$wanted"; } | sh -c "$*"
    exit
fi
if test -e "@/sent"; then sh -c "$*" | tee -a "@/sent"; exit; fi
if test "$(wc -l < "@/connections")" != "$which"; then exec sh -c "$*"; fi
if test "$what" = cut; then sh -c "$*" | { dd bs=64K count="$bytes" iflag=count_bytes status=none; kill -9 $$; }; fi
sh -c "$*" | { dd bs=64K count="$bytes" iflag=count_bytes status=none; kill -9 "$SHARDLAB_TEST_PID"; cat; }
"""
# A Python script that runs the command `collect fetch`. It can kill the command just before it touches a file of its workspace.
COMMAND = """
import os, sys
os.environ["SHARDLAB_TEST_PID"] = str(os.getpid())
workspace, left = sys.argv[1], int(sys.argv[2])
def count(event, words):
    global left
    if left and event.split(".")[0] in ("open", "os", "shutil") and words and workspace in str(words[0]):
        left -= 1
        if not left:
            os.kill(os.getpid(), 9)
sys.addaudithook(count)
from collect.cli import main
sys.exit(main(["fetch", "--workspace", workspace, *sys.argv[3:]]))
"""


class Cluster:
    """A workspace on this machine, and a workspace on an imitated cluster that contains the runs.

    there: the workspace on the cluster. here: the workspace on this machine, whose runs are on the cluster.
    """

    def __init__(self, folder: Path, here: Path) -> None:
        self.folder = folder
        self.there = make_own(folder / "cluster/workspaces/ws-1")
        support.keep(self.there, [support.cell()], repeats=1)
        here.mkdir(parents=True, exist_ok=True)
        self.here = make_own(here)
        self.send()
        (folder / "bin").mkdir()
        (folder / "bin/ssh").write_text(SSH.replace("@", str(folder)))
        (folder / "bin/ssh").chmod(0o755)
        self.no_fault()

    def send(self, **where: Any) -> None:
        """Write away.json into the workspace `here`, as `jobs submit` does. It says that the runs are on the cluster.

        where: keys of away.json about the login, for a login without the stand-in of `ssh`.
        """
        where = {"host": "far", "port": None, "user": None, "identity": None, "known_hosts": "/none"} | where
        rest = {"schema": 1, "cluster": "far", "host_keys": "strict", "python": sys.executable, "mark": "far:/ws\n"}
        remote_workspace.write_remote_workspace(self.here, RemoteWorkspace(workspace=str(self.there.path), **where, **rest))

    def no_fault(self) -> None:
        (self.folder / "connections").write_text("")
        (self.folder / "fault").write_text("0 0 none\n")

    def fault(self, connection: int, after_bytes: int, what: str) -> None:
        """Let a fault happen in a connection to the cluster.

        connection: the number of the connection, from 1. after_bytes: the fault happens after this number of bytes was sent.
        what: "cut" cuts the connection; "kill" kills the command `collect fetch` and keeps the connection.
        """
        self.no_fault()
        (self.folder / "fault").write_text(f"{connection} {after_bytes} {what}\n")

    def between(self, script: str) -> None:
        """Let the cluster run a shell script after it has offered its runs, and before it sends them."""
        path = self.folder / "between"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def answer(self, *messages: bytes | dict[str, Any]) -> None:
        """Answer in place of the cluster on the next first connection. messages: lines of JSON, or raw bytes."""
        parts = (message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n" for message in messages)
        (self.folder / "answer").write_bytes(b"".join(parts))

    def fetch(self, *words: str, kill_at: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run `collect fetch`.

        kill_at: kill the command when it touches a file of its workspace for the n-th time; 0: never.
        """
        path = f"{self.folder}/bin{os.pathsep}{os.environ['PATH']}"
        command = [sys.executable, "-P", "-c", COMMAND, str(self.here.path), str(kill_at), *words]
        done = subprocess.run(
            command, env=os.environ | {"PATH": path}, capture_output=True, text=True, umask=0o022, timeout=HANG_S, **options
        )  # fmt: skip
        self.wait_for_senders()
        return done

    def wait_for_senders(self) -> None:
        """Wait until no process sends runs any more. A sender ends a moment later if the command was killed."""
        while any(
            "collect.fetching.sender" in words and str(self.there.path) in words
            for words in (process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"]))
        ):
            time.sleep(0.02)

    def document(self, code: int = 0) -> list[dict[str, Any]]:
        done = self.fetch("--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)


def tree(folder: Path, *but: str) -> dict[str, tuple[str, int, int]]:
    """SHA-256, mode and modification time (ns) of everything below a folder, except files with these names."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        if path.name not in but:
            mtime = 0 if but and stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
            content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else ""
            found[str(path.relative_to(folder))] = (content, status.st_mode, mtime)
    return found


def blocks(*contents: bytes) -> bytes:
    """The content of a file as the cluster sends it, in these blocks."""
    return b"".join(len(content).to_bytes(4, "big") + content for content in (*contents, b""))


def contents(folder: Path) -> dict[str, bytes]:
    """The content of each file of a run except manifest.json, by the path of the file in the run folder."""
    files = {
        str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"
    }
    return {name: path.read_bytes() for name, path in files.items()}


def copy_run(run: Path, name: str) -> Path:
    """Copy a run folder, so that the workspace has the same run under another run id."""
    copy = Path(shutil.copytree(run, run.with_name(name)))
    described = (copy / "run.json").read_text().replace(f'"run_id": "{run.name}"', f'"run_id": "{name}"')
    (copy / "run.json").write_text(described)
    return copy
