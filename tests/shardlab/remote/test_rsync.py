"""rsync over SSH: the login shell there may be any, its startup files may print text, and the link may be cut."""

import fcntl
import os
import shutil

import pytest
from support_e2e import until

from shardlab.cluster.address import Address
from shardlab.remote import rsync

NAMES = ("one file", "folder/two's $file")
BIG = bytes(range(256)) * 4000
# A stand-in of `ssh`: runs the command on this machine, in the login shell of the test.
SSH = """\
#!/bin/sh
for last; do test "$last" != -G || exit 0; done
export HOME=FOLDER XDG_CONFIG_HOME=FOLDER BASH_ENV=FOLDER/noise ZDOTDIR=FOLDER
SHELL_OF_TEST -c "$last"
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


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Returns a function that puts a fake `ssh` first on PATH. It returns a function that copies NAMES from the other machine.

    shell: the command that runs the login shell. script: code of `ssh` in place of the login.
    """
    home, target = tmp_path / "home", tmp_path / "target"
    for name in NAMES:
        (home / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "files" / name).write_bytes(BIG)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")

    def prepare(shell, script=SSH):
        for name, text in STARTUP.get(shell, {}).items():
            (home / name).parent.mkdir(exist_ok=True)
            (home / name).write_text(f"{text}\n")
        (tmp_path / "bin/ssh").write_text(script.replace("FOLDER", str(home)).replace("SHELL_OF_TEST", shell))
        (tmp_path / "bin/ssh").chmod(0o755)
        address = Address("gpu0", known_hosts=tmp_path / "known 'hosts'")
        source, login = rsync.remote_words(address, f"{home}/files/")
        return lambda **keys: rsync.run_rsync([*rsync.FROM_OTHERS, "--times", *login], NAMES, source, f"{target}/", **keys)

    prepare.target = target
    return prepare


@pytest.mark.parametrize("shell", STARTUP)
def test_files_arrive_whatever_the_login_shell_is_and_prints(machine, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert machine(shell)() == rsync.RsyncEnd(0)
    assert [(machine.target / name).read_bytes() == BIG for name in NAMES] == [True, True]


def test_links_and_fifos_on_the_other_machine_do_not_arrive(machine, tmp_path):
    transfer = machine("sh")
    link, fifo = (tmp_path / "home/files" / name for name in NAMES)
    link.unlink()
    link.symlink_to("/etc/passwd")
    fifo.unlink()
    os.mkfifo(fifo)
    assert transfer().code in (0, *rsync.INCOMPLETE_COPY_CODES)
    assert not [path for path in machine.target.rglob("*") if not path.is_dir()]


def test_a_folder_that_is_a_link_on_the_other_machine_does_not_become_a_link_here(machine, tmp_path):
    transfer = machine("sh")
    (tmp_path / "home/files/folder").rename(tmp_path / "elsewhere")
    (tmp_path / "home/files/folder").symlink_to(tmp_path / "elsewhere")
    transfer()
    assert not [path for path in machine.target.rglob("*") if path.is_symlink()]


def test_a_login_that_fails_is_named_with_the_words_of_ssh(machine):
    end = machine("sh", FAILING.format("echo 'ssh: connect to host gpu0 port 22: Connection refused' >&2; exit 255"))()
    assert end.is_connection_lost
    assert end.error == "ssh: connect to host gpu0 port 22: Connection refused"


def test_a_login_that_starts_no_command_is_no_transfer(machine):
    """The account has no login shell, and a program prints a text and ends with 0 instead."""
    end = machine("sh", FAILING.format("echo 'This account is currently not available.'"))()
    assert end.is_connection_lost
    assert not machine.target.exists() or not list(machine.target.iterdir())


def test_a_machine_without_rsync_is_not_a_broken_connection(machine, tmp_path):
    (tmp_path / "tools").mkdir()
    for tool in ("sh", "base64"):
        (tmp_path / "tools" / tool).symlink_to(shutil.which(tool))
    end = machine("sh", SSH.replace("SHELL_OF_TEST", f"PATH={tmp_path}/tools sh"))()
    assert (end.code, end.is_connection_lost) == (127, False)
    assert "rsync" in end.error
    assert "not found" in end.error


def test_a_link_that_is_cut_ends_the_transfer_and_the_next_one_continues(machine):
    cut = SSH.replace('"$last"', '"$last" | { dd bs=4K count=600000 iflag=bytes_of status=none; kill -9 $$; }')
    end = machine("bash", cut)()
    assert end.is_connection_lost
    assert not all((machine.target / name).exists() for name in NAMES)
    assert machine("bash")() == rsync.RsyncEnd(0)
    assert [(machine.target / name).read_bytes() == BIG for name in NAMES] == [True, True]


def test_a_stopped_transfer_ends_ssh_and_gives_the_lock_free(machine, tmp_path):
    """`ssh` hangs here, as on a dead link. Its process ends with the transfer, so nobody holds the lock any longer."""
    started = tmp_path / "started"
    transfer = machine("sh", FAILING.format(f"echo $$ > {started}.part; mv {started}.part {started}; exec sleep 1000"))
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert transfer(must_stop=started.exists, lock_descriptors=(lock,)) == rsync.RsyncEnd(None)
    os.close(lock)
    other = os.open(tmp_path / "lock", os.O_RDWR)
    until(lambda: _is_free(other), "the lock is free")
    os.close(other)


def _is_free(descriptor):
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
