"""A mount that does not answer is reported as hanging, and no command waits for it longer than a limit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support_e2e import HANG_S

from provision.facts import mounts
from provision.facts.mounts import ANSWERS_S, DESCRIBE_MOUNT

# Makes a separate mount namespace, mounts a FUSE file system there whose server never answers, and runs the given command.
HUNG = """
import ctypes, os, subprocess, sys
folder, *words = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, MS_REC, MS_PRIVATE, MNT_DETACH = 0x20000, 0x4000, 0x40000, 2
def check(code, what):
    if code:
        sys.exit(f"no FUSE: {what}: {os.strerror(ctypes.get_errno())}")
check(libc.unshare(CLONE_NEWNS), "unshare")
check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "private")
try:
    server = os.open("/dev/fuse", os.O_RDWR)
except OSError as error:
    sys.exit(f"no FUSE: {error}")
options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
check(libc.mount(b"nas:/export", folder.encode(), b"fuse", 0, options), "mount")
done = subprocess.run(words)
os.close(server)
libc.umount2(folder.encode(), MNT_DETACH)
sys.exit(done.returncode)
"""


def quick(folder: Path) -> list[str]:
    """Returns the command that asks about a folder, with a time limit of one second."""
    program = DESCRIBE_MOUNT.replace(f"timeout -k 1 {ANSWERS_S} ", "timeout -k 1 1 ")
    assert program.count("timeout -k 1 1 stat") == 2
    return ["sh", "-c", program, "place", str(folder)]


def test_a_mount_whose_server_does_not_answer_hangs(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    command = [sys.executable, "-c", HUNG, str(folder), *quick(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    if "no FUSE" in done.stderr or (os.geteuid() != 0 and done.returncode):
        pytest.skip("this machine does not let a test mount a file system of its own")
    found = mounts.parse(done.stdout)
    assert (found.hangs, found.there) == (True, True)
    assert (found.mount.source, found.mount.kind) == ("nas:/export", "fuse")
    assert mounts.parse(subprocess.run(quick(folder), capture_output=True, text=True, check=True).stdout).hangs is False


@pytest.mark.parametrize(
    ("stat", "hangs", "there"),
    [
        ("exec sleep 600", True, True),
        ("trap '' TERM; while :; do sleep 1; done", True, True),  # this stat ends only with SIGKILL
        ("echo 'stat: cannot stat: Stale file handle' >&2; exit 1", True, True),
        ("echo 'stat: cannot statx: No such file or directory' >&2; exit 1", False, False),
        ("exit 0", False, True),
    ],
)
def test_the_output_of_stat_decides_whether_a_folder_hangs(tmp_path, stat, hangs, there):
    program = tmp_path / "stat"
    program.write_text(f"#!/bin/sh\n{stat}\n")
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(quick(tmp_path), capture_output=True, text=True, timeout=HANG_S, env=environment, check=True)
    found = mounts.parse(done.stdout)
    assert (found.hangs, found.there) == (hangs, there)
