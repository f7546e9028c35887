"""The numbers of the users that must be the same on all nodes: slurm, munge, and the user who logs in."""

from __future__ import annotations

import msgspec

from provision.facts import Fact

PROGRAM = """\
login=${SUDO_USER:-$(id -un)}
printf 'login=%s\\n' "$login"
getent passwd slurm munge "$login" || true
"""


class User(msgspec.Struct, frozen=True):
    """Numbers of the user and of its first group."""

    uid: int
    gid: int


class Users(msgspec.Struct, frozen=True):
    """login: whose login this is. known: by name, those of the users asked for that exist."""

    login: str
    known: dict[str, User]


def command(python: str) -> list[str]:
    return ["sh", "-c", PROGRAM]


def parse(stdout: str) -> Users:
    """Raises ValueError."""
    first, *lines = stdout.splitlines() or [""]
    if not first.startswith("login="):
        raise ValueError(f"it begins with {first[:80]!r}.")
    entries = [line.split(":") for line in lines]
    return Users(first.removeprefix("login="), {entry[0]: User(int(entry[2]), int(entry[3])) for entry in entries})


USERS = Fact("users", command, parse, timeout_s=30, root=True)
