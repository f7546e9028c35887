"""The numbers of the users that must be the same on all nodes: slurm, munge, and the user who logs in."""

from __future__ import annotations

import msgspec

from provision.fact import Fact

PROGRAM = """\
login=${SUDO_USER:-$(id -un)}
printf 'login=%s\\n' "$login"
getent passwd slurm munge "$login" || true
"""


class User(msgspec.Struct, frozen=True):
    """The numbers of a user and of its first group."""

    uid: int
    gid: int


class Users(msgspec.Struct, frozen=True):
    """The users whose numbers must agree between nodes."""

    login: str  # the user who logs in
    known: dict[str, User]  # by name; a user that does not exist is not in it


def command(python: str) -> list[str]:
    """Asks for the users slurm and munge, and the user who logs in."""
    return ["sh", "-c", PROGRAM]


def parse(stdout: str) -> Users:
    """Raises ValueError."""
    first, *lines = stdout.splitlines() or [""]
    if not first.startswith("login="):
        raise ValueError(f"it begins with {first[:80]!r}.")
    entries = [line.split(":") for line in lines]
    return Users(first.removeprefix("login="), {entry[0]: User(int(entry[2]), int(entry[3])) for entry in entries})


USERS = Fact("users", command, parse, timeout_s=30, root=True)
