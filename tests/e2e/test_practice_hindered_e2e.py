"""`provision` on practice nodes with an obstacle: apt's lock is held, the user presses Ctrl-C, or a worker was drained. Also:
what another user of the machine can do with practice nodes."""

import json
import re
import shlex
import signal
import subprocess

import pytest
from support_e2e import HANG_S, until
from support_long import only_in_long_form
from support_practice import WHY, states

from provision.practice import base

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(WHY is not None, reason=WHY or "")]

# A program that takes dpkg's lock in the way that apt takes it (apt ignores locks of flock(1)). It holds the lock until it is
# killed.
HOLD = """
import fcntl, time
lock = open("/var/lib/dpkg/lock-frontend", "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
open("/run/held", "w").close()
time.sleep(3600)
"""
TAKEN = """
import fcntl
try:
    fcntl.lockf(open("/var/lib/dpkg/lock-frontend", "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("taken")
"""
APT = "pgrep -f '^/?[a-z/]*apt-get .*install [a-z]' || true"


def waits_for_apt(practice):
    """Returns whether apt-get on work2 waits for a lock that another process holds."""
    installing = practice.run("work2", APT).split()
    taken = practice.run("work2", f"python3 -c {shlex.quote(TAKEN)}") == "taken\n"
    return taken and installing and practice.run("work2", APT).split() == installing


@pytest.fixture
def held_lock(practice):
    """Removes slurmd from work2, so that `provision` must install it, and holds dpkg's lock there. Gives the test a function
    that releases the lock."""
    practice.run("work2", "apt-get -qq -y remove slurmd")
    practice.run("work2", f"rm -f /run/held; systemd-run -q --unit=hold python3 -c {shlex.quote(HOLD)}")
    until(lambda: practice.run("work2", "ls /run/held 2>/dev/null || true"), "the lock is held")

    def let_go():
        # If the lock is released a second time, there is no unit to stop, which is no error.
        practice.run("work2", "systemctl stop hold 2>/dev/null || true")

    yield let_go
    let_go()


@only_in_long_form
def test_provision_waits_for_an_apt_lock_until_ctrl_c(practice, held_lock):
    with practice.start() as process:
        until(lambda: waits_for_apt(practice), "apt waits")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert re.search(
        r"^interrupted after \d+ changes? had begun; run the same command again to continue; ", stderr, re.MULTILINE
    )
    assert "Traceback" not in stderr
    until(lambda: not practice.run("work2", APT).split(), "apt ends on the node too")
    with practice.start() as process:
        until(lambda: waits_for_apt(practice), "apt waits again")
        held_lock()
        stdout, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, stderr
    said = json.loads(stdout)
    assert "install slurmd" in states(said)["work2", "packages"]["says"]
    assert said["verified"] is True


@only_in_long_form
def test_a_drained_worker_is_reported_with_its_reason_or_resumed(practice):
    practice.run("head", "scontrol update nodename=work1 state=drain reason='the fan | is loud'")
    one = states(practice.provision("plan", code=1))
    assert one["work1", "slurm-nodes"]["state"] == "failed"
    (says,) = one["work1", "slurm-nodes"]["says"]
    assert "the state drain; the reason, given by the user root, is: the fan | is loud." in says
    command = says.rpartition("run on head: ")[2]
    practice.run("head", command)
    assert practice.provision("plan")["changes"] == 0
    practice.run("head", "runuser -u slurm -- scontrol update nodename=work1 state=drain reason='Not responding'")
    said = practice.provision()
    assert states(said)["head", "slurm-nodes"]["says"][0] == "resume work1, whose state in Slurm is drain (Not responding)"
    assert said["verified"] is True


@pytest.mark.parametrize("user", [1000, 65534])
def test_another_user_of_this_machine_gains_nothing_from_practice_nodes(practice, user):
    def run(*words):
        user_ = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
        return subprocess.run([*user_, *map(str, words)], capture_output=True, text=True, check=False)

    machine = practice.machine("work1")
    keys = machine.folder / f"upper/home/{base.PRACTICE_USER}/.ssh/authorized_keys"
    assert keys.is_file()
    before = keys.read_bytes()
    for script in ('cat "$1"', 'echo ssh-ed25519 mine >> "$1"', 'ls "$(dirname "$1")"'):
        assert run("sh", "-c", script, "try", keys).returncode != 0
    assert keys.read_bytes() == before
    for secret in (machine.host_key_path, practice.folder / ".shardlab/practice/id_ed25519"):
        assert secret.is_file()
        assert run("cat", secret).returncode != 0
    # Root of a node makes a setuid program and a device file in the shared folder. Neither works on this machine or on the
    # nodes.
    shared = practice.shared
    make = "cp /usr/bin/id {0}/setuid; chown root:root {0}/setuid; chmod 4755 {0}/setuid; mknod -m 666 {0}/memory c 1 1"
    practice.run("work1", make.format(shared))
    try:
        assert (shared / "setuid").stat().st_mode & 0o4000
        done = run(shared / "setuid", "-u")
        assert (done.returncode, done.stdout) == (0, f"{user}\n")
        with pytest.raises(PermissionError):
            (shared / "memory").open("rb")
        assert practice.run("work1", f"{shared}/setuid -u", root=False) == f"{base.PRACTICE_UID}\n"
        options = practice.run("work1", f"findmnt -no OPTIONS {shared}").split(",")
        assert {"nosuid", "nodev"} <= set(options)
        for script in ('echo x > "$1/mine"', 'rm -f "$1/setuid"', 'echo x >> "$1"/shardlab/*/source.made'):
            assert run("sh", "-c", script, "try", shared).returncode != 0
    finally:
        practice.run("work1", f"rm -f {shared}/setuid {shared}/memory")
