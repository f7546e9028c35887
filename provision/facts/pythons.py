"""The Python interpreters of a machine that its login shell finds, and the interpreters that its modules would add."""

from __future__ import annotations

import re

from provision.fact import FactQuery
from shardlab.remote.login_shell import make_login_argv

LIST_PYTHONS = """\
for name in python3.14 python3.13 python3.12 python3.11 python3; do
    path=$(command -v "$name") || continue
    printf '%s %s\\n' "$path" "$("$path" -c 'import platform; print(platform.python_version())')"
done
"""
_PYTHON_LINE = re.compile(r"^(/[A-Za-z0-9._/+-]+) (\d+)\.(\d+)\.\d+")
OLDEST_PYTHON = (3, 11)


def build_command(python: str) -> list[str]:
    return make_login_argv(LIST_PYTHONS)


def parse(stdout: str) -> dict[str, tuple[int, int]]:
    """The version (major, minor) of each interpreter, by its path. LIST_PYTHONS prints the newest interpreter first."""
    return {match[1]: (int(match[2]), int(match[3])) for line in stdout.splitlines() if (match := _PYTHON_LINE.match(line))}


PYTHONS = FactQuery("pythons", build_command, parse, timeout_s=60)
