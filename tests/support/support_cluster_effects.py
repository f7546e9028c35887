"""What a cluster file leads to, as text: logins, commands on nodes, scripts of jobs, records of runs, predictions, requests.

Each function of EFFECTS takes (the cluster, a workspace). No machine is reached, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import support_planner
from support_cells import CELL

from jobs.planner import machine, predict
from jobs.planning import plan
from jobs.rendering import render
from provision import order
from provision.cloudlab import profile_request, token
from provision.fact import FactAnswers, Unanswered
from provision.facts.disk import Disk, make_disk_query
from provision.facts.environment import ENVIRONMENT, InstalledEnvironment
from provision.facts.mounts import MountPlace, make_mount_query
from provision.facts.room import make_free_space_query
from provision.nodes import pretend
from provision.operation import Change, Nothing, Site, Target, Write
from provision.operations import datasets, packages
from provision.operations.hosts import HOSTS
from provision.plan import converge_site
from provision.practice import base
from provision.provider import find_provider
from provision.providers import cloudlab, virtual
from provision.site import requests
from shardlab.cluster.cluster import Cluster
from shardlab.remote.remote import CommandOutput, Unreachable
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

FACTS = Path(__file__).parents[1] / "recorded" / "practice_facts.json"  # of the nodes head and work1
GPUS = 4  # of each of the two nodes of the run


def logins(cluster: Cluster, workspace: Workspace) -> str:
    """How each node is reached."""
    lines = []
    for node in find_provider(cluster.provider).nodes(cluster, workspace):
        remote = getattr(node, "remote", None)
        login = remote.address if remote is not None else None
        lines.append(f"{node.name} {node.host} port={node.port} between={node.address} {login} wheels={node.wheelhouse}")
    return "\n".join(lines)


def changes(cluster: Cluster, workspace: Workspace) -> str:
    """The changes that `provision` would make on two fresh machines."""
    made = _two_machines(cluster, workspace)
    return "\n".join(
        text
        for operation in order.select_operations(find_provider(cluster.provider))
        for target in (made.targets[:1] if operation.once else made.targets)
        for text in _planned(operation.plan, made, target)
    )


def states(cluster: Cluster, workspace: Workspace) -> str:
    """The states in which a dry run leaves the operation that writes the names of two fresh machines."""
    made = _two_machines(cluster, workspace)
    steps = converge_site(made, [HOSTS], targets=made.targets, only_names={HOSTS.name}, is_dry_run=True)
    return "\n".join(f"{step.node}: {step.state}" for step in steps)


def _two_machines(cluster: Cluster, workspace: Workspace) -> Site:
    targets = _make_targets(cluster, workspace)
    for name in cluster.environments:
        for target, other in zip(targets, _make_targets(cluster.for_environment(name), workspace), strict=True):
            target.environments[name] = other
    return Site(cluster, workspace, targets)


def _make_targets(cluster: Cluster, workspace: Workspace) -> list[Target]:
    of_nodes = find_provider(cluster.provider)
    found = pretend.read_pretended_facts(FACTS, of_nodes.nodes(cluster, workspace))
    for facts in found:
        for path in ("/srv/disk", "/srv/shared"):
            facts.answers |= {
                make_mount_query(path).name: MountPlace(),
                make_free_space_query(path).name: facts[make_free_space_query("/")],
            }
        facts.answers[make_disk_query("/dev/nvme9n1").name] = Disk("/dev/nvme9n1")
    return [Target(facts.node, facts, entry) for facts, entry in zip(found, cluster.nodes, strict=True)]


class LoginWithoutJobs:
    """A login node with much free space on which Slurm shows no job."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def run(self, argv: Any, **options: Any) -> CommandOutput:
        return CommandOutput(0, f"{100 << 30} 1000000 /scratch\n" if "room" in argv else "", "")


def site(cluster: Cluster, workspace: Workspace) -> str:
    """The environment that `provision` would make at a Slurm site, with the scripts and the options of its jobs."""
    target, *others = (_login(cluster.for_environment(name), workspace) for name in (None, *cluster.environments))
    target.environments.update(zip(cluster.environments, others, strict=True))
    of_it = Site(cluster, workspace, [target])
    planned = next(one for one in order.select_operations(find_provider("slurm")) if one.name == "site-environment")
    two_nodes = " ".join(requests.list_sbatch_options(cluster, node_count=2, minutes=10, gpu_count=GPUS))
    return "\n".join([f"two nodes: {two_nodes}", *_planned(planned.plan, of_it, target)])


def _login(cluster: Cluster, workspace: Workspace) -> Target:
    """A login node without an environment."""
    (login,) = find_provider(cluster.provider).nodes(cluster, workspace)
    target = Target(LoginWithoutJobs(login), FactAnswers(LoginWithoutJobs(login)))
    target.facts.answers[ENVIRONMENT.name] = InstalledEnvironment()
    return target


def _planned(planner: Callable[[Site, Target], Any], of_it: Site, target: Target) -> list[str]:
    try:
        made = planner(of_it, target)
    except (Unanswered, Unreachable) as error:
        return [str(error)]
    return [made.why] if isinstance(made, Nothing) else [_text(change) for change in made]


def _text(change: Change) -> str:
    written = isinstance(change, Write) and b"\0" not in change.content  # the source of shardlab is a tar file
    return f"{change.description}\n{change.command}\n{change.content.decode() if written else ''}"


def job(cluster: Cluster, workspace: Workspace) -> str:
    """The script of a run on two nodes, and its record."""
    source = render.make_render_context("m", cluster, workspace)
    cell = msgspec.structs.replace(CELL, gpus=2 * GPUS, dp=2 * GPUS, nnodes=2)
    run = render.make_run(cell, 1, 1, source)
    return f"{render.render_script(run, workspace.path, cluster, None)}\n{msgspec.json.encode(run).decode()}"


def typed_job(cluster: Cluster, workspace: Workspace) -> str:
    """The script of a run on GPUs of the type h100."""
    source = render.make_render_context("m", cluster, workspace)
    cell = msgspec.structs.replace(CELL, gpus=2 * GPUS, dp=2 * GPUS, nnodes=2, gpu_type="h100")
    return render.render_script(render.make_run(cell, 1, 1, source), workspace.path, cluster, None)


def prediction(cluster: Cluster, workspace: Workspace) -> str:
    """What `jobs plan` knows about the machines, and predicts for a run on two nodes."""
    planned = machine.plan_machine(cluster, None)
    cell = support_planner.cell(gpus=2 * GPUS, nnodes=2)
    links = [link and link.name for link in (planned.link_inside_node, planned.link_between_nodes)]
    network = planned.link_between_nodes and planned.link_between_nodes.how
    found = predict.predict_run(cell, planned)
    typed = machine.plan_machine(cluster, "h100").gpu_memory_bytes
    return (
        f"{links} {network} memory={planned.gpu_memory_bytes} of h100={typed} cost={found.cost} "
        f"step={found.step_s} {plan.find_cluster_capacity(cluster)}"
    )


def sets(cluster: Cluster, workspace: Workspace) -> str:
    """The request with which a node stages each data set."""
    of_it = Site(cluster, workspace, [])
    return "\n".join(datasets._make_request(of_it, one) for one in cluster.data.list_data_sets())


def practice(cluster: Cluster, workspace: Workspace) -> str:
    """The machine of each practice node."""
    folder = base.find_base_folder(packages.ALL_PACKAGES, cluster.release)
    nodes = virtual.list_nodes(cluster, workspace)
    return "\n".join(f"{node.python} {virtual._make_machine(cluster, workspace, node, folder)}" for node in nodes)


def request(cluster: Cluster, workspace: Workspace) -> str:
    """The requests that create an experiment of CloudLab."""
    made = profile_request.plan_profile_request(cluster)
    return f"{msgspec.json.encode(made.request.body).decode()}\n{cloudlab.render_rspec_request(cluster, workspace)}"


def address_of_portal(cluster: Cluster, workspace: Workspace) -> str:
    """The address to which the requests for CloudLab are sent."""
    return cloudlab._open_portal(cluster, token.Token("0", "a file"), Output()).url


EFFECTS = {
    made.__name__: made
    for made in (logins, changes, states, site, job, typed_job, prediction, sets, practice, request, address_of_portal)
}
