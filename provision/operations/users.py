"""Users with the same uid and gid on all nodes: munge's messages and files on shared storage contain numbers, not names."""

from __future__ import annotations

from provision.existing_slurm import existing, used
from provision.fact import Unanswered
from provision.facts.users import USERS, User
from provision.operation import Change, Nothing, Operation, Site, Target, shell

SYSTEM_USERS = ("slurm", "munge")
MUNGE_ID = 499  # Debian gives out the lowest free number from 100 on, systemd the highest up to 999; slurm's is fixed, 64030


def plan_made(site: Site, target: Target) -> list[Change] | Nothing:
    """Make munge's user before its package makes one with a number that differs between nodes. Raises Unanswered."""
    if site.cluster.slurm is None:
        return Nothing("the cluster has no Slurm")
    if (there := existing(site)) is not None:
        return used(there)
    if "munge" in target.facts[USERS].known:
        return Nothing("the user munge exists")
    others = [users.known["munge"] for _, users in site.told(USERS) if "munge" in users.known]
    user = others[0] if others else User(MUNGE_ID, MUNGE_ID)
    make = (
        f"getent group munge >/dev/null || groupadd --system --gid {user.gid} munge\n"
        f"useradd --system --uid {user.uid} --gid munge --no-create-home --home-dir /nonexistent "
        "--shell /usr/sbin/nologin munge"
    )
    return [shell(f"make the user munge, {user.uid}:{user.gid} on all nodes", make)]


def plan_agree(site: Site, target: Target) -> list[Change] | Nothing:
    """Never changes a user that exists. Raises Unanswered if a number differs from the one on the first node."""
    users = target.facts[USERS]
    first, wanted = site.told(USERS)[0]
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
    if site.cluster.storage.shared is not None:  # what one node writes there, another could not change
        raise Unanswered(
            f"{where}: {said}; on shared storage its files would belong to another user: use the same number on all nodes."
        )
    return Nothing(f"{said}; this is no problem without shared storage")


def _login(name: str, there: User | None, here: User | None, first: str) -> str | None:
    """How the user who logs in to the first node differs on this node; None if it does not."""
    if there is None or (here is not None and here.uid == there.uid):
        return None
    if here is None:
        return f"the user {name}, who logs in to {first}, does not exist here"
    return f"the user {name} has uid {here.uid} here and {there.uid} on {first}"


MUNGE_USER = Operation("munge-user", plan_made)
USERS_AGREE = Operation("users", plan_agree)
