"""A stand-in of a node for tests: a process on this machine with its own mount namespace.

The process has its own /etc, /root and mounts, and uses the tools of this machine. An operation of `provision` makes real
changes there, and the changes do not reach the rest of this machine.
"""

import os
import subprocess
from pathlib import Path

from support_e2e import HANG_S

from provision.fact import FactAnswers
from provision.operation import Nothing, Target
from shardlab.cluster.cluster_keys import NodeEntry
from shardlab.remote.remote import CommandOutput, make_put_command

SETTLE = r"""\
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
mkdir -m 700 "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$1/upper,workdir=$1/work" /etc
chmod 755 /etc
mount --bind "$1/root" /root
printf '# theirs\nproc /proc proc defaults 0 0' > /etc/fstab  # no end of line, as people leave it
echo ready
exec sleep 600
"""


def why_not() -> str | None:
    """Why this machine cannot run a node in a mount namespace of its own, in one line; None if it can."""
    if os.geteuid() != 0:
        return "a node aside needs root"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return None if done.returncode == 0 else "a node aside needs a mount namespace of its own"


class Aside:
    """A node in its own mount namespace, with the methods of `provision`'s class Node."""

    port, user, wheelhouse, python, may_sudo = None, None, None, "python3", True

    def __init__(self, name: str, host: str, folder: Path) -> None:
        self.name, self.host, self.address = name, host, host
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-euc", SETTLE, "settle", folder], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"

    def run(self, argv, *, timeout_s, env=None, stdin=b"", root=False, secret=False) -> CommandOutput:
        words = ["nsenter", "--mount", f"--target={self.process.pid}", "env", "-u", "SUDO_USER", "LC_ALL=C", *argv]
        done = subprocess.run(words, input=stdin, capture_output=True, timeout=timeout_s, check=False)
        return CommandOutput(done.returncode, done.stdout.decode(), done.stderr.decode())

    def put(self, content, path, *, mode, owner) -> CommandOutput:
        return self.run(make_put_command(content, path, mode=mode, owner=owner), timeout_s=HANG_S, stdin=content, root=True)

    def target(self) -> Target:
        return Target(self, FactAnswers(self), NodeEntry(name=self.name))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def settle(operation, site, target) -> list[str]:
    """Plan an operation of `provision`, make its changes, and check that a second plan has no changes.

    Returns the descriptions of the changes that were made."""
    planned = operation.plan(site, target)
    assert not isinstance(planned, Nothing), planned
    for change in planned:
        change.make(target.node)
    target.facts.forget_answers()
    again = operation.plan(site, target)
    assert isinstance(again, Nothing), [change.description for change in again]
    return [change.description for change in planned]
