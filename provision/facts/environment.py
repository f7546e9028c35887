"""The Python environment of a machine, by the files that mark its complete installation."""

from __future__ import annotations

import msgspec

from provision.facts import Fact
from shardlab.decoders import decoder

# The interpreter stands at ENVIRONMENT/bin/python.
PROGRAM = """\
cd "$(dirname "$(dirname "$0")")" 2>/dev/null || exit 0
for mark in packages source; do test -f "$mark.made" && printf '%s=%s\\n' "$mark" "$(cat "$mark.made")"; done
printf 'version=%s\\n' "$(bin/python -c 'import platform; print(platform.python_version())' 2>/dev/null)"
"""


class Environment(msgspec.Struct, frozen=True):
    """Digests of what was installed, None: it is not there or not whole. version: of Python."""

    packages: str | None = None
    source: str | None = None
    version: str | None = None


decoder(Environment)  # `parse` runs in the threads of several nodes


def command(python: str) -> list[str]:
    return ["sh", "-c", PROGRAM, python]


def parse(stdout: str) -> Environment:
    pairs = dict(line.split("=", 1) for line in stdout.splitlines() if "=" in line)
    return msgspec.convert({name: value or None for name, value in pairs.items()}, Environment)


ENVIRONMENT = Fact("environment", command, parse, timeout_s=60)
