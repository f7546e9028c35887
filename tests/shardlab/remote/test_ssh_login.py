"""SSH logins that fail or print additional text. The SSH server of these tests is real and runs on this machine; keys and agent
are those of OpenSSH."""

import contextlib
import gc
import os
import re
import shlex
import shutil
import socket
import subprocess
import threading
import warnings

import paramiko
import pytest
from support_e2e import HANG_S

from shardlab.cluster.address import Address
from shardlab.remote.remote import Remote, Unreachable

pytestmark = [
    # paramiko never closes its socket to an SSH agent, which would cause this warning.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed here"),
]
PASSPHRASE = "a long passphrase"


class Login(paramiko.ServerInterface):
    """Handles the logins to the SSH server of these tests: accepts one key, and runs each command in the user's shell, bash, as
    sshd does."""

    def __init__(self, public, home):
        self.public, self.home = public, home

    def get_allowed_auths(self, _user):
        return "publickey"

    def check_auth_publickey(self, _user, key):
        return paramiko.AUTH_SUCCESSFUL if key.get_base64() == self.public else paramiko.AUTH_FAILED

    def check_channel_request(self, _kind, _number):
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel, command):
        threading.Thread(target=self.execute, args=(channel, command.decode()), daemon=True).start()
        return True

    def execute(self, channel, command):
        # sshd sets SSH_CLIENT. If this variable is set, bash reads ~/.bashrc.
        environment = {"HOME": str(self.home), "PATH": os.environ["PATH"], "SSH_CLIENT": "127.0.0.1 1 22"}
        shell = ["bash", "-c", command]
        done = subprocess.run(shell, capture_output=True, stdin=subprocess.DEVNULL, env=environment, check=False)
        channel.sendall(done.stdout)
        channel.sendall_stderr(done.stderr)
        channel.send_exit_status(done.returncode)
        channel.close()


class Machine:
    """An SSH server on a port of this machine. Its host key can change, as if the machine had been installed anew."""

    def __init__(self, home):
        self.home, self.public, self.transports = home, "", []
        self.install_anew()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def install_anew(self):
        self.host_key = paramiko.ECDSAKey.generate()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                transport = paramiko.Transport(self.listening.accept()[0])
                transport.add_server_key(self.host_key)
                self.transports.append(transport)
                with contextlib.suppress(paramiko.SSHException, EOFError):
                    transport.start_server(threading.Event(), Login(self.public, self.home))

    def end(self):
        self.listening.close()
        for transport in self.transports:
            transport.close()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An SSH server that accepts only the key that the function `key` makes. The client has no agent and no other key."""
    home = tmp_path / "home there"
    home.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    made = Machine(home)
    yield made
    made.end()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # paramiko never closes its socket to an SSH agent
        gc.collect()


def key(machine, tmp_path, passphrase=""):
    """Makes a key and lets the server accept it instead of the previous key. Returns the path of the key."""
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", path], check=True)
    machine.public = path.with_suffix(".pub").read_text().split()[1]
    return path


def login(machine, tmp_path, identity):
    known = tmp_path / "known hosts"
    return Remote(Address("127.0.0.1", machine.port, "alice", identity, known, "accept-new"))


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """Starts an SSH agent of OpenSSH that holds no key, and lets the client use it."""
    said = subprocess.run(["ssh-agent", "-s", "-a", tmp_path / "agent"], capture_output=True, text=True, check=True).stdout
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    yield
    os.kill(int(re.search(r"SSH_AGENT_PID=(\d+)", said)[1]), 15)


def test_a_key_with_a_passphrase_without_a_terminal_gives_working_advice(machine, tmp_path, agent, monkeypatch):
    identity = key(machine, tmp_path, PASSPHRASE)
    there = login(machine, tmp_path, identity)
    with pytest.raises(Unreachable, match=r"^127\.0\.0\.1: the key needs a passphrase; add it to an agent: ssh-add\.$"):
        there.run(["true"], timeout_s=HANG_S)
    (tmp_path / "ask").write_text(f"#!/bin/sh\necho '{PASSPHRASE}'\n")
    (tmp_path / "ask").chmod(0o755)
    asks = {**os.environ, "SSH_ASKPASS": str(tmp_path / "ask"), "SSH_ASKPASS_REQUIRE": "force"}
    subprocess.run(["ssh-add", "-q", identity], env=asks, check=True)
    assert there.run(["true"], timeout_s=HANG_S).code == 0
    there.close()


@pytest.mark.parametrize("socket_of_an_agent", [None, "that ended"])
def test_a_login_without_agent_and_key_names_the_missing_key(machine, tmp_path, monkeypatch, socket_of_an_agent):
    key(machine, tmp_path)
    if socket_of_an_agent:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "an agent that ended"))
    with pytest.raises(Unreachable, match=r"^127\.0\.0\.1: found no SSH key: .* \(ssh-add\), .*\.$") as caught:
        login(machine, tmp_path, None).run(["true"], timeout_s=HANG_S)
    assert "\n" not in str(caught.value)


def test_the_advice_for_a_reinstalled_machine_removes_its_old_host_key(machine, tmp_path):
    identity = key(machine, tmp_path)
    before = login(machine, tmp_path, identity)
    assert before.run(["true"], timeout_s=HANG_S).code == 0
    before.close()
    machine.install_anew()
    with pytest.raises(Unreachable, match="its host key CHANGED") as caught:
        login(machine, tmp_path, identity).run(["true"], timeout_s=HANG_S)
    advice = re.search(r"remove the old key: (.*)\. Otherwise", str(caught.value))[1]
    assert subprocess.run(shlex.split(advice), capture_output=True, check=False).returncode == 0
    after = login(machine, tmp_path, identity)
    assert after.run(["true"], timeout_s=HANG_S).code == 0
    after.close()


def test_output_of_a_bashrc_is_no_part_of_an_answer(machine, tmp_path):
    there = login(machine, tmp_path, key(machine, tmp_path))
    (machine.home / ".bashrc").write_text("printf 'Welcome\\nto the cluster'; echo 'module: not found' >&2\n")
    bare = there.run(["true"], timeout_s=HANG_S)  # the first command of a connection logs in
    assert (bare.code, bare.stdout, bare.stderr) == (0, "", "")
    answer = there.run(["sh", "-c", "printf 'one\\n\\ntwo'; echo three >&2; exit 7"], timeout_s=HANG_S)
    assert (answer.code, answer.stdout, answer.stderr) == (7, "one\n\ntwo", "three\n")
    there.close()
    # Shows that the test can fail: a client that does not look for shardlab's marker also reads the output of ~/.bashrc.
    with paramiko.SSHClient() as bare_client:
        bare_client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
        bare_client.connect("127.0.0.1", machine.port, "alice", key_filename=str(tmp_path / "key"), allow_agent=False)
        assert bare_client.exec_command("true")[1].read() == b"Welcome\nto the cluster"
