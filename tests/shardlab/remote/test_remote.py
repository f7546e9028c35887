"""The login to a real SSH server stops if the host key is unknown or has changed. A file is not written if other bytes arrive
than were sent."""

import hashlib
import os
import socket
import subprocess
from pathlib import Path

import paramiko
import pytest
from support_e2e import HANG_S
from support_ssh_server import SshServer, make_home

from shardlab.cluster.address import Address
from shardlab.remote.login_failure import compute_key_fingerprint
from shardlab.remote.remote import Remote, Unreachable, make_put_command


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Starts an SSH server on this machine that refuses every login, and returns (port, host key)."""
    make_home(tmp_path, monkeypatch)
    started = SshServer(accepts=False)
    yield started.port, started.key
    started.end()


def log_in(port, known, host_keys="strict"):
    address = Address("127.0.0.1", port, "alice", known.with_name("identity"), known, host_keys)
    with pytest.raises(Unreachable) as caught:
        Remote(address).run(["true"], timeout_s=HANG_S)
    return str(caught.value)


def test_an_unknown_host_key_stops_with_the_fingerprint_that_openssh_prints(server, tmp_path):
    port, key = server
    known = tmp_path / "known_hosts"
    said = log_in(port, known)
    assert "its host key is not known" in said
    public = tmp_path / "key.pub"
    public.write_text(f"{key.get_name()} {key.get_base64()}\n")
    printed = subprocess.run(["ssh-keygen", "-lf", public], capture_output=True, text=True, check=True).stdout.split()[1]
    assert printed == compute_key_fingerprint(key.asbytes())
    assert printed in said
    assert not known.exists()


def test_accept_new_stores_an_unknown_host_key_and_refuses_a_changed_one(server, tmp_path):
    port, key = server
    known = tmp_path / "known_hosts"
    # The login got as far as the keys of the user, so the host key was accepted.
    assert "it accepts no SSH key of this user" in log_in(port, known, "accept-new")
    assert known.read_text() == f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n"
    assert "it accepts no SSH key of this user" in log_in(port, known)
    other = paramiko.ECDSAKey.generate()
    known.write_text(f"[127.0.0.1]:{port} {other.get_name()} {other.get_base64()}\n")
    for host_keys in ("strict", "accept-new"):
        said = log_in(port, known, host_keys)
        assert "its host key CHANGED" in said
        assert compute_key_fingerprint(key.asbytes()) in said


def test_an_unreachable_machine_is_reported_in_words(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    for host, why in (("127.0.0.1", f"Connection refused (port {port})"), ("nonesuch.invalid", "")):
        with pytest.raises(Unreachable) as caught:
            Remote(Address(host, port)).run(["true"], timeout_s=HANG_S)
        assert str(caught.value).startswith(f"{host}: cannot be reached: {why}")
        assert "Errno" not in str(caught.value)


def put(path: Path, promised: bytes, arrived: bytes) -> int:
    """Executes, on this machine, the command that shardlab uses to write a file on a node. Returns its exit code. promised: the
    content that the command expects; arrived: the bytes that it reads."""
    argv = make_put_command(promised, str(path), mode=0o640, owner=f"{os.getuid()}:{os.getgid()}")
    return subprocess.run(argv, input=arrived, capture_output=True, check=False).returncode


@pytest.mark.parametrize("arrived", [b"", b"ne", b"new\n", b"other", b"new" * 100_000])
def test_a_file_that_arrives_with_other_bytes_is_not_written(tmp_path, arrived):
    path = tmp_path / "a 'file'"
    path.write_bytes(b"old")
    assert put(path, b"new", arrived) != 0
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_arrives_whole_takes_its_place_with_its_mode(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    assert put(path, b"new", b"new") == 0
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o640)
    assert list(tmp_path.iterdir()) == [path]
    assert hashlib.sha256(b"new").hexdigest() in make_put_command(b"new", "x", mode=0o600, owner="root:")


def test_a_write_that_is_told_to_end_leaves_nothing(tmp_path):
    path = tmp_path / "file"
    argv = make_put_command(b"new", str(path), mode=0o640, owner=f"{os.getuid()}:{os.getgid()}")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True) as process:
        while not list(tmp_path.iterdir()):
            assert process.poll() is None
        os.killpg(process.pid, 15)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []
