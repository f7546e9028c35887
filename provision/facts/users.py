"""UID and GID of the users that must have the same numbers on all nodes: slurm, munge, and the user who logs in."""

from __future__ import annotations

import msgspec

from provision.fact import FactQuery

PRINT_USERS = """\
login=${SUDO_USER:-$(id -un)}
printf 'login=%s\\n' "$login"
getent passwd slurm munge "$login" || true
"""


class User(msgspec.Struct, frozen=True):
    """The UID of a user and the GID of the user's first group."""

    uid: int
    gid: int


class Users(msgspec.Struct, frozen=True):
    """The users whose UID and GID must be the same on all nodes."""

    login: str
    """The name of the user who logs in."""
    known: dict[str, User]
    """The users that exist, by name."""


def build_command(python: str) -> list[str]:
    """The command that prints the users slurm and munge, and the user who logs in."""
    return ["sh", "-c", PRINT_USERS]


def parse(stdout: str) -> Users:
    """The users in the output of PRINT_USERS. Raises ValueError."""
    login_line, *user_lines = stdout.splitlines() or [""]
    if not login_line.startswith("login="):
        raise ValueError(f"it begins with {login_line[:80]!r}.")
    passwd_entries = [line.split(":") for line in user_lines]
    return Users(login_line.removeprefix("login="), {entry[0]: User(int(entry[2]), int(entry[3])) for entry in passwd_entries})


USERS = FactQuery("users", build_command, parse, timeout_s=30, root=True)
