"""Whether the user who logs in can write a file into a folder, found out by writing a small file, which is removed at once.

Permissions and mount options do not show a quota that is used up, and root may have more or fewer rights than the user (an NFS
server with root_squash).
"""

from __future__ import annotations

import msgspec

from provision.fact import Fact

BYTES = 1 << 16
# If the folder does not exist, its nearest parent that exists is tested: the folder will be made there.
PROGRAM = f"""\
place=$1
while ! test -e "$place"; do place=$(dirname -- "$place"); done
printf '%s\\n' "$place"
file=$(mktemp -- "$place/.shardlab-write-XXXXXXXX" 2>&1) || {{ printf '%s\\n' "$file"; exit 0; }}
{{ head -c {BYTES} /dev/zero > "$file" && sync -- "$file"; }} 2>&1
rm -f -- "$file"
"""


class WriteTest(msgspec.Struct, frozen=True):
    """What became of the file. folder: where it was written. why_not: the error of the node, '' if all of it was written."""

    folder: str
    why_not: str = ""


def write_test(path: str) -> Fact[WriteTest]:
    """The question for one folder."""
    return Fact(f"write test {path}", lambda python: ["sh", "-c", PROGRAM, "write", path], parse, timeout_s=30)


def parse(stdout: str) -> WriteTest:
    """Raises ValueError."""
    folder, *errors = stdout.splitlines()[:2] or [""]
    if not folder.startswith("/"):
        raise ValueError("it does not name the folder.")
    return WriteTest(folder, errors[0].rpartition(": ")[2] if errors else "")
