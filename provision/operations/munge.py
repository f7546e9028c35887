"""Gives all nodes of Slurm the same random munge key. The controller makes the key; this machine never stores the key."""

from __future__ import annotations

from provision.fact import Unanswered
from provision.facts.files import FILES
from provision.node import Node, find_error_line
from provision.operation import Change, LocalCall, Nothing, Operation, Site, Target, shell_change
from provision.operations.existing_slurm import find_existing_slurm, report_existing_slurm
from provision.operations.service import plan_running_service

MUNGE_KEY_PATH = "/etc/munge/munge.key"
MUNGE_KEY_BYTES = 1024
MUNGE_KEY_MODE, MUNGE_KEY_OWNER = 0o400, "munge:munge"
# Writes standard input to the file of the key, completely or not at all.
WRITE_KEY = (
    f'umask 077; new=$(mktemp {MUNGE_KEY_PATH}.XXXXXX); cat > "$new"; chown {MUNGE_KEY_OWNER} "$new"; chmod 400 "$new"; '
    f'mv "$new" {MUNGE_KEY_PATH}'
)
MAKE_KEY = f"head -c {MUNGE_KEY_BYTES} /dev/urandom | (set -e; {WRITE_KEY})"


def plan_munge_key(site: Site, target: Target) -> list[Change] | Nothing:
    """Make the munge key on the controller. Raises Unanswered."""
    if site.cluster.slurm is None or not target.has_role("controller"):
        return Nothing("only the controller of Slurm makes a munge key")
    if (existing_slurm := find_existing_slurm(site)) is not None:
        return report_existing_slurm(existing_slurm)
    key = target.facts[FILES].get(MUNGE_KEY_PATH)
    changes: list[Change] = []
    if key is None:
        # Without root, it is not known whether the controller has a key, so the administrator's script tests it.
        changes.append(
            shell_change(
                "make a random munge key",
                MAKE_KEY if target.node.may_sudo else f"test -s {MUNGE_KEY_PATH} || {{ {MAKE_KEY}; }}",
            )
        )
    elif (key.mode, key.owner) != (MUNGE_KEY_MODE, MUNGE_KEY_OWNER):  # other users may have read the key, so a new key is made
        changes.append(shell_change(f"make a new munge key (the old one had mode {key.mode:o}, owner {key.owner})", MAKE_KEY))
    changes += plan_running_service(target, "munge", [MUNGE_KEY_PATH], config_changed=bool(changes))
    return changes or Nothing("it has a munge key")


def plan_munge_key_copy(site: Site, target: Target) -> list[Change] | Nothing:
    """Copy the munge key from the controller to the other nodes. Raises Unanswered."""
    if site.cluster.slurm is None or target.has_role("controller"):
        return Nothing("the cluster has no Slurm" if site.cluster.slurm is None else "it has made the munge key")
    if (existing_slurm := find_existing_slurm(site)) is not None:
        return report_existing_slurm(existing_slurm)
    (controller,) = site.list_with_role("controller")
    if controller.node.name in site.skipped:
        return Nothing(f"{controller.node.name}, which has the munge key, cannot be asked")
    controller_key = controller.facts[FILES].get(MUNGE_KEY_PATH)
    key_file = target.facts[FILES].get(MUNGE_KEY_PATH)
    changes: list[Change] = []
    if (
        key_file is None
        or controller_key is None
        or (key_file.sha256, key_file.mode, key_file.owner) != (controller_key.sha256, MUNGE_KEY_MODE, MUNGE_KEY_OWNER)
    ):
        text = f"copy the munge key from {controller.node.name}"
        changes.append(LocalCall(text, lambda: _copy_key(controller.node, target.node), script=_copy_script(controller.node)))
    changes += plan_running_service(target, "munge", [MUNGE_KEY_PATH], config_changed=bool(changes))
    return changes or Nothing(f"it has the munge key of {controller.node.name}")


def _copy_script(controller: Node) -> str:
    return f"ssh root@{controller.host} cat {MUNGE_KEY_PATH} | (set -eu; {WRITE_KEY})"


def _copy_key(controller: Node, node: Node) -> None:
    """Copy the key from the controller to a node through the memory of this program, so that no file on this machine contains
    the key."""
    read_output = controller.run(["base64", MUNGE_KEY_PATH], timeout_s=30, root=True, secret=True)
    if read_output.code != 0:
        failure_message = f"{controller.name}: the munge key cannot be read: {find_error_line(read_output)}"
        raise Unanswered(failure_message, {controller.name: failure_message})
    write_command = ["sh", "-euc", f"base64 -d | (set -e; {WRITE_KEY})"]
    write_output = node.run(write_command, timeout_s=30, root=True, stdin=read_output.stdout.encode())
    if write_output.code != 0:
        raise Unanswered(f"{node.name}: the munge key cannot be written: {find_error_line(write_output)}")


MUNGE_KEY = Operation("munge-key", plan_munge_key, written_paths=(MUNGE_KEY_PATH,))
MUNGE = Operation("munge", plan_munge_key_copy, written_paths=(MUNGE_KEY_PATH,))
