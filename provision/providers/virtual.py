"""Provider virtual: practice nodes, which are containers on this machine, to rehearse the work on a real cluster."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from provision.nodes.ssh_node import SshNode
from provision.operation import Change, LocalCall, Nothing
from provision.operations import packages
from provision.practice import base, making, network, python, shared
from provision.practice.base import PRACTICE_USER, PracticeNodeError, run_here
from provision.practice.machine import STATE_FOLDER, WHEELS_FOLDER, PracticeMachine, list_machine_folders, remove_unused_folders
from provision.provider import Provider
from provision.providers import ssh
from shardlab.cluster.cluster import Cluster
from shardlab.files import files
from shardlab.remote.remote import Unreachable
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

BOOTS_S = 60.0
# The folder of lock files, for root only; not in STATE, which is removed with the last node
LOCKS_FOLDER = Path("/run/shardlab")
INSTANCES_LIMIT_FILE = Path("/proc/sys/fs/inotify/max_user_instances")  # the limit per user; systemd of all nodes runs as root
INSTANCES_PER_NODE, OTHER_INSTANCES = 7, 20  # inotify instances: of a node (measured with 20), and of this machine itself


def list_nodes(cluster: Cluster, workspace: Workspace) -> list[SshNode]:
    """The practice nodes that the cluster file lists, whether they run or not."""
    venv_python = python.PYTHON_INTERPRETER if base.is_other_release(cluster.release) else "python3"
    return [
        ssh.make_node(
            cluster,
            workspace,
            node_entry,
            host=network.choose_node_address(cluster.lan.subnet, node_index),
            identity_path=_find_identity_path(workspace),
            user=PRACTICE_USER,
            wheelhouse=WHEELS_FOLDER,
            venv_python=venv_python,
        )
        for node_index, node_entry in enumerate(cluster.nodes)
    ]


def bring_up(cluster: Cluster, workspace: Workspace, node: SshNode) -> list[Change] | Nothing:
    """The changes that make and boot a node, if it does not run. Raises PracticeNodeError if this machine cannot have practice
    nodes."""
    base.check_machine(cluster.release)
    _check_owner(cluster, workspace)
    _check_inotify_limit(cluster)
    machine = _make_machine(cluster, workspace, node, base.find_base_folder(packages.ALL_PACKAGES, cluster.release))
    protection_changes = _plan_protections(cluster)
    if (age_s := machine.measure_age_s()) is not None:
        if age_s < BOOTS_S:  # the node may still be booting, if an earlier command was interrupted
            with contextlib.suppress(Unreachable):  # later operations report a node that does not answer
                _wait_for_node(node, BOOTS_S - age_s)
        return protection_changes or Nothing(f"practice node at {node.host}, running")
    boot_verb = "boot" if machine.folder.exists() else "make and boot"
    return [
        *protection_changes,
        LocalCall(f"{boot_verb} the practice node {node.name} at {node.host}", lambda: _boot_node(cluster, workspace, node)),
    ]


def list_lock_paths(cluster: Cluster) -> list[Path]:
    """The lock file for a cluster name. All users of this machine share it, because practice nodes of one cluster name can
    exist only once on a machine.

    Makes the folder of the lock files and closes it to other users, because a user who can read a lock file can hold its lock.
    Raises WorkspaceError.
    """
    files.make_folder(LOCKS_FOLDER)
    if LOCKS_FOLDER.stat().st_uid == os.geteuid():
        with files.as_workspace_error("close to other users"):
            LOCKS_FOLDER.chmod(0o700)
            for path in LOCKS_FOLDER.glob("*.lock"):
                if not path.is_symlink():
                    path.chmod(0o600)
    return [LOCKS_FOLDER / f"{cluster.name}.lock"]


def down(cluster: Cluster, workspace: Workspace) -> str:
    """Remove all nodes of the cluster and its bridge. The base and the shared folder are kept. Returns what was removed."""
    base.check_machine()
    machine_folders = list_machine_folders(cluster.name)
    for machine_folder in machine_folders:
        _make_bare_machine(cluster, machine_folder.name).remove()
    state_folder = STATE_FOLDER / cluster.name
    with base.hold_practice_lock():
        network.delete_bridge(network.make_bridge_name(cluster.name))
        shared.release_folder(state_folder)
        (state_folder / "workspace").unlink(missing_ok=True)
        if state_folder.is_dir():
            state_folder.rmdir()
        remove_unused_folders()
    if not machine_folders:
        return f"no practice nodes of {cluster.name} are on this machine."
    return f"removed {', '.join(machine_folder.name for machine_folder in machine_folders)} and their network."


def warm(cluster: Cluster, workspace: Workspace) -> str:
    """Make the base and the folder of wheels before their first use. Returns a sentence that names them."""
    with base.hold_practice_lock():
        base_folder = making.make_base_system(packages.ALL_PACKAGES, cluster.release, _print_remark)
        return f"ready: {base_folder} and {making.make_wheels(_print_remark)}"


def _boot_node(cluster: Cluster, workspace: Workspace, node: SshNode) -> None:
    """Make and boot a node, and wait until it answers. Raises PracticeNodeError; Unreachable if it does not answer in time."""
    with base.hold_practice_lock():
        base_folder = making.make_base_system(packages.ALL_PACKAGES, cluster.release, _print_remark)
        if cluster.environment.wheelhouse is None:
            making.make_wheels(_print_remark)
        network.make_bridge(network.make_bridge_name(cluster.name), cluster.lan.subnet)
        _close_state_folder()
        files.make_folder(STATE_FOLDER / cluster.name)
        files.write_atomic(STATE_FOLDER / cluster.name / "workspace", f"{workspace.real_path}\n".encode())
        key_path = _find_identity_path(workspace)
        if not key_path.exists():
            files.make_folder(key_path.parent)
            run_here(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"shardlab {cluster.name}", "-f", str(key_path)])
        machine = _make_machine(cluster, workspace, node, base_folder)
        machine.create()
        _add_known_host(workspace, node.host, files.read(machine.host_key_path.with_suffix(".pub")).decode())
    _wait_for_node(node, BOOTS_S)


def _plan_protections(cluster: Cluster) -> list[Change]:
    """The changes that protect nodes from other users of this machine, if an older shardlab booted them without protection."""
    changes: list[Change] = []
    if STATE_FOLDER.is_dir() and STATE_FOLDER.stat().st_mode & 0o077:
        changes.append(LocalCall(f"close {STATE_FOLDER} to other users of this machine", _close_state_folder))
    folder = cluster.storage.shared
    if folder is not None and (STATE_FOLDER / cluster.name).is_dir() and not shared.is_protected(Path(folder)):
        changes.append(LocalCall(f"mount {folder} with nosuid,nodev", lambda: _protect_shared_folder(cluster, Path(folder))))
    return changes


def _close_state_folder() -> None:
    """Make the folder of all nodes if it does not exist, and close it to other users. Raises PracticeNodeError if root does not
    own it."""
    files.make_folder(STATE_FOLDER)
    if (owner_uid := STATE_FOLDER.stat().st_uid) != 0:
        raise PracticeNodeError(
            f"{STATE_FOLDER}: owned by the user {owner_uid}, who could change the files of practice nodes. "
            f"Run: chown root {STATE_FOLDER}"
        )
    STATE_FOLDER.chmod(0o700)


def _protect_shared_folder(cluster: Cluster, folder: Path) -> None:
    with base.hold_practice_lock():
        shared.protect_folder(STATE_FOLDER / cluster.name, folder)


def _wait_for_node(node: SshNode, limit_s: float) -> None:
    """Wait until a node answers. Raises Unreachable if it does not answer within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            node.remote.run(["true"], timeout_s=10)
        except Unreachable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def _print_remark(sentence: str) -> None:
    """Print a sentence for the user about work that takes minutes."""
    Output().print_remark(sentence)


def _find_identity_path(workspace: Workspace) -> Path:
    return workspace.shardlab_folder / "practice" / "id_ed25519"


def _add_known_host(workspace: Workspace, host: str, key: str) -> None:
    """Write the public host key of a node, which this machine made, into known_hosts of the workspace. host: its address."""
    path = workspace.shardlab_folder / "known_hosts"
    old_lines = files.read(path).decode(errors="replace").splitlines() if path.exists() else []
    other_lines = [line for line in old_lines if line.split(" ")[0] != host]
    files.write_atomic(path, "".join(f"{line}\n" for line in [*other_lines, f"{host} {' '.join(key.split()[:2])}"]).encode())


def _check_owner(cluster: Cluster, workspace: Workspace) -> None:
    """Raises PracticeNodeError if another workspace has practice nodes with this cluster name: a name can be used once per
    machine."""
    owner_note = STATE_FOLDER / cluster.name / "workspace"
    if owner_note.exists() and Path(other_path := files.read(owner_note).decode().strip()).resolve() != workspace.real_path:
        raise PracticeNodeError(
            f"the workspace {other_path} already has practice nodes of the name {cluster.name} on this machine; "
            "choose another name for this cluster."
        )


def _check_inotify_limit(cluster: Cluster) -> None:
    """Raises PracticeNodeError if root may have too few inotify instances for all nodes: systemd of the last nodes would not
    boot."""
    other_clusters = (
        [folder.name for folder in STATE_FOLDER.iterdir() if folder.name != cluster.name] if STATE_FOLDER.is_dir() else []
    )
    count = len(cluster.nodes) + sum(len(list_machine_folders(name)) for name in other_clusters)
    needed_instances, limit = INSTANCES_PER_NODE * count + OTHER_INSTANCES, int(files.read(INSTANCES_LIMIT_FILE))
    if needed_instances > limit:
        raise PracticeNodeError(
            f"{count} practice nodes on this machine need {needed_instances} inotify instances, but its limit is {limit}; run: "
            f"sysctl -w fs.inotify.max_user_instances={2 * needed_instances}"
        )


def _make_machine(cluster: Cluster, workspace: Workspace, node: SshNode, base_folder: Path) -> PracticeMachine:
    node_entry = next(node_entry for node_entry in cluster.nodes if node_entry.name == node.name)
    public_path = _find_identity_path(workspace).with_suffix(".pub")
    return PracticeMachine(
        cluster=cluster.name,
        name=node.name,
        address=node.host,
        prefix_len=int(cluster.lan.subnet.split("/")[1]),
        bridge=network.make_bridge_name(cluster.name),
        base_folder=base_folder,
        authorized_key=files.read(public_path).decode().strip() if public_path.exists() else "",
        shared_folder=cluster.storage.shared,
        wheelhouse=cluster.environment.wheelhouse or str(base.find_wheels_folder()),
        python=str(python.find_python_folder()) if base.is_other_release(cluster.release) else None,
        has_only_cgroup2=base.is_other_release(cluster.release),
        gpu_count=cluster.gpus.per_node if cluster.gpus and "worker" in node_entry.roles else 0,
        mbps=cluster.lan.mbps,
    )


def _make_bare_machine(cluster: Cluster, name: str) -> PracticeMachine:
    """A practice node with only the values that its removal needs, because the cluster file may no longer list it."""
    return PracticeMachine(cluster.name, name, "", 0, "", Path(), "")


PROVIDER = Provider(
    "virtual", "it boots its nodes on this machine", list_nodes, locks=list_lock_paths, bring_up=bring_up, warm=warm, down=down
)
