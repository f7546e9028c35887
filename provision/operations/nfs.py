"""Shared storage: one node exports a folder to the other nodes, which mount the folder under the same path."""

from __future__ import annotations

import re

from provision.fact import Unanswered
from provision.facts.exports import EXPORTED_BY_US, EXPORTS, EXPORTS_FILE
from provision.facts.files import FILES
from provision.facts.mounts import NFS_MOUNTS, make_mount_query
from provision.facts.services import SERVICES
from provision.facts.system import SYSTEM
from provision.operation import Change, Nothing, Operation, RunCommand, Site, Target, Write, shell_change
from provision.operations import fstab
from provision.operations.packages import find_nfs_server

# no_root_squash: `provision` writes the environment into the folder as root, from any node; all nodes belong to one owner.
EXPORT_OPTIONS = "rw,sync,no_subtree_check,no_root_squash"
MOUNT_OPTIONS = "hard,vers=4.2,_netdev"  # hard: a write waits until a slow server has accepted it, and is never lost
_CLIENT_ADDRESS = re.compile(r"[A-Za-z0-9._:-]+")


def render_exports(site: Site, server: Target) -> bytes:
    """The content of the server's file of exports: one line that exports the folder to all other nodes. Raises Unanswered."""
    client_addresses = [target.node.address for target in site.targets if target is not server]
    for client in client_addresses:
        if not _CLIENT_ADDRESS.fullmatch(client):
            raise Unanswered(f"{client!r} is not allowed in {EXPORTS_FILE}")
    client_options = " ".join(f"{client}({EXPORT_OPTIONS})" for client in client_addresses)
    return f"# Written by shardlab's provision.\n{site.cluster.storage.shared} {client_options}\n".encode()


def plan_nfs_server(site: Site, target: Target) -> list[Change] | Nothing:
    """Make the shared folder, export it, and start the NFS server. Raises Unanswered."""
    folder, server = site.cluster.storage.shared, find_nfs_server(site)
    if folder is None or server is not target:
        return _end_export(site, target) or Nothing(_explain_no_export(site, "it is not storage.server"))
    changes: list[Change] = []
    if not target.facts[make_mount_query(folder)].there:
        owner = target.facts[SYSTEM].user
        changes += fstab.make_mount_checks(site, target)
        changes.append(RunCommand(f"make the folder {folder}", ["install", "-d", "-o", owner, "--", folder]))
    if len(site.targets) == 1:  # a line of exports without a client would export the folder to every machine
        return [*changes, *_end_export(site, target)] or Nothing(f"{folder} exists, and there is no other node to export it to")
    nfs_service = target.facts[SERVICES].get("nfs-server")
    if nfs_service is None or not nfs_service.enabled or nfs_service.state != "active":
        changes.append(
            RunCommand(
                "start the NFS server, now and at every boot", ["systemctl", "enable", "--quiet", "--now", "nfs-server"], 120
            )
        )
    exports_content = render_exports(site, target)
    exports_file = target.facts[FILES].get(EXPORTS_FILE)
    client_addresses = sorted(client.node.address for client in site.targets if client is not target)
    if exports_file is None or not exports_file.holds(exports_content):
        changes.append(RunCommand("make the folder for our exports", ["mkdir", "-p", EXPORTS_FILE.rpartition("/")[0]]))
        changes.append(Write(f"export {folder} to {', '.join(client_addresses)}", EXPORTS_FILE, exports_content))
    # Only the number of clients is compared, because the table of exports may contain names instead of addresses.
    if changes or len(target.facts[EXPORTS].get(folder, [])) != len(client_addresses):
        changes.append(RunCommand("make the server read its exports", ["exportfs", "-ra"]))
    return changes or Nothing(f"{folder} is exported to {len(client_addresses)} nodes")


def _end_export(site: Site, target: Target) -> list[Change]:
    """Withdraw the export that `provision` made if the cluster file no longer names it.

    Raises Unanswered if a node still mounts the exported folder.
    """
    if site.is_practice or EXPORTS_FILE not in target.facts[FILES]:
        return []
    folders = target.facts[EXPORTED_BY_US]
    nfs_sources = {f"{name}:{folder}" for name in (target.node.name, target.node.address) for folder in folders}
    clients = [
        f"{other_target.node.name} at {mountpoint}"
        for other_target, mounts in site.collect_answers(NFS_MOUNTS)
        for mountpoint, source in mounts.items()
        if source in nfs_sources
    ]
    if clients:  # without the server, every program that uses these hard mounts would hang
        raise Unanswered(
            f"{target.node.name}: it exports {', '.join(folders)}, which the cluster file no longer names, but which is still "
            f"mounted on {', '.join(clients)}: unmount it there, remove its line in /etc/fstab, and run the same command again"
        )
    script = f"rm -f -- {EXPORTS_FILE}; if command -v exportfs >/dev/null; then exportfs -ra; fi"
    return [shell_change(f"withdraw the export of {', '.join(folders)}, which the cluster file no longer names", script)]


def plan_nfs_mount(site: Site, target: Target) -> list[Change] | Nothing:
    """Mount the shared folder of the server on another node. Raises Unanswered."""
    folder, server = site.cluster.storage.shared, find_nfs_server(site)
    if folder is None or server is None:
        return _check_folder_exists(site, target)
    if server is target:
        return Nothing("it is the server of the folder")
    server_name = server.node.name
    if server_name in site.skipped:
        return Nothing(f"{server_name}, which exports the folder, cannot be asked")
    mount_place, nfs_source = fstab.inspect_mount(target, folder), f"{server_name}:{folder}"
    node_name = target.node.name
    for verb, other in (("mounts", mount_place.mount), ("lists in /etc/fstab", mount_place.fstab)):
        if other is not None and other.source != nfs_source:
            raise Unanswered(
                f"{node_name}: it {verb} {other.source} at {folder}, not {nfs_source}: unmount it, or change storage.shared"
            )
    changes: list[Change] = []
    if mount_place.fstab is None:
        changes.append(
            fstab.plan_line(f"mount {nfs_source} at every boot (/etc/fstab)", f"{nfs_source} {folder} nfs {MOUNT_OPTIONS} 0 0")
        )
    if mount_place.mount is None:
        changes += fstab.make_mount_changes(folder)
    elif not {"hard", "vers=4.2"} <= set(mount_place.mount.options):
        raise Unanswered(
            f"{node_name}: {folder} is mounted with {','.join(mount_place.mount.options)}, not {MOUNT_OPTIONS}: first unmount "
            f"{folder} there"
        )
    return changes or Nothing(f"{nfs_source} is mounted")


def _check_folder_exists(site: Site, target: Target) -> Nothing:
    """Check that the shared folder exists, if the cluster file names no storage.server. Raises Unanswered if it is missing."""
    folder = site.cluster.storage.shared
    if folder is None or site.is_practice:
        return Nothing(_explain_no_export(site, ""))
    mount_place = target.facts[make_mount_query(folder)]
    if mount_place.hangs or not mount_place.there:
        fault = "does not answer" if mount_place.hangs else "does not exist"
        raise Unanswered(
            f"{target.node.name}: {folder} {fault}: without storage.server, each node must already have the folder; mount it "
            "there, or set storage.server to the node that should export it"
        )
    return Nothing(f"{folder} exists, as required without storage.server")


def _explain_no_export(site: Site, other_reason: str) -> str:
    if site.cluster.storage.shared is None:
        return "cluster.yaml names no storage.shared"
    return "practice nodes share the folder of this machine" if site.is_practice else other_reason


NFS_SERVER = Operation("nfs-server", plan_nfs_server, written_paths=(EXPORTS_FILE,))
NFS = Operation("nfs", plan_nfs_mount)
