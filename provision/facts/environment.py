"""The Python environment of a machine, read from the marker files that a complete installation contains."""

from __future__ import annotations

import msgspec

from provision.fact import FactQuery
from shardlab.files.decoders import get_decoder

# $0 is the path of the interpreter, ENVIRONMENT/bin/python. Each marker file, such as packages.made, contains a digest or text.
DESCRIBE_ENVIRONMENT = """\
cd "$(dirname "$(dirname "$0")")" 2>/dev/null || exit 0
for mark in packages source differences; do test -f "$mark.made" && printf '%s=%s\\n' "$mark" "$(cat "$mark.made")"; done
printf 'version=%s\\n' "$(bin/python -c 'import platform; print(platform.python_version())' 2>/dev/null)"
if test -f files.made && test "$(find venv -name __pycache__ -prune -o -type f -print | wc -l)" -lt "$(cat files.made)"; then
    echo incomplete=yes
fi
"""


class InstalledEnvironment(msgspec.Struct, frozen=True):
    """The parts of an installed Python environment. None: the part is missing or not complete."""

    packages: str | None = None
    """The digest of the tested set of packages."""
    source: str | None = None
    """The digest of shardlab's source."""
    version: str | None = None
    """The version of Python."""
    differences: str | None = None
    """How an environment that shardlab did not create differs from the tested packages."""
    incomplete: str | None = None
    """`yes`: files of the packages are missing, for example because the site deleted old files."""


get_decoder(InstalledEnvironment)  # msgspec prepares the type here, before several threads call `parse`


def build_command(python: str) -> list[str]:
    """The command that reads the marker files of the environment that contains the interpreter `python`. Needs only a shell."""
    return ["sh", "-c", DESCRIBE_ENVIRONMENT, python]


def parse(stdout: str) -> InstalledEnvironment:
    """The environment as DESCRIBE_ENVIRONMENT describes it. A part is None if its marker file does not exist."""
    value_by_name = dict(line.split("=", 1) for line in stdout.splitlines() if "=" in line)
    return msgspec.convert({part_name: value or None for part_name, value in value_by_name.items()}, InstalledEnvironment)


# DESCRIBE_ENVIRONMENT counts up to tens of thousands of files over NFS
ENVIRONMENT = FactQuery("environment", build_command, parse, timeout_s=300)
