"""All changes that `provision` plans on fresh machines and at a Slurm site: commands, time limits, files, modes and owners.

Golden files: golden/changes/NAME.txt. Digests and sizes of files are replaced. No machine is reached, and nothing is changed.
"""

import re

import msgspec
import support_cluster_effects as effects
from support_golden import same_as_golden

from provision import order
from provision.datasets.stage import DataSetState
from provision.fact import Unanswered
from provision.facts.keys import KEYS, Keys
from provision.facts.nvidia import NVIDIA, Nvidia, PciDevice
from provision.facts.packages import PACKAGES, Packages
from provision.facts.room import FreeSpace, make_free_space_query
from provision.facts.system import SYSTEM
from provision.operation import Nothing, Site, Write
from provision.operations import datasets
from provision.provider import find_provider
from shardlab.cluster.cluster import load_cluster
from shardlab.remote.remote import Unreachable
from shardlab.workspace.workspace import Workspace

MACHINES = """\
schema: 1
name: lab
provider: ssh
nodes: [{name: head, host: 10.0.0.1, roles: [controller]}, {name: work1, host: 10.0.0.2}]
gpus: {per_node: 4, type: a100}
slurm: {}
ssh: {between_nodes: true}
storage: {shared: /srv/shared, server: head}
environments: {more: {packages: [einops==0.8.1], wheelhouse: /opt/wheels}}
"""
SITE = """\
schema: 1
name: site
provider: slurm
slurm: {account: abc}
storage: {shared: /scratch/a}
data: {path: /scratch/a/data, sets: [{name: mnist, archive: /scratch/mnist.tar}]}
environments:
  image: {container: /a.sif, runtime: apptainer}
  nodes: {container: /a.sqsh, runtime: pyxis}
  conda: {use: /opt/conda}
  job: {build: job, wheelhouse: /wheels}
  login: {build: login}
"""


def load(folder, text):
    (folder / "cluster.yaml").write_text(text)
    return load_cluster(folder / "cluster.yaml"), Workspace(folder)


def describe_change(change):
    """A change as text. A file has the first lines of its content, if it is text."""
    change, prefix = getattr(change, "change", change), getattr(change, "description_prefix", "")
    limit = f" [{change.timeout_s:g} s]" if hasattr(change, "timeout_s") else ""
    lines = [f"  {prefix}{change.description}{limit}", *(f"    {line}" for line in change.command.splitlines())]
    if isinstance(change, Write) and not re.search(r"\.tar$|constraints", change.path):
        lines += [f"    | {line}" for line in change.content.decode().splitlines()]
    return lines


def describe_plan(operation, site, target):
    """What an operation plans on a node, with its reason if it plans nothing."""
    try:
        planned = operation.plan(site, target)
    except (Unanswered, Unreachable) as error:
        planned = Nothing(str(error).replace(str(effects.FACTS), effects.FACTS.name))
    is_nothing = isinstance(planned, Nothing)
    lines = [f"  nothing: {planned.why}"] if is_nothing else [line for change in planned for line in describe_change(change)]
    return [f"{operation.name} on {target.node.name}:", *lines]


def same_as_golden_changes(name, lines):
    text = re.sub(r"\(\d+ bytes\)", "(N bytes)", re.sub(r"[0-9a-f]{12,}", "DIGEST", "\n".join(lines)))
    same_as_golden(f"changes/{name}.txt", f"{text}\n")


def test_fresh_machines_get_the_golden_changes(tmp_path):
    """Two machines with Ubuntu, of which one has GPUs and an installation of packages that was interrupted."""
    cluster, workspace = load(tmp_path, MACHINES)
    site = effects._two_machines(cluster, workspace)
    for target in site.targets:
        ubuntu = {"virt": "none", "id": "ubuntu", "codename": "noble", "pretty": "Ubuntu 24.04", "kernel": "6.8.0-1-generic"}
        target.facts.answers |= {
            PACKAGES.name: Packages({}, interrupted=target.node.name == "work1"),
            SYSTEM.name: msgspec.structs.replace(target.facts[SYSTEM], **ubuntu),
            NVIDIA.name: Nvidia(gpus=[PciDevice("0000:01:00.0", 0x0302, 0x20B0)], secure_boot=False),
            KEYS.name: Keys("alice", "/home/alice", None, (f"ssh-ed25519 {target.node.name}",)),
        }
        for python in (target.node.python, *(other.node.python for other in target.environments.values())):
            target.facts.answers[make_free_space_query(python.rpartition("/bin")[0]).name] = FreeSpace(
                40 << 30, 10**6, "/srv/shared"
            )
    operations = [one for one in order.select_operations(find_provider("ssh")) if one.name not in ("clock", "inventory")]
    lines = [
        line
        for operation in operations
        for target in (site.targets[:1] if operation.once else site.targets)
        for line in describe_plan(operation, site, target)
    ]
    same_as_golden_changes("machines", lines)


def test_a_slurm_site_gets_the_golden_changes(tmp_path, monkeypatch):
    state = DataSetState(False, True, "unpack the archive", makes=True)
    monkeypatch.setattr(datasets, "_ask_node", lambda *_: state)
    cluster, workspace = load(tmp_path, SITE)
    target, *others = (effects._login(cluster.for_environment(name), workspace) for name in (None, *cluster.environments))
    target.environments.update(zip(cluster.environments, others, strict=True))
    site = Site(cluster, workspace, [target])
    operations = [
        operation
        for operation in order.select_operations(find_provider("slurm"))
        if operation.name not in ("workspaces", "inventory")
    ]
    same_as_golden_changes("site", [line for operation in operations for line in describe_plan(operation, site, target)])
