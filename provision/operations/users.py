"""Users with the same UID and GID on all nodes: Munge's messages and files on shared storage contain numbers and not names."""

from __future__ import annotations

from provision.fact import Unanswered
from provision.facts.users import USERS, User
from provision.operation import Change, Nothing, Operation, Site, Target, shell_change
from provision.operations.existing_slurm import find_existing_slurm, report_existing_slurm

SYSTEM_USERS = ("slurm", "munge")
# UID and GID of the user munge, if no node has this user yet. 499 is normally free, because Debian assigns numbers upwards from
# 100, and systemd assigns numbers downwards from 999.
MUNGE_ID = 499


def plan_munge_user(site: Site, target: Target) -> list[Change] | Nothing:
    """Make the user munge with one UID on all nodes, before the package of MUNGE makes it with any UID. Raises Unanswered."""
    if site.cluster.slurm is None:
        return Nothing("the cluster has no Slurm")
    if (existing_slurm := find_existing_slurm(site)) is not None:
        return report_existing_slurm(existing_slurm)
    if "munge" in target.facts[USERS].known:
        return Nothing("the user munge exists")
    munge_users = [users.known["munge"] for _, users in site.collect_answers(USERS) if "munge" in users.known]
    munge_user = munge_users[0] if munge_users else User(MUNGE_ID, MUNGE_ID)
    make_script = (
        f"getent group munge >/dev/null || groupadd --system --gid {munge_user.gid} munge\n"
        f"useradd --system --uid {munge_user.uid} --gid munge --no-create-home --home-dir /nonexistent "
        "--shell /usr/sbin/nologin munge"
    )
    return [shell_change(f"make the user munge, {munge_user.uid}:{munge_user.gid} on all nodes", make_script)]


def plan_same_users(site: Site, target: Target) -> list[Change] | Nothing:
    """Check that users have the same UID and GID as on the first node; changes no user.

    Raises Unanswered if they differ and Slurm or shared storage needs equal numbers.
    """
    node_users = target.facts[USERS]
    first, first_users = site.collect_answers(USERS)[0]
    if first is target:
        return Nothing("the other nodes are compared with this node")
    node_name = target.node.name
    if site.cluster.slurm is not None and find_existing_slurm(site) is None:
        for name in SYSTEM_USERS:
            node_user, first_user = node_users.known.get(name), first_users.known.get(name)
            if node_user is not None and first_user is not None and node_user != first_user:
                raise Unanswered(
                    f"{node_name}: the user {name} is {node_user.uid}:{node_user.gid} there and "
                    f"{first_user.uid}:{first_user.gid} on {first.node.name}; existing users are not changed. Give it the same "
                    f"numbers: systemctl stop {name}*; groupmod -g {first_user.gid} {name}; usermod -u {first_user.uid} -g "
                    f"{first_user.gid} {name}; then chown its files"
                )
    difference = _compare_user(
        first_users.login, first_users.known.get(first_users.login), node_users.known.get(first_users.login), first.node.name
    )
    if difference is None:
        return Nothing(f"its users have the same numbers as on {first.node.name}")
    if site.cluster.storage.shared is not None:  # on shared storage, the user could not change files from another node
        raise Unanswered(
            f"{node_name}: {difference}; on shared storage its files would belong to another user: use the same number on all "
            "nodes."
        )
    return Nothing(f"{difference}; this is no problem without shared storage")


def _compare_user(user_name: str, first_user: User | None, node_user: User | None, first_node_name: str) -> str | None:
    """How the UID of the user `user_name`, who logs in to the node `first_node_name`, differs on another node; None if equal.

    first_user: this user on the node `first_node_name`. node_user: this user on the other node.
    """
    if first_user is None or (node_user is not None and node_user.uid == first_user.uid):
        return None
    if node_user is None:
        return f"the user {user_name}, who logs in to {first_node_name}, does not exist here"
    return f"the user {user_name} has uid {node_user.uid} here and {first_user.uid} on {first_node_name}"


MUNGE_USER = Operation("munge-user", plan_munge_user)
USERS_AGREE = Operation("users", plan_same_users)
