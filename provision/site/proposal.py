"""Proposes the values of a cluster file for a Slurm site from what the site answered. Pure: it asks nothing."""

from __future__ import annotations

import re

import msgspec

from provision.facts.node_types import NodeType
from provision.facts.partitions import SitePartition
from provision.facts.pythons import OLDEST
from provision.facts.shared_folders import SharedFolder
from provision.site.survey import Survey

HOUR_S = 3600
REQUESTS = ("gpus-per-node", "gres", "gpus")
_LARGE = re.compile(r"^[A-Z_]*(SCRATCH|WORK|PROJECT)[A-Z0-9_]*$")
_VERSION = re.compile(r"/(\d+)\.(\d+)")


class Proposal(msgspec.Struct, frozen=True):
    """The values of a cluster file. None: nothing is proposed, and the file says why."""

    partition: SitePartition | None
    node_type: NodeType | None
    account: str | None
    accounts: tuple[str, ...]  # all that are valid in the partition
    qos: tuple[str, ...]  # that the user may choose with this account
    module: str | None  # a module with a Python that is new enough, if it is needed
    python: str | None  # an interpreter with another name than python3
    folder: SharedFolder | None
    has_python: bool


def propose(site: Survey) -> Proposal:
    """The proposal for the first partition that this user may use: one with GPUs before the default partition."""
    usable = [partition for partition in site.partitions if partition.is_up and accounts_in(site, partition) is not None]
    with_gpus = [partition for partition in usable if _largest(site, partition.name, gpus=True) is not None]
    default = [partition for partition in usable if partition.is_default]
    ordered = [*[partition for partition in with_gpus if partition.is_default], *with_gpus, *default, *usable]
    partition = ordered[0] if ordered else None
    accounts = (accounts_in(site, partition) or ()) if partition is not None else ()
    account = accounts[0] if accounts else None
    module, python, has_python = _python(site)
    return Proposal(
        partition=partition,
        node_type=_largest(site, partition.name, gpus=partition in with_gpus) if partition is not None else None,
        account=account,
        accounts=accounts,
        qos=tuple(sorted({name for entry in site.associations if entry.account == account for name in entry.qos})),
        module=module,
        python=python,
        folder=_folder(site),
        has_python=has_python,
    )


def accounts_in(site: Survey, partition: SitePartition) -> tuple[str, ...] | None:
    """The user's accounts that are valid in a partition, an account for GPUs first; () if the accounts are not known; None if
    the partition accepts none of them."""
    if not site.associations:
        return ()
    names = {entry.account for entry in site.associations if entry.partition in (None, partition.name)}
    allowed = names - set(partition.denied_accounts) if partition.accounts is None else names & set(partition.accounts)
    if not allowed:
        return None
    has_gpus = _largest(site, partition.name, gpus=True) is not None
    return tuple(sorted(allowed, key=lambda name: (not (has_gpus and re.search(r"[_-]g(pu)?$", name)), name)))


def requests(proposal: Proposal) -> dict[str, list[str]]:
    """For each way to request a GPU, the options of sbatch with which to test it. {} without a partition with GPUs."""
    kind, where = proposal.node_type, proposal.partition
    if kind is None or where is None or not kind.gpus:
        return {}
    common = [f"--partition={where.name}", *([f"--account={proposal.account}"] if proposal.account else [])]
    gpu = kind.gpus[0]
    name = f"{gpu.type}:" if gpu.type else ""
    options = {"gpus-per-node": f"--gpus-per-node={name}1", "gres": f"--gres=gpu:{name}1", "gpus": f"--gpus={name}1"}
    return {request: [*common, options[request]] for request in REQUESTS}


def _largest(site: Survey, partition: str, *, gpus: bool) -> NodeType | None:
    """The most frequent type of nodes of a partition, of those with GPUs if `gpus`."""
    kinds = [kind for kind in site.node_types if kind.partition == partition and (kind.gpus or not gpus)]
    return max(kinds, key=lambda kind: kind.count, default=None)


def _python(site: Survey) -> tuple[str | None, str | None, bool]:
    """(a module, an interpreter, whether either or python3 itself is new enough)."""
    plain = [path for path in site.pythons if path.endswith("/python3") and site.pythons[path] >= OLDEST]
    if plain:
        return None, None, True
    named = [path for path, version in site.pythons.items() if version >= OLDEST]
    if named:
        return None, named[0], True
    modules = [
        (version, name)
        for name in site.modules
        if name.rpartition("/")[0].rpartition("/")[2].lower() in ("python", "cpython", "cray-python")
        and (match := _VERSION.search(name))
        and (version := (int(match[1]), int(match[2]))) >= OLDEST
    ]
    return (max(modules)[1] if modules else None), None, bool(modules)


def _folder(site: Survey) -> SharedFolder | None:
    """The folder with the most free space among those that machines share; else among those whose variables sites set for large
    data. The home folder only if there is no other."""
    large = [folder for folder in site.folders if folder.is_network or _LARGE.match(folder.variable)]
    return max(large, key=_preference, default=None)


def _preference(folder: SharedFolder) -> tuple[bool, bool, bool, int]:
    """Variables such as CONDA_PREFIX name folders in the home folder: a variable for large data comes before them."""
    is_large = _LARGE.match(folder.variable) is not None
    return is_large, folder.variable != "HOME", folder.is_network, folder.free_bytes or 0
