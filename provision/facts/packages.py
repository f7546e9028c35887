"""Which Debian packages a machine has, and whether an installation was interrupted."""

from __future__ import annotations

import msgspec

from provision.fact import FactQuery

LIST_DEB_PACKAGES = """\
dpkg-query -W -f '${db:Status-Abbrev}\\t${Package}\\t${Version}\\n'
dpkg --audit >/dev/null && test -z "$(dpkg --audit)" || echo interrupted
"""


class Packages(msgspec.Struct, frozen=True):
    """The Debian packages of a machine."""

    versions: dict[str, str]
    """The version of each completely installed package, by its name; includes held packages."""
    interrupted: bool
    """Whether dpkg reports packages that are only partly installed."""


def build_command(python: str) -> list[str]:
    """The command that asks dpkg for its packages."""
    return ["sh", "-c", LIST_DEB_PACKAGES]


def parse(stdout: str) -> Packages:
    """The packages in the output of LIST_DEB_PACKAGES. Packages that are only partly installed are left out."""
    package_lines = [line.split("\t") for line in stdout.splitlines() if "\t" in line]
    return Packages(
        {name: version for state, name, version in package_lines if state.strip() in ("ii", "hi")},
        "interrupted" in stdout.splitlines(),
    )


PACKAGES = FactQuery("packages", build_command, parse, timeout_s=60)
