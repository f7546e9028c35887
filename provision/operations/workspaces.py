"""Makes sure that the folder for workspaces exists on the nodes, and that the user who logs in can write into it."""

from __future__ import annotations

from provision.fact import Unanswered
from provision.facts.mounts import make_mount_query
from provision.facts.system import SYSTEM
from provision.facts.write_test import WriteTest, make_write_test_query
from provision.operation import Change, Nothing, Operation, RunCommand, Site, Target
from provision.operations import fstab

# Advice for the user, by words that the error of the node contains. {key}: the key of cluster.yaml that names the folder.
ADVICE_BY_ERROR = {
    "Read-only": "mount it so that it can be written (findmnt shows how it is mounted)",
    "quota": "remove files there, ask for a larger quota, or set {key} to another folder",
    "No space": "remove files there, or set {key} to a folder on a larger disk",
    "": "make this user its owner (chown, on the machine that has the disk), or set {key} to a folder of this user",
}


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Test that the user can write into the folder for workspaces. If the nodes share no folder, make a missing folder.

    Raises Unanswered, for example if the user cannot write into the folder.
    """
    storage_keys, is_separate = site.cluster.storage, site.cluster.has_separate_folders
    folder = str(site.cluster.workspaces) if is_separate else storage_keys.shared
    if folder is None:
        return Nothing("cluster.yaml names no storage.shared")
    if not is_separate and _is_made_later(site, target, folder):
        return Nothing(f"{folder} is made by another operation, and tested then")
    login_user = target.facts[SYSTEM].user
    if is_separate and not target.facts[make_mount_query(folder)].there:
        make_folder = RunCommand(f"make the folder {folder}", ["install", "-d", "-o", login_user, "--", folder])
        return [*fstab.make_mount_checks(site, target, folder), make_folder]
    write_result = target.facts[make_write_test_query(folder)]
    if write_result.why_not:
        raise Unanswered(_make_refusal(target, login_user, write_result, "storage.mount" if is_separate else "storage.shared"))
    return Nothing(f"{login_user} can write to {write_result.folder}")


def _is_made_later(site: Site, target: Target, folder: str) -> bool:
    """Whether an earlier operation of the same plan makes or mounts the shared folder, so that the folder is missing only
    because this is a dry run."""
    mountpoints = fstab.list_required_mounts(site, target, folder)
    nfs_server = site.cluster.storage.server
    if nfs_server is not None:
        if nfs_server != target.node.name:
            mountpoints.append(folder)
        elif not target.facts[make_mount_query(folder)].there:
            return True
    return any(target.facts[make_mount_query(mountpoint)].mount is None for mountpoint in mountpoints)


def _make_refusal(target: Target, user: str, write_test: WriteTest, key: str) -> str:
    advice = next(advice_text for words, advice_text in ADVICE_BY_ERROR.items() if words.lower() in write_test.why_not.lower())
    return f"{target.node.name}: {user} cannot write to {write_test.folder}: {write_test.why_not}; {advice.format(key=key)}."


WORKSPACES = Operation("workspaces", plan)
