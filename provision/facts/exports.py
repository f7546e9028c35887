"""The folders that a machine exports by NFS now, with their clients, from the current table of exports, not from /etc."""

from __future__ import annotations

from provision.fact import FactQuery

EXPORTS_FILE = "/etc/exports.d/shardlab.exports"  # the file of exports that `provision` writes


def build_command(python: str) -> list[str]:
    """The command that prints the table of current exports. It prints nothing on a machine without an NFS server."""
    return ["sh", "-c", "cat /var/lib/nfs/etab 2>/dev/null || true"]


def parse(stdout: str) -> dict[str, list[str]]:
    """The clients of each exported folder. Raises ValueError."""
    clients_by_folder: dict[str, list[str]] = {}
    for line in stdout.splitlines():
        folder, client = line.split("\t", 1)
        clients_by_folder.setdefault(folder, []).append(client.partition("(")[0])
    return {folder: sorted(clients) for folder, clients in clients_by_folder.items()}


def parse_folders(stdout: str) -> list[str]:
    """The exported folders, parsed from output with one folder per line."""
    return stdout.splitlines()


EXPORTS = FactQuery("exports", build_command, parse, timeout_s=30, root=True)
EXPORTED_BY_US = FactQuery(
    "our exports", lambda python: ["sed", "-n", r"s/^\(\/[^ ]*\) .*/\1/p", EXPORTS_FILE], parse_folders, timeout_s=30, root=True
)
