"""Tests whether the user who logs in can write into a folder: writes a small file there and removes it at once.

To look at permissions and mount options is not enough: they do not show that a quota is used up. The test does not run as
root, who may have more or fewer rights than the user (for example on an NFS server with root_squash).
"""

from __future__ import annotations

import msgspec

from provision.fact import FactQuery

TEST_BYTES = 1 << 16
# If the folder does not exist, its nearest existing parent is tested, because the folder will be created there.
WRITE_TEST_SCRIPT = f"""\
place=$1
while ! test -e "$place"; do place=$(dirname -- "$place"); done
printf '%s\\n' "$place"
file=$(mktemp -- "$place/.shardlab-write-XXXXXXXX" 2>&1) || {{ printf '%s\\n' "$file"; exit 0; }}
{{ head -c {TEST_BYTES} /dev/zero > "$file" && sync -- "$file"; }} 2>&1
rm -f -- "$file"
"""


class WriteTest(msgspec.Struct, frozen=True):
    """The result of a write test."""

    folder: str
    """The tested folder."""
    why_not: str = ""
    """The error of the node; '' if the test succeeded."""


def make_write_test_query(path: str) -> FactQuery[WriteTest]:
    """The write test of one folder, as a fact."""
    return FactQuery(f"write test {path}", lambda python: ["sh", "-c", WRITE_TEST_SCRIPT, "write", path], parse, timeout_s=30)


def parse(stdout: str) -> WriteTest:
    """The result in the output of WRITE_TEST_SCRIPT. Raises ValueError."""
    folder, *error_lines = stdout.splitlines()[:2] or [""]
    if not folder.startswith("/"):
        raise ValueError("it does not name the folder.")
    return WriteTest(folder, error_lines[0].rpartition(": ")[2] if error_lines else "")
