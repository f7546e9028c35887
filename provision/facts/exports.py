"""The folders that a machine exports by NFS now, and their clients, from the kernel's table and not from the files in /etc."""

from __future__ import annotations

from provision.fact import Fact

EXPORTED = "/etc/exports.d/shardlab.exports"  # ours


def command(python: str) -> list[str]:
    """Reads the kernel's table of exports."""
    return ["sh", "-c", "cat /var/lib/nfs/etab 2>/dev/null || true"]  # a machine without an NFS server exports nothing


def parse(stdout: str) -> dict[str, list[str]]:
    """Folder to clients, sorted. Raises ValueError."""
    clients_of: dict[str, list[str]] = {}
    for line in stdout.splitlines():
        folder, client = line.split("\t", 1)
        clients_of.setdefault(folder, []).append(client.partition("(")[0])
    return {folder: sorted(clients) for folder, clients in clients_of.items()}


def parse_folders(stdout: str) -> list[str]:
    """One folder in each line."""
    return stdout.splitlines()


EXPORTS = Fact("exports", command, parse, timeout_s=30, root=True)
EXPORTED_BY_US = Fact(
    "our exports",
    lambda python: ["sed", "-n", r"s/^\(\/[^ ]*\) .*/\1/p", EXPORTED],
    parse_folders,
    timeout_s=30,
    root=True,
)
