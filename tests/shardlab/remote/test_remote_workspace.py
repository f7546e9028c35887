"""How shardlab reads the answer of a command that it runs on another machine. A fake `ssh` runs the command on this machine, or
refuses it."""

import json
from pathlib import Path

import pytest

from shardlab.cluster.address import Address
from shardlab.errors import ShardlabError
from shardlab.remote.remote import CommandOutput, Remote
from shardlab.remote.remote_workspace import RemoteWorkspace
from shardlab.remote.ssh_command import make_ssh_command

THERE = RemoteWorkspace(
    schema=1, cluster="far", host="gpu0", port=22, user="alice", identity=None, known_hosts="/w/known",
    host_keys="strict", python="python", workspace="/shared/w", mark="m",
)  # fmt: skip


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Returns a function that puts fake programs `ssh` and `python` first on PATH. `ssh` runs commands on this machine;
    `python` is the shell code `script`.

    shell: code that the login shell runs before the command, as a ~/.bashrc does
    login: code that `ssh` runs before the login
    """

    def made(script, shell="true", login="true"):
        programs = {"ssh": f'{login}\nfor last; do :; done\n{shell}\neval "$last"', "python": script}
        for name, text in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return made


def test_a_document_is_an_answer_whatever_the_exit_code_is(ssh):
    """A command exits with 1 if a run failed, and its JSON document still counts: it says how many runs failed."""
    ssh("""echo '{"failed": 2}'; exit 1""")
    assert THERE.ask_command("jobs", ["status"], dict[str, int]) == {"failed": 2}


def test_output_of_the_users_bashrc_is_no_part_of_the_document(ssh):
    ssh("""echo '{"failed": 2}'""", shell="echo 'Welcome to gpu0'; echo 'quota exceeded' >&2")
    assert THERE.ask_command("jobs", ["status"], dict[str, int]) == {"failed": 2}


def test_given_bytes_arrive_as_standard_input(ssh):
    ssh("cat")
    assert THERE.ask_command("shardlab.remote.upload", [], dict[str, str], input_bytes=json.dumps({"a": "b"}).encode()) == {
        "a": "b"
    }


@pytest.mark.parametrize(
    ("script", "login", "says"),
    [
        ("echo 'error: no such matrix' >&2; exit 2", "true", "gpu0: no such matrix"),
        ("true", "printf 'Connection refused\\r\\n' >&2; exit 255", "gpu0: Connection refused."),
        ("exit 137", "true", "gpu0: exit code 137, and no answer"),
    ],
)
def test_an_answer_without_a_document_gives_an_error_with_the_output(ssh, script, login, says):
    ssh(script, shell="echo 'module loaded' >&2", login=login)
    with pytest.raises(ShardlabError) as caught:
        THERE.ask_command("jobs", ["status"], dict[str, int])
    assert str(caught.value) == says


@pytest.mark.parametrize("says", ["", "echo 'This account is closed.'"])
def test_a_login_shell_that_runs_another_program_is_no_success(ssh, says):
    """`ssh` ends with 0 although the command did not run."""
    ssh("echo '{}'", login=f"{says}\nexit 0")
    for run in (
        lambda: THERE.ask_command("jobs", ["status"], dict[str, int]),
        lambda: THERE.run_interactively("jobs", ["status"]),
    ):
        with pytest.raises(ShardlabError) as caught:
            run()
        assert str(caught.value).startswith("gpu0: the login shell did not run our command, ended with 0, and printed: ")
        assert ("This account is closed" in str(caught.value)) == bool(says)


def test_output_of_a_command_on_a_terminal_comes_without_that_of_startup_files(ssh, capsys):
    ssh("echo 'two runs'; echo 'note: one waits' >&2; exit 3", shell="echo Welcome; printf 'quota: '")
    assert THERE.run_interactively("jobs", ["status"]) == 3
    assert tuple(capsys.readouterr()) == ("two runs\n", "note: one waits\n")


def test_files_are_put_by_root_with_their_content_on_standard_input():
    class Recorded(Remote):
        def run(self, argv, **options):
            self.argv, self.options = argv, options
            return CommandOutput(0, "", "")

    remote = Recorded(Address("gpu0"))
    remote.put(b"content", "/etc/x", mode=0o640, owner="root:slurm")
    assert remote.options == {"timeout_s": 600, "stdin": b"content", "root": True}
    assert remote.argv[-3:][1:] == ["root:slurm", "640"]


def test_ssh_allocates_a_terminal_only_for_commands_shown_on_a_terminal():
    """`ssh` gets -t only for a command that is shown on a terminal, otherwise -T."""
    address = Address("gpu0", known_hosts=Path("/w/known"))
    plain, terminal = make_ssh_command(address), make_ssh_command(address, terminal=True)
    assert ("-T" in plain, "-t" in plain) == (True, False)
    assert ("-T" in terminal, "-t" in terminal) == (False, True)
