"""Users with the same UID and GID on all nodes: Munge's messages and files on shared storage contain numbers and not names."""

from __future__ import annotations

from provision.fact import Unanswered
from provision.facts.users import USERS, User
from provision.operation import Change, Nothing, Operation, Site, Target, shell
from provision.operations.existing_slurm import existing, used

SYSTEM_USERS = ("slurm", "munge")
# UID and GID of the user munge, if no node has this user yet. 499 is normally free, because Debian assigns numbers upwards from
# 100, and systemd assigns numbers downwards from 999.
MUNGE_ID = 499


def plan_made(site: Site, target: Target) -> list[Change] | Nothing:
    """Make the user munge with one UID on all nodes, before the package of MUNGE makes it with any UID. Raises Unanswered."""
    if site.cluster.slurm is None:
        return Nothing("the cluster has no Slurm")
    if (there := existing(site)) is not None:
        return used(there)
    if "munge" in target.facts[USERS].known:
        return Nothing("the user munge exists")
    others = [users.known["munge"] for _, users in site.answers(USERS) if "munge" in users.known]
    user = others[0] if others else User(MUNGE_ID, MUNGE_ID)
    make = (
        f"getent group munge >/dev/null || groupadd --system --gid {user.gid} munge\n"
        f"useradd --system --uid {user.uid} --gid munge --no-create-home --home-dir /nonexistent "
        "--shell /usr/sbin/nologin munge"
    )
    return [shell(f"make the user munge, {user.uid}:{user.gid} on all nodes", make)]


def plan_agree(site: Site, target: Target) -> list[Change] | Nothing:
    """Check that users have the same UID and GID as on the first node; changes no user.

    Raises Unanswered if they differ and Slurm or shared storage needs equal numbers.
    """
    users = target.facts[USERS]
    first, wanted = site.answers(USERS)[0]
    if first is target:
        return Nothing("the other nodes are compared with this node")
    where = target.node.name
    if site.cluster.slurm is not None and existing(site) is None:
        for name in SYSTEM_USERS:
            here, there = users.known.get(name), wanted.known.get(name)
            if here is not None and there is not None and here != there:
                raise Unanswered(
                    f"{where}: the user {name} is {here.uid}:{here.gid} there and {there.uid}:{there.gid} on "
                    f"{first.node.name}; existing users are not changed. Give it the same numbers: systemctl stop "
                    f"{name}*; groupmod -g {there.gid} {name}; usermod -u {there.uid} -g {there.gid} {name}; "
                    "then chown its files"
                )
    said = _login(wanted.login, wanted.known.get(wanted.login), users.known.get(wanted.login), first.node.name)
    if said is None:
        return Nothing(f"its users have the same numbers as on {first.node.name}")
    if site.cluster.storage.shared is not None:  # on shared storage, the user could not change files from another node
        raise Unanswered(
            f"{where}: {said}; on shared storage its files would belong to another user: use the same number on all nodes."
        )
    return Nothing(f"{said}; this is no problem without shared storage")


def _login(name: str, there: User | None, here: User | None, first: str) -> str | None:
    """How the UID of the user `name`, who logs in to the node `first`, differs on another node, as a clause; None if equal.

    there: this user on the node `first`. here: this user on the other node.
    """
    if there is None or (here is not None and here.uid == there.uid):
        return None
    if here is None:
        return f"the user {name}, who logs in to {first}, does not exist here"
    return f"the user {name} has uid {here.uid} here and {there.uid} on {first}"


MUNGE_USER = Operation("munge-user", plan_made)
USERS_AGREE = Operation("users", plan_agree)
