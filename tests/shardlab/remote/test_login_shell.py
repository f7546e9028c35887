"""A script in a login shell, whose startup files may print text and leave programs in the background."""

import os
import signal
import subprocess

import pytest
from support_e2e import HANG_S

from shardlab.remote.login_shell import make_login_argv


def run(tmp_path, monkeypatch, profile, script, *arguments):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bash_profile").write_text(profile)
    argv = make_login_argv(script, *arguments)
    return subprocess.run(argv, input=b"a line\n", capture_output=True, timeout=HANG_S, check=False)


def test_the_script_gets_its_input_and_only_its_output_is_seen(tmp_path, monkeypatch):
    done = run(tmp_path, monkeypatch, "read stolen; echo noise; printf half", 'cat; echo "$1"; exit 7', "an argument")
    assert (done.returncode, done.stdout) == (7, b"a line\nan argument\n")


def test_a_program_that_a_startup_file_leaves_in_the_background_is_not_waited_for(tmp_path, monkeypatch):
    """As `eval $(ssh-agent)` in many profiles: the program closes only its standard input, output and errors."""
    profile = f"sleep 1000000 < /dev/null > /dev/null 2>&1 &\necho $! > {tmp_path}/pid"
    done = run(tmp_path, monkeypatch, profile, "echo done")
    process = int((tmp_path / "pid").read_text())
    os.kill(process, signal.SIGKILL)  # raises ProcessLookupError if it had ended
    assert (done.returncode, done.stdout) == (0, b"done\n")


@pytest.mark.parametrize("profile", ["exec true", "exit 0"])
def test_a_startup_file_that_takes_the_place_of_the_shell_is_a_failure_that_names_it(tmp_path, monkeypatch, profile):
    done = run(tmp_path, monkeypatch, profile, "echo done")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"look in .bash_profile" in done.stderr
