"""The Python environment of a machine, by the files that mark its complete installation."""

from __future__ import annotations

import msgspec

from provision.fact import Fact
from shardlab.decoders import decoder

# The interpreter stands at ENVIRONMENT/bin/python.
PROGRAM = """\
cd "$(dirname "$(dirname "$0")")" 2>/dev/null || exit 0
for mark in packages source differences; do test -f "$mark.made" && printf '%s=%s\\n' "$mark" "$(cat "$mark.made")"; done
printf 'version=%s\\n' "$(bin/python -c 'import platform; print(platform.python_version())' 2>/dev/null)"
if test -f files.made && test "$(find venv -name __pycache__ -prune -o -type f -print | wc -l)" -lt "$(cat files.made)"; then
    echo incomplete=yes
fi
"""


class InstalledEnvironment(msgspec.Struct, frozen=True):
    """The parts of the environment. None: the part is missing or not complete."""

    packages: str | None = None  # the digest of the tested set of packages
    source: str | None = None  # the digest of our own source
    version: str | None = None  # the version of Python
    differences: str | None = None  # from the tested packages, of an environment that we did not make
    incomplete: str | None = None  # yes: files of the packages are missing, as after a purge


decoder(InstalledEnvironment)  # `parse` runs in the threads of several nodes


def command(python: str) -> list[str]:
    """Reads the marks beside the interpreter; needs only a shell."""
    return ["sh", "-c", PROGRAM, python]


def parse(stdout: str) -> InstalledEnvironment:
    """The digests; None for a mark that does not exist."""
    pairs = dict(line.split("=", 1) for line in stdout.splitlines() if "=" in line)
    return msgspec.convert({name: value or None for name, value in pairs.items()}, InstalledEnvironment)


ENVIRONMENT = Fact("environment", command, parse, timeout_s=300)  # a network folder with tens of thousands of files
