"""A real sshd on a loopback port, with a login shell and a home folder of the test's choice, and a client of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from support_e2e import HANG_S, until

from shardlab.cluster.address import Address

PROGRAM = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
# Stands for the login shell in /etc/passwd. SHLVL: bash reads ~/.bashrc for a command of sshd only in the outermost shell.
LOGIN = """\
#!/bin/sh
export HOME='{home}' ZDOTDIR='{home}' XDG_CONFIG_HOME='{home}' SHELL='{shell}' SHLVL=0
cd "$HOME" && exec {shell} -c "$SSH_ORIGINAL_COMMAND"
"""


class Sshd:
    """A running server. `home`: the home folder of a login. `config`: the configuration that `ssh` on PATH reads in place of
    the user's; it has the host `far`, whose key is not known yet."""

    def __init__(self, folder: Path, monkeypatch: Any, shell: str = "bash") -> None:
        self.folder, self.home = folder, folder / "there"
        for path in (self.home, folder / "bin", folder / "cache"):
            path.mkdir()
        self.user, self.identity, self.known_hosts = getpass.getuser(), folder / "key", folder / "known hosts"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.identity], check=True)
        (folder / "login").write_text(LOGIN.format(home=self.home, shell=shutil.which(shell)))
        (folder / "login").chmod(0o755)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.config = folder / "config"
        self.configure()
        (folder / "bin/ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.config} "$@"\n')
        (folder / "bin/ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setenv("HOME", str(folder))
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        self.install_anew()

    def configure(self, *lines: str, identity: bool = True) -> None:
        """Write the client's configuration. lines: further settings of the host `far`; the first value of a setting counts."""
        settings = [*lines, "HostName 127.0.0.1", f"Port {self.port}", f"User {self.user}", "GlobalKnownHostsFile none"]
        settings += [f"IdentityFile {self.identity}"] if identity else ["IdentityFile none"]
        self.config.write_text("Host far gate\n" + "".join(f"  {line}\n" for line in settings))

    def install_anew(self) -> None:
        """Start the server with a new host key."""
        self.end()
        for path in self.folder.glob("host*"):
            path.unlink()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "host"], check=True)
        self.public = " ".join((self.folder / "host.pub").read_text().split()[:2])
        settings = {
            "Port": self.port, "ListenAddress": "127.0.0.1", "HostKey": self.folder / "host", "StrictModes": "no",
            "AuthorizedKeysFile": self.folder / "key.pub", "PidFile": "none", "ForceCommand": self.folder / "login",
            "UsePAM": "no", "PermitRootLogin": "yes", "PasswordAuthentication": "no", "MaxSessions": 10,
        }  # fmt: skip
        (self.folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd refuses to start as root without this folder
        assert PROGRAM is not None
        self._process = subprocess.Popen([PROGRAM, "-D", "-f", self.folder / "sshd_config", "-E", self.folder / "log"])
        until(self._answers, "sshd accepts connections")

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self.folder / "log").read_text()
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port)) as connection:
            return connection.recv(4) == b"SSH-"
        return False

    @property
    def fingerprint(self) -> str:
        said = subprocess.run(["ssh-keygen", "-lf", self.folder / "host.pub"], capture_output=True, text=True, check=True)
        return said.stdout.split()[1]

    def know(self, file: Path, name: str | None = None) -> None:
        """Write the host key into a file of known hosts."""
        file.write_text(f"{name or f'[127.0.0.1]:{self.port}'} {self.public}\n")

    def address(self, **keys: Any) -> Address:
        """The address `far`, whose key is known by the file of the workspace, unless keys say otherwise."""
        if not keys:
            self.know(self.known_hosts)
        return Address("far", **{"known_hosts": self.known_hosts, **keys})

    def cut(self) -> None:
        """End the processes that serve connections, as if the machine had lost its network."""
        for process in psutil.Process(self._process.pid).children():
            process.kill()

    def masters(self) -> list[psutil.Process]:
        """The processes of OpenSSH that hold a connection of this client open."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if process.info["cmdline"] and str(self.config) in process.info["cmdline"][0] + " ".join(process.info["cmdline"])
        ]

    def end(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None:
            process.send_signal(signal.SIGTERM)
            process.wait(HANG_S)


def start_sshd(folder: Path, monkeypatch: Any, shell: str = "bash") -> Sshd:
    """Start a server. Skips the test if sshd or the shell is not installed."""
    if PROGRAM is None:
        pytest.skip("sshd is not installed")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    return Sshd(folder, monkeypatch, shell)
