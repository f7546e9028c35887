"""The state of the files that `provision` writes on a machine: digest, owner, mode and time, but never the content."""

from __future__ import annotations

import hashlib

import msgspec

from provision.facts import Fact

MANAGED = (
    "/etc/hosts",
    "/etc/hostname",
    "/etc/munge/munge.key",
    "/etc/slurm/slurm.conf",
    "/etc/slurm/gres.conf",
    "/etc/slurm/cgroup.conf",
    "/etc/slurm/slurmdbd.conf",
    "/etc/default/slurmd",
    "/etc/systemd/system/slurmd.service.d/configless.conf",
    "/etc/modprobe.d/shardlab-nouveau.conf",
    "/etc/systemd/system/nvidia-persistenced.service.d/shardlab.conf",
    "/etc/exports.d/shardlab.exports",
)

PROGRAM = """\
for path; do
    test -f "$path" || continue
    printf '%s\\t%s\\t%s\\n' "$path" "$(stat -c '%a\\t%U:%G\\t%.Y' -- "$path" | sed 's/\\\\t/\\t/g')" \\
        "$(sha256sum < "$path" | cut -d ' ' -f 1)"
done
"""


class File(msgspec.Struct, frozen=True):
    """mode: in octal; owner: user:group; written_s: seconds since the epoch; sha256: of its content."""

    mode: int
    owner: str
    written_s: float
    sha256: str

    def holds(self, content: bytes) -> bool:
        return self.sha256 == hashlib.sha256(content).hexdigest()


def command(python: str) -> list[str]:
    return ["sh", "-c", PROGRAM, "files", *MANAGED]


def parse(stdout: str) -> dict[str, File]:
    """By path; a file that is not there is not in it. Raises ValueError."""
    found = {}
    for line in stdout.splitlines():
        path, mode, owner, written_s, sha256 = line.split("\t")
        found[path] = File(int(mode, 8), owner, float(written_s), sha256)
    return found


FILES = Fact("files", command, parse, timeout_s=30, root=True)
