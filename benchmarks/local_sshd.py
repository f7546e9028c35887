"""A real SSH server on the loopback interface of this machine, with keys of its own, for benchmarks."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

ADDRESS = "127.0.0.1"
STARTS_S = 10.0  # seconds within which the server accepts connections


def find() -> str | None:
    """The path of the program sshd, or None if it is not installed."""
    return shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")


class LocalSshd:
    """A running server. It accepts the user of this process, with the key `identity`. The end of the `with` block ends it."""

    def __init__(self, program: str, folder: Path) -> None:
        """Start the server. program: the path of sshd. folder: a new folder for keys and settings, which is made."""
        folder.mkdir()
        self._log = folder / "log"
        self.user, self.identity, self.known_hosts = getpass.getuser(), folder / "user", folder / "known_hosts"
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
        with socket.create_server((ADDRESS, 0)) as free:
            self.port: int = free.getsockname()[1]
        self.known_hosts.write_text(f"[{ADDRESS}]:{self.port} {(folder / 'host.pub').read_text()}")
        settings = {
            "Port": self.port, "ListenAddress": ADDRESS, "HostKey": folder / "host", "AuthorizedKeysFile": folder / "user.pub",
            "StrictModes": "no", "PidFile": "none",
        }  # fmt: skip
        (folder / "settings").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        if getpass.getuser() == "root":
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd refuses to start as root without this folder
        self._process = subprocess.Popen([program, "-D", "-f", str(folder / "settings"), "-E", str(self._log)])
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise

    def _wait(self) -> None:
        """Wait until the server accepts connections. Raises SystemExit if it does not, e.g. because another program has just
        taken its port."""
        ends = time.monotonic() + STARTS_S
        while self._process.poll() is None and time.monotonic() < ends:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection((ADDRESS, self.port)) as connection:
                if connection.recv(4) == b"SSH-" and self._process.poll() is None:
                    return
            time.sleep(0.05)
        raise SystemExit(f"sshd did not start: {self._log.read_text()}")

    @property
    def command(self) -> str:
        """The ssh command for this server without the host, as one text for the option -e of rsync."""
        return f"ssh -T -i {self.identity} -p {self.port} -o BatchMode=yes -o UserKnownHostsFile={self.known_hosts}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
