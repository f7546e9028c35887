"""Which Debian packages a machine has, and whether an installation was interrupted."""

from __future__ import annotations

import msgspec

from provision.facts import Fact

PROGRAM = """\
dpkg-query -W -f '${db:Status-Abbrev}\\t${Package}\\t${Version}\\n'
dpkg --audit >/dev/null && test -z "$(dpkg --audit)" || echo interrupted
"""


class Packages(msgspec.Struct, frozen=True):
    """versions: of the packages that are wholly installed, also the held ones. interrupted: dpkg says that some are half so."""

    versions: dict[str, str]
    interrupted: bool


def command(python: str) -> list[str]:
    return ["sh", "-c", PROGRAM]


def parse(stdout: str) -> Packages:
    lines = [line.split("\t") for line in stdout.splitlines() if "\t" in line]
    return Packages(
        {name: version for state, name, version in lines if state.strip() in ("ii", "hi")}, "interrupted" in stdout.splitlines()
    )


PACKAGES = Fact("packages", command, parse, timeout_s=60)
