"""Files to and from a node: the login shell there may be any, its startup files may print text, and the link may be cut."""

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
from support_e2e import HANG_S, until

from jobs.ssh import node_transfer
from jobs.ssh.step import NodeLost
from shardlab.errors import ShardlabError
from shardlab.transfer.file_sender import FileSender
from shardlab.workspace.inventory import InventoryNode
from shardlab.workspace.workspace import Workspace

NAMES = ("run/one file", "run/folder/two's $file")
BIG = os.urandom(1_000_000)
# A stand-in of `ssh`: runs the command on this machine, in the login shell of the test. The workspace of the node is another
# folder than that of the first node, whose path is in the command.
SSH = """\
#!/bin/sh
for last; do test "$last" != -G || exit 0; done
export HOME=FOLDER XDG_CONFIG_HOME=FOLDER BASH_ENV=FOLDER/noise ZDOTDIR=FOLDER
SHELL_OF_TEST -c "$last"
"""
# The interpreter of the node.
PYTHON = """\
#!/bin/sh
exec REAL -P -m shardlab.transfer.node_files --workspace NODE
"""
# The same for a login that starts no command.
FAILING = """\
#!/bin/sh
for last; do test "$last" != -G || exit 0; done
{}
"""
# Startup files of each shell. Some print a line without its end, which then stands before the mark.
STARTUP = {
    "sh": {},
    "bash": {"noise": "echo Welcome; printf 'quota: '; echo 'module: not found' >&2"},
    "tcsh": {".tcshrc": "echo Welcome"},
    "zsh": {".zshenv": "echo Welcome; printf 'quota: '; echo 'module: not found' >&2"},
    "fish": {"fish/config.fish": "echo Welcome; printf 'quota: '; echo 'module: not found' >&2"},
}


class Machines:
    """The first node and one other node, each with its own workspace."""

    def __init__(self, folder):
        self.folder, self.first, self.other = folder, Workspace(folder / "first"), Workspace(folder / "other")
        for workspace in (self.first, self.other):
            (workspace.path / ".shardlab").mkdir(parents=True)
        python = folder / "python"
        python.write_text(PYTHON.replace("REAL", sys.executable).replace("NODE", str(self.other.path)))
        python.chmod(0o755)
        self.node = InventoryNode("gpu0", "gpu0", python=str(python))
        self.target = folder / "target"
        self.use("sh")

    def use(self, shell, script=SSH):
        """shell: the command that runs the login shell. script: code of `ssh` in place of the login."""
        home, ssh = self.folder / "home", self.folder / "bin/ssh"
        for name, text in STARTUP.get(shell, {}).items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(f"{text}\n")
        ssh.parent.mkdir(exist_ok=True)
        ssh.write_text(script.replace("FOLDER", str(home)).replace("SHELL_OF_TEST", shell))
        ssh.chmod(0o755)

    def fetch(self, names=NAMES, must_stop=lambda: False):
        node_transfer.fetch_files(self.node, self.first, names, self.target, must_stop)

    def send(self, names, wanted_if="different", must_stop=lambda: False):
        node_transfer.send_files(self.node, self.first, dict.fromkeys(names, wanted_if), must_stop)

    def write(self, workspace, name, content=BIG):
        path = workspace.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path


@pytest.fixture
def machines(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    made = Machines(tmp_path)
    for name in NAMES:
        made.write(made.other, f"runs/{name}")
    return made


@pytest.mark.parametrize("shell", STARTUP)
def test_files_arrive_whatever_the_login_shell_is_and_prints(machines, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    machines.use(shell)
    machines.fetch()
    assert [(machines.target / name).read_bytes() == BIG for name in NAMES] == [True, True]
    machines.write(machines.first, "runs/sent/a")
    machines.send(["runs/sent"])
    assert (machines.other.runs / "sent/a").read_bytes() == BIG


def test_links_and_fifos_on_the_other_machine_do_not_arrive(machines):
    link, fifo = (machines.other.runs / name for name in NAMES)
    link.unlink()
    link.symlink_to("/etc/passwd")
    fifo.unlink()
    os.mkfifo(fifo)
    machines.fetch()
    assert not [path for path in machines.target.rglob("*") if not path.is_dir()]


def test_a_file_that_was_not_asked_for_is_refused(machines):
    python = machines.folder / "python"
    python.write_text(
        '#!/bin/sh\necho \'{"type":"file","name":"../out","begin":0,"bytes":1,"mtime_ns":1,"follows":1}\'\nprintf x\n'
    )
    with pytest.raises(ShardlabError, match=r"gpu0: .*sends '../out', which was not asked for"):
        machines.fetch()
    assert not (machines.folder / "out").exists()
    python.write_text("#!/bin/sh\necho '[\"runs/../secret\"]'\n")
    machines.write(machines.first, "secret")
    machines.write(machines.first, "runs/sent/a")
    with pytest.raises(ShardlabError, match=r"gpu0: asks for 'runs/\.\./secret', which was not offered"):
        machines.send(["runs/sent"])


def test_a_login_that_fails_is_named_with_the_words_of_ssh(machines):
    machines.use("sh", FAILING.format("echo 'ssh: connect to host gpu0 port 22: Connection refused' >&2; exit 255"))
    with pytest.raises(NodeLost, match=r"^gpu0: ssh: connect to host gpu0 port 22: Connection refused$"):
        machines.fetch()


def test_a_login_that_starts_no_command_is_no_transfer(machines):
    """The account has no login shell, and a program prints a text and ends with 0 instead."""
    machines.use("sh", FAILING.format("echo 'This account is currently not available.'"))
    with pytest.raises(NodeLost):
        machines.fetch()
    assert not machines.target.exists()


def test_a_machine_without_the_environment_is_not_a_broken_connection(machines):
    (machines.folder / "python").unlink()
    with pytest.raises(ShardlabError, match="python: not found") as error:
        machines.fetch()
    assert not isinstance(error.value, NodeLost)


def test_a_link_that_is_cut_loses_the_node_and_the_next_transfer_is_complete(machines):
    machines.use(
        "bash", SSH.replace('-c "$last"', '-c "$last" | { dd bs=4K count=1400000 iflag=count_bytes status=none; kill -9 $$; }')
    )
    with pytest.raises(NodeLost, match="the connection broke in the middle of an answer"):
        machines.fetch()
    assert (machines.target / NAMES[0]).read_bytes() == BIG
    machines.use("bash")
    machines.fetch()
    assert (machines.target / NAMES[1]).read_bytes() == BIG


def test_a_link_that_is_cut_leaves_no_part_of_a_file_on_the_node(machines):
    names = [f"runs/sent/{number}" for number in range(3)]
    for name in names:
        machines.write(machines.first, name)
    cut = SSH.replace("SHELL_OF_TEST", "dd bs=4K count=1500000 iflag=count_bytes status=none | SHELL_OF_TEST").replace(
        '"$last"', '"$last"; exit 255'
    )
    machines.use("sh", cut)
    with pytest.raises(NodeLost):
        machines.send(["runs/sent"])
    until(lambda: not list(machines.other.runs.glob(".arriving-*")), "the node has removed what arrived")
    assert not (machines.other.runs / "sent").exists()
    machines.use("sh")
    machines.send(["runs/sent"])
    assert [(machines.other.path / name).read_bytes() == BIG for name in names] == [True] * 3


@pytest.mark.parametrize("direction", ["fetch", "send"])
def test_a_stopped_transfer_ends_ssh(machines, direction):
    """`ssh` hangs here, as on a dead link."""
    started = machines.folder / "started"
    machines.use("sh", FAILING.format(f"echo $$ > {started}.part; mv {started}.part {started}; exec sleep 1000"))
    machines.write(machines.first, "runs/sent/a")
    if direction == "fetch":
        machines.fetch(must_stop=started.exists)
    else:
        machines.send(["runs/sent"], must_stop=started.exists)
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_node_that_takes_no_content_does_not_hold_a_run_that_must_end(machines):
    started = machines.folder / "started"
    program = f"echo '[\"runs/sent/a\"]'; sleep 1; touch {started}; while kill -0 $PPID 2>/dev/null; do sleep 0.1; done"
    (machines.folder / "python").write_text(f"#!/bin/sh\n{program}\n")
    machines.write(machines.first, "runs/sent/a")
    machines.send(["runs/sent"], must_stop=started.exists)
    assert started.exists()


def test_modes_times_links_and_empty_folders_are_sent(machines):
    program = machines.write(machines.first, "runs/sent/work/program", b"#!/bin/sh\n")
    program.chmod(0o750)
    os.utime(program, ns=(1_234_567_891, 1_234_567_891))
    (program.parent / ".hidden").symlink_to("program")
    (program.parent / "empty").mkdir(mode=0o700)
    os.mkfifo(program.parent / "fifo")
    machines.send(["runs/sent"])
    there = machines.other.runs / "sent/work"
    assert {path.name for path in there.iterdir()} == {"program", ".hidden", "empty"}
    assert stat.S_IMODE((there / "program").stat().st_mode) == 0o750
    assert (there / "program").stat().st_mtime_ns == 1_234_567_891
    assert (there / ".hidden").readlink() == Path("program")
    assert stat.S_IMODE((there / "empty").stat().st_mode) == 0o700


def test_a_file_that_the_node_has_is_not_sent_again(machines):
    machines.write(machines.first, "runs/sent/a")
    machines.send(["runs/sent"])
    before = (machines.other.runs / "sent/a").stat().st_ino
    machines.send(["runs/sent"])
    assert (machines.other.runs / "sent/a").stat().st_ino == before
    machines.write(machines.first, "runs/sent/a", b"new")
    machines.send(["runs/sent"])
    assert (machines.other.runs / "sent/a").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("wanted_if", "there", "afterwards"),
    [
        ("missing", b"of", b"of"),
        ("missing", None, b"of the first node"),
        ("longer", b"of", b"of the first node"),
        ("longer", b"more than that of the first node", b"more than that of the first node"),
    ],
)
def test_files_that_a_node_wrote_itself_are_kept(machines, wanted_if, there, afterwards):
    machines.write(machines.first, "runs/sent/a", b"of the first node")
    if there is not None:
        machines.write(machines.other, "runs/sent/a", there)
    machines.send(["runs/sent"], wanted_if)
    assert (machines.other.runs / "sent/a").read_bytes() == afterwards


def test_a_node_that_cannot_store_a_file_says_why(machines):
    machines.write(machines.first, "runs/sent/a")
    machines.write(machines.other, "runs/sent", b"a file")
    with pytest.raises(ShardlabError, match=r"gpu0: .*sent"):
        machines.send(["runs/sent"])


def test_a_link_to_a_folder_is_replaced_and_sent_only_after_a_change(machines):
    """A second sending puts nothing into the folder to which the link leads."""
    for step in ("step-1", "step-2"):
        machines.write(machines.first, f"runs/sent/{step}/part")
    link, arrived = machines.first.runs / "sent" / "latest", machines.other.runs / "sent" / "latest"
    for target in ("step-1", "step-1", "step-2"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        machines.send(["runs/sent"])
        assert arrived.readlink() == Path(target)
    assert sorted(path.name for path in (machines.other.runs / "sent").rglob("*")) == [
        "latest",
        "part",
        "part",
        "step-1",
        "step-2",
    ]


def test_a_file_takes_the_place_of_no_folder(machines):
    machines.write(machines.first, "runs/sent/part")
    (machines.other.runs / "sent" / "part").mkdir(parents=True)
    with pytest.raises(ShardlabError, match=r"part: is a folder\. Allowed: a file or nothing"):
        machines.send(["runs/sent"])
    assert list((machines.other.runs / "sent" / "part").iterdir()) == []


def test_a_file_that_shrinks_while_it_is_sent_is_not_stored(machines, monkeypatch):
    machines.write(machines.first, "runs/sent/part")
    send_file = FileSender.send_file

    def send_truncated(sender, path, *details):
        os.truncate(path, 100)
        send_file(sender, path, *details)

    monkeypatch.setattr(FileSender, "send_file", send_truncated)
    with pytest.raises(ShardlabError, match="became shorter while it was sent"):
        machines.send(["runs/sent"])
    assert not (machines.other.runs / "sent" / "part").exists()


@pytest.mark.parametrize("answer", ["", 'MARK\n["runs/sent/part"]\n'], ids=["says nothing", "reads nothing"])
def test_a_node_that_hangs_is_lost(machines, monkeypatch, answer):
    monkeypatch.setattr(node_transfer, "NODE_SILENCE_S", 0.5)
    monkeypatch.setattr("shardlab.remote.remote_conversation.secrets.token_hex", lambda _: "MARK")
    machines.use("sh", FAILING.format(f"printf '{answer}'; sleep {HANG_S}"))
    machines.write(machines.first, "runs/sent/part")
    with pytest.raises(NodeLost, match=r"gpu0: nothing (arrived|could be sent) for 0\.5 s"):
        machines.send(["runs/sent"])
