"""Commands over SSH on a real server: the exit code that a command returns, its time limit, and the log of a node."""

import re

import pytest
from support_e2e import HANG_S
from support_ssh_server import SshServer, make_home

from provision.providers.ssh import SshNode
from shardlab.cluster.address import Address
from shardlab.remote import remote
from shardlab.remote.remote import Remote


@pytest.fixture(scope="module")
def login(tmp_path_factory):
    """Starts an SSH server that accepts every key. Returns the arguments of a node: (host, port, user, private key, remote)."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        identity = make_home(folder, patch)
        server = SshServer(accepts=True)
        address = Address("127.0.0.1", server.port, "alice", identity, folder / "known_hosts", "accept-new")
        reached = Remote(address)
        yield "127.0.0.1", server.port, "alice", identity, reached
        reached.close()
        server.end()


@pytest.mark.parametrize(
    ("script", "limit_s", "code"),
    [
        ("exit 3", HANG_S, 3),
        # These are the exit codes of `timeout` at the limit, but the commands end long before their limit.
        ("exit 124", HANG_S, 124),
        ("kill -9 $$", HANG_S, 137),
        ("sleep 600", 0.2, None),
        ('trap "" TERM; sleep 600', 0.2, None),
    ],
    ids=["own exit code", "exit code 124", "killed", "ended at its limit", "killed at its limit"],
)
def test_a_remote_command_has_no_exit_code_only_if_it_was_ended_at_its_limit(login, monkeypatch, script, limit_s, code):
    monkeypatch.setattr(remote, "GRACE_S", 2.0)
    answer = login[-1].run(["sh", "-c", f"echo out; echo err >&2; {script}"], timeout_s=limit_s)
    # Some shells add a line about the killed command.
    assert (answer.code, answer.stdout, answer.stderr.splitlines()[0]) == (code, "out\n", "err")


def test_the_log_of_a_node_has_the_output_and_the_exit_code_of_each_command(login, tmp_path):
    host, port, user, identity, reached = login
    node = SshNode("gpu0", host, port, user, identity, "python3", remote=reached, log_path=tmp_path / "log" / "gpu0.log")
    assert node.run(["sh", "-c", "echo started; echo 'no space left' >&2; exit 4"], timeout_s=HANG_S).code == 4
    assert node.run(["cat"], timeout_s=HANG_S, stdin=b"password", secret=True).stdout == "password"
    assert node.run(["sleep", "600"], timeout_s=0.2).code is None  # meant to be reached
    assert node.put(b"password", str(tmp_path / "file"), mode=0o600, owner="").code == 0
    assert (tmp_path / "file").read_bytes() == b"password"
    lines = (tmp_path / "log" / "gpu0.log").read_text().splitlines()
    logged = [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} ", "", line) for line in lines]
    assert logged == [
        "$ sh -c 'echo started; echo '\"'\"'no space left'\"'\"' >&2; exit 4'",
        "  started",
        "  no space left",
        "  -> 4",
        "$ cat",
        "  -> 0",
        "$ sleep 600",
        "  -> ended at its limit",
        f"$ put {tmp_path}/file (8 bytes, 600, )",
        "  -> 0",
    ]
