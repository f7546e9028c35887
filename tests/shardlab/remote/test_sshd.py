"""Commands on a machine with a real sshd: any login shell, any startup files, the user's SSH configuration, broken links.

The client is the user's OpenSSH; fabric carries the commands.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fabric
import paramiko
import pytest
from support_e2e import HANG_S, until
from support_sshd import start_sshd

from shardlab.remote import fabric_connection, shared_connection
from shardlab.remote.login_shell import make_login_argv
from shardlab.remote.remote import Remote, Unreachable
from shardlab.remote.ssh_command import make_ssh_command

SHELLS = ("bash", "zsh", "tcsh", "fish", "ksh")
NOISE = "echo Welcome; printf 'quota: '; echo 'module: not found' >&2"
# The startup file that each shell reads for a command over SSH. ksh reads none.
STARTUP = {
    "bash": (".bashrc", NOISE),
    "zsh": (".zshenv", NOISE),
    "tcsh": (".tcshrc", "echo Welcome"),
    "fish": ("fish/config.fish", NOISE),
}
WORDS = ["a b", "$HOME", "`id`", "'", '"', "two\nlines", "*", "-n", "é", ";rm", "!!", "\\"]


@pytest.fixture
def sshd(tmp_path, monkeypatch):
    server = start_sshd(tmp_path, monkeypatch)
    yield server
    server.end()


@pytest.fixture
def far(sshd, monkeypatch):
    """The machine `far`, whose host key the workspace knows. OpenSSH does not close a connection by itself."""
    monkeypatch.setattr(shared_connection, "KEEP_OWN_OPEN_S", 7000.0)
    remote = Remote(sshd.address(), may_sudo=False)
    yield remote
    remote.close()


def refusal(address):
    with pytest.raises(Unreachable) as caught:
        Remote(address, may_sudo=False).run(["true"], timeout_s=HANG_S)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def answers(address):
    remote = Remote(address, may_sudo=False)
    answer = remote.run(["echo", "yes"], timeout_s=HANG_S)
    remote.close()
    return (answer.code, answer.stdout) == (0, "yes\n")


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_run_whatever_the_login_shell_is_and_its_startup_file_prints(tmp_path, monkeypatch, shell):
    server = start_sshd(tmp_path, monkeypatch, shell)
    if shell in STARTUP:
        name, text = STARTUP[shell]
        (server.home / name).parent.mkdir(exist_ok=True)
        (server.home / name).write_text(f"{text}\n")
    remote = Remote(server.address(), may_sudo=False)
    answer = remote.run(["printf", "%s\\0", *WORDS], timeout_s=HANG_S, env={"X": "$(id)'"})
    assert (answer.code, answer.stdout.split("\0")[:-1], answer.stderr) == (0, WORDS, "")
    answer = remote.run(["sh", "-c", "cat; printf 'no end' >&2; exit 255"], timeout_s=HANG_S, stdin=b"input\n")
    assert (answer.code, answer.stdout, answer.stderr) == (255, "input\n", "no end")
    assert remote.put(b"content" * 100_000, f"{tmp_path}/a 'file'", mode=0o640, owner="").code == 0
    assert (tmp_path / "a 'file'").read_bytes() == b"content" * 100_000
    remote.close()
    server.end()


@pytest.mark.parametrize("program", ["exec sh", "exit 0", "echo 'This account is closed.'; exit 0"])
def test_a_startup_file_that_swallows_commands_is_named_and_gets_no_input(sshd, far, program, monkeypatch):
    monkeypatch.setattr(fabric_connection, "START_S", 2.0)
    (sshd.home / ".bashrc").write_text(f"{program}\n")
    with pytest.raises(Unreachable) as caught:
        far.run(["sh"], timeout_s=HANG_S, stdin=f"touch {sshd.folder}/ran\n".encode())
    assert str(caught.value).startswith("far: the login shell did not run our command, ended with 0, and printed: ")
    assert ("This account is closed" in str(caught.value)) == ("account" in program)
    assert not (sshd.folder / "ran").exists()


def test_an_error_says_what_the_login_shell_printed(sshd, far):
    (sshd.home / ".bashrc").write_text("echo 'quota exceeded on /home' >&2; exit 7\n")
    with pytest.raises(Unreachable, match="ended with 7, and printed: quota exceeded on /home"):
        far.run(["true"], timeout_s=HANG_S)


def test_a_script_in_a_login_shell_ran_or_the_startup_file_is_named(sshd, far):
    """`bash -lc` succeeds without a word if ~/.bash_profile starts another program."""
    argv = make_login_argv('read line; echo "$1 $line"; exit 5', "an argument")
    profile = sshd.home / ".bash_profile"
    profile.write_text("echo Welcome; echo 'module: not found' >&2; cat; export FOLDER=/scratch\n")
    answer = far.run(argv, timeout_s=HANG_S, stdin=b"input\n")
    assert (answer.code, answer.stdout) == (5, "an argument input\n")
    assert far.run(make_login_argv('echo "$FOLDER"'), timeout_s=HANG_S).stdout == "/scratch\n"
    profile.write_text("exec cat\n")
    answer = far.run(argv, timeout_s=HANG_S, stdin=b"input\n")
    assert (answer.code, answer.stdout) == (1, "")
    assert "the login shell (bash -l) did not run our command (exit code 0)" in answer.stderr
    assert "look in .bash_profile" in answer.stderr


def test_fabric_carries_the_commands_and_paramiko_opens_no_connection(far, monkeypatch):
    commands = []
    run = fabric.Connection.run

    def record(connection, command, **options):
        commands.append(command)
        return run(connection, command, **options)

    monkeypatch.setattr(fabric.Connection, "run", record)
    monkeypatch.setattr(paramiko.SSHClient, "connect", lambda *_, **__: pytest.fail("paramiko opened a connection"))
    assert [far.run(["true"], timeout_s=HANG_S).code for _ in range(3)] == [0, 0, 0]
    assert len(commands) == 3


def test_settings_of_the_user_that_break_programs_do_not_count(sshd):
    sshd.configure(
        "RemoteCommand tmux new -A -s main", "RequestTTY yes", "BatchMode no", f"LocalForward {sshd.port} 127.0.0.1:9",
        "ExitOnForwardFailure yes", "StrictHostKeyChecking no", "StdinNull yes", "ForkAfterAuthentication yes",
        "SessionType none",
    )  # fmt: skip
    assert answers(sshd.address())
    remote = Remote(sshd.address(), may_sudo=False)
    assert remote.run(["cat"], timeout_s=HANG_S, stdin=b"input").stdout == "input"
    remote.close()
    sshd.know(sshd.known_hosts, "another.host")
    assert "its host key is not known" in refusal(sshd.address(known_hosts=sshd.known_hosts))


def test_an_ssh_without_new_settings_gets_no_option_for_them(sshd):
    """OpenSSH before 8.7 refuses to start with an option that it does not know."""
    assert not {"StdinNull", "SessionType", "ForkAfterAuthentication"} & {
        word.partition("=")[0] for word in make_ssh_command(sshd.address())
    }


@pytest.mark.parametrize("setting", ["UserKnownHostsFile", "GlobalKnownHostsFile"])
def test_files_of_host_keys_that_the_configuration_names_count(sshd, setting):
    file = sshd.folder / "keys of the lab"
    sshd.know(file)
    assert "its host key is not known" in refusal(sshd.address(known_hosts=sshd.known_hosts))
    sshd.configure(f'{setting} "{file}" /nonesuch')
    assert answers(sshd.address(known_hosts=sshd.known_hosts))
    assert not sshd.known_hosts.exists()


def test_a_host_key_alias_and_an_agent_of_the_configuration_count(sshd, tmp_path):
    sshd.know(sshd.known_hosts, "lab-gpu0")
    said = subprocess.run(["ssh-agent", "-s", "-a", tmp_path / "agent"], capture_output=True, text=True, check=True).stdout
    try:
        environment = {**os.environ, "SSH_AUTH_SOCK": str(tmp_path / "agent")}
        subprocess.run(["ssh-add", "-q", sshd.identity], env=environment, check=True)
        address = sshd.address(known_hosts=sshd.known_hosts)
        sshd.configure("HostKeyAlias lab-gpu0", identity=False)
        assert "found no SSH key" in refusal(address)
        sshd.configure("HostKeyAlias lab-gpu0", f"IdentityAgent {tmp_path}/agent", identity=False)
        assert answers(address)
    finally:
        os.kill(int(re.search(r"SSH_AGENT_PID=(\d+)", said)[1]), signal.SIGTERM)


def test_an_unknown_key_is_shown_and_a_new_one_is_stored_only_in_the_workspace(sshd):
    users = sshd.folder / "users file"
    sshd.configure(f'UserKnownHostsFile "{users}"', "HashKnownHosts yes")
    words = refusal(sshd.address(known_hosts=sshd.known_hosts))
    assert words.startswith(f"[127.0.0.1]:{sshd.port}: its host key is not known: ssh-ed25519 {sshd.fingerprint}.")
    assert answers(sshd.address(host_keys="accept-new", known_hosts=sshd.known_hosts))
    assert sshd.known_hosts.read_text() == f"[127.0.0.1]:{sshd.port} {sshd.public}\n"
    assert not users.exists()


@pytest.mark.parametrize("host_keys", ["strict", "accept-new"])
def test_a_changed_key_is_refused_and_the_advice_removes_it_from_the_right_file(sshd, host_keys):
    users = sshd.folder / "users file"
    sshd.configure(f'UserKnownHostsFile "{users}"')
    sshd.know(users)
    before = sshd.fingerprint
    sshd.install_anew()
    address = sshd.address(host_keys=host_keys, known_hosts=sshd.known_hosts)
    words = refusal(address)
    assert f"its host key CHANGED: known is {before}, found is ssh-ed25519 {sshd.fingerprint}." in words
    advice = re.search(r"remove the old key: (.*)\. Otherwise", words)[1]
    assert subprocess.run(shlex.split(advice), capture_output=True, check=False).returncode == 0
    assert users.read_text() == ""
    assert "is not known" in refusal(sshd.address(known_hosts=sshd.known_hosts))


@pytest.mark.parametrize("nowhere", ["/dev/null", "none"])
def test_the_advice_for_an_unknown_key_fits_a_client_that_keeps_no_keys(sshd, nowhere):
    sshd.configure(f"UserKnownHostsFile {nowhere}")
    words = refusal(sshd.address(known_hosts=sshd.known_hosts))
    assert f"its host key is not known: ssh-ed25519 {sshd.fingerprint}. Compare it" in words
    assert "name another UserKnownHostsFile than /dev/null in your SSH configuration and log in once with ssh" in words
    assert answers(sshd.address(host_keys="accept-new", known_hosts=sshd.known_hosts))
    assert answers(sshd.address(known_hosts=sshd.known_hosts))


@pytest.mark.parametrize("host_keys", ["strict", "accept-new"])
@pytest.mark.parametrize("way", ["@revoked", "RevokedHostKeys"])
def test_no_advice_helps_to_accept_a_revoked_key(sshd, way, host_keys):
    file = sshd.folder / "revoked keys"
    sshd.know(sshd.known_hosts)
    if way == "@revoked":
        sshd.known_hosts.write_text(f"{sshd.known_hosts.read_text()}@revoked * {sshd.public}\n")
    else:
        file.write_text(f"{sshd.public}\n")
        sshd.configure(f'RevokedHostKeys "{file}"')
    words = refusal(sshd.address(host_keys=host_keys, known_hosts=sshd.known_hosts))
    place = "a line @revoked in a file of known host keys" if way == "@revoked" else f"the file {file}"
    assert f"its host key ssh-ed25519 {sshd.fingerprint} is revoked by {place}, because" in words
    assert words.endswith("Do not log in to this machine until its administrator has given it a new key.")


def test_a_changed_key_from_a_command_is_not_removed_from_a_file(sshd):
    sshd.configure("UserKnownHostsFile /dev/null", f"KnownHostsCommand /bin/echo [127.0.0.1]:{sshd.port} {sshd.public}")
    sshd.install_anew()
    words = refusal(sshd.address(known_hosts=sshd.known_hosts))
    assert f"known is another one, found is ssh-ed25519 {sshd.fingerprint}. If the machine was reinstalled, replace" in words
    assert "the old key where your SSH configuration takes it from. Otherwise" in words


def test_machines_behind_a_jump_host_are_reached_and_each_key_is_checked(sshd):
    far_lines = f"\nHost far gate inner\n  HostName 127.0.0.1\n  Port {sshd.port}\n  User {sshd.user}\n"
    gate_file = sshd.folder / "gate file"
    sshd.know(gate_file, "gate")
    sshd.config.write_text(
        f"Host far\n  ProxyJump gate,inner\n  HostKeyAlias far\nHost gate\n  HostKeyAlias gate\n"
        f'  UserKnownHostsFile "{gate_file}"\n  RemoteCommand tmux\n'
        f"Host inner\n  HostKeyAlias inner\n{far_lines}  GlobalKnownHostsFile none\n  IdentityFile {sshd.identity}\n"
    )
    address = sshd.address(known_hosts=sshd.known_hosts)
    sshd.known_hosts.write_text(f"far {sshd.public}\n")
    assert refusal(address).startswith("inner: its host key is not known")
    sshd.known_hosts.write_text(f"far {sshd.public}\ninner {sshd.public}\n")
    assert answers(address)
    gate_file.unlink()
    assert refusal(address).startswith("gate: its host key is not known")


def test_a_link_that_is_cut_is_an_error_and_the_next_command_logs_in_again(sshd, far):
    started = sshd.folder / "started"
    with ThreadPoolExecutor() as pool:
        running = pool.submit(far.run, ["sh", "-c", f"touch '{started}'; exec sleep 60"], timeout_s=HANG_S)
        until(started.exists, "the command runs")
        sshd.cut()
        with pytest.raises(Unreachable, match=r"^far: the connection broke"):
            running.result(HANG_S)
    assert far.run(["true"], timeout_s=HANG_S).code == 0


def test_more_commands_than_sessions_run_on_one_connection(sshd, far):
    """The server allows 10 sessions on a connection."""
    with ThreadPoolExecutor(20) as pool:
        codes = list(pool.map(lambda code: far.run(["sh", "-c", f"sleep 0.2; exit {code}"], timeout_s=HANG_S).code, range(20)))
    assert codes == list(range(20))
    assert (sshd.folder / "log").read_text().count("Accepted publickey") == 1


def test_an_interruption_ends_the_commands_on_the_machine_and_the_connection(sshd, far):
    started = sshd.folder / "started"
    ended = sshd.folder / "ended"
    script = f"trap 'touch {ended}; exit 3' TERM; touch {started}; while :; do sleep 0.05; done"
    with ThreadPoolExecutor() as pool:
        running = pool.submit(far.run, ["sh", "-c", script], timeout_s=HANG_S)
        until(started.exists, "the command runs")
        commands = far.running
        far.end_commands(HANG_S)
        assert running.result(HANG_S).code is not None
    assert len(commands) == 1
    assert commands[0].startswith("sh -c ")
    assert ended.exists()
    assert far.running == ()
    with pytest.raises(Unreachable, match="interrupted"):
        far.run(["true"], timeout_s=HANG_S)
    until(lambda: not sshd.masters(), "the connection is closed")


USES = """
import os, sys
from pathlib import Path
from shardlab.cluster.address import Address
from shardlab.remote import shared_connection
from shardlab.remote.remote import Remote
shared_connection.KEEP_OWN_OPEN_S = 7000  # OpenSSH does not close the connection by itself
known, limit_s, *argv = sys.argv[1:]
print(Remote(Address("far", known_hosts=Path(known)), may_sudo=False).run(argv, timeout_s=float(limit_s)).code)
"""


def process_with_a_command(sshd, limit_s, *argv):
    sshd.know(sshd.known_hosts)
    words = [sys.executable, "-P", "-c", USES, sshd.known_hosts, str(limit_s), *argv]
    return subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path.cwd())})


def test_no_process_is_left_behind_when_a_program_ends(sshd):
    with process_with_a_command(sshd, HANG_S, "true") as process:
        assert process.communicate(timeout=HANG_S)[0] == b"0\n"
    until(lambda: not sshd.masters(), "the connection is closed")


def test_a_command_ends_at_its_limit_although_the_program_was_killed(sshd):
    started = sshd.folder / "started"
    with process_with_a_command(sshd, 2, "sh", "-c", f"echo $$ > {started}; exec sleep 1000") as process:
        until(lambda: started.exists() and started.read_text(), "the command runs")
        process.kill()
    command = int(started.read_text())
    until(lambda: not Path(f"/proc/{command}").exists(), "the command ends")
    for master in sshd.masters():  # they would end a minute later
        master.kill()


def test_an_unused_connection_is_opened_again(sshd, far):
    assert far.run(["true"], timeout_s=HANG_S).code == 0
    far._used_at_s -= 3600  # long ago
    for master in sshd.masters():
        master.kill()
    assert [far.run(["true"], timeout_s=HANG_S).code for _ in range(2)] == [0, 0]
    assert (sshd.folder / "log").read_text().count("Accepted publickey") == 2


def test_a_refused_connection_and_a_server_that_hangs_up_are_told_apart(sshd):
    address = sshd.address()
    sshd.end()
    assert refusal(address) == f"far: cannot be reached: Connection refused (127.0.0.1, port {sshd.port})."
    with socket.create_server(("127.0.0.1", sshd.port)) as listening:
        thread = threading.Thread(target=lambda: listening.accept()[0].close())
        thread.start()
        assert "it closed the connection during the login" in refusal(address)
        thread.join()
