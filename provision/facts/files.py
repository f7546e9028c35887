"""The state of the files that `provision` writes on a machine: digest, owner, mode and time, but never the content."""

from __future__ import annotations

import hashlib

import msgspec

from provision.fact import FactQuery

DESCRIBE_FILES = """\
for path; do
    test -f "$path" || continue
    printf '%s\\t%s\\t%s\\n' "$path" "$(stat -c '%a\\t%U:%G\\t%.Y' -- "$path" | sed 's/\\\\t/\\t/g')" \\
        "$(sha256sum < "$path" | cut -d ' ' -f 1)"
done
"""


class NodeFile(msgspec.Struct, frozen=True):
    """A file that exists on a machine."""

    mode: int
    owner: str
    """The owner, as USER:GROUP."""
    written_s: float
    """The time of its last change, in seconds since the epoch."""
    sha256: str
    """The digest of its content."""

    def holds(self, content: bytes) -> bool:
        """Whether the file has exactly this content."""
        return self.sha256 == hashlib.sha256(content).hexdigest()


def build_command(python: str) -> list[str]:
    """The command that describes files. The paths, which each operation lists in `files`, are appended as arguments."""
    return ["sh", "-c", DESCRIBE_FILES, "files"]


def parse(stdout: str) -> dict[str, NodeFile]:
    """The files that exist on the machine, by path, parsed from the output of the command. Raises ValueError."""
    file_by_path = {}
    for line in stdout.splitlines():
        path, mode, owner, written_s, sha256 = line.split("\t")
        file_by_path[path] = NodeFile(int(mode, 8), owner, float(written_s), sha256)
    return file_by_path


FILES = FactQuery("files", build_command, parse, timeout_s=30, root=True, takes_paths=True)
