"""The further environments of a cluster file: their folders, packages, space and entries in the inventory."""

import re
from pathlib import Path

import msgspec
import pytest
from support_cluster_effects import FACTS

from provision import software
from provision.cli import main
from provision.fact import Unanswered
from provision.facts.environment import ENVIRONMENT, InstalledEnvironment
from provision.facts.room import FreeSpace, make_free_space_query
from provision.nodes.local_node import LocalNode
from provision.operation import Nothing, RunCommand, Site
from provision.operations import inventory, space
from provision.operations.environment import SOFTWARE
from provision.plan import converge_site
from provision.providers import slurm
from provision.verbs import nodes as verbs
from shardlab.cluster import cluster
from shardlab.workspace.inventory import ProvisionedEnvironment
from shardlab.workspace.workspace import Workspace

NODES = """\
schema: 1
name: bench
provider: ssh
nodes: [{name: head, host: 10.0.0.1, roles: [controller]}, {name: work1, host: 10.0.0.2}]
environments:
  older: {packages: [torch==2.12.0, torchvision==0.27.0], wheelhouse: /opt/older-wheels}
  more: {packages: [einops==0.8.1]}
  wheels: {wheelhouse: /opt/wheels}
"""
SITE = """\
schema: 1
name: site
provider: slurm
slurm: {}
storage: {shared: /scratch/a}
environments:
  modules: {modules: [cuda/13]}
  wheels: {wheelhouse: /wheels}
  more: {packages: [einops==0.8.1]}
  image: {container: /a.sif, runtime: apptainer}
"""


def load(folder: Path, text: str) -> cluster.Cluster:
    (folder / "cluster.yaml").write_text(text)
    return cluster.load_cluster(folder / "cluster.yaml")


def machines(folder: Path, text: str = NODES, **installed: InstalledEnvironment) -> Site:
    """The nodes of a cluster file. installed: the answers of all nodes about their environments, by name; default: the
    environment of `environment`."""
    bench = load(folder, text)
    site = verbs._make_site(bench, Workspace(folder), verbs.find_provider("ssh").nodes(bench, Workspace(folder)), FACTS)
    for target in site.targets:
        for name, other in {"default": target, **target.environments}.items():
            other.facts.answers[ENVIRONMENT.name] = installed.get(name, InstalledEnvironment())
            other.facts.answers[make_free_space_query(other.node.python.rpartition("/bin")[0]).name] = FreeSpace(
                40 << 30, 10**6, "/"
            )
    return site


def complete(own_packages: tuple[str, ...] = ()) -> InstalledEnvironment:
    return InstalledEnvironment(software.compute_packages_digest(own_packages=own_packages), software.digest_source(), "3.11.2")


def test_the_environments_of_a_node_have_folders_and_packages_of_their_own(tmp_path):
    site = machines(tmp_path, default=complete())
    changes = SOFTWARE.plan(site, site.targets[0])
    assert not isinstance(changes, Nothing)
    assert {change.description.partition(":")[0] for change in changes} == {
        "environment older",
        "environment more",
        "environment wheels",
    }
    older, more, _ = (command for change in changes if " -m pip " in (command := change.command))
    assert "--find-links /opt/older-wheels" in older
    words = set(re.findall(r"[a-z]+==[0-9.]+", older))
    assert words == {"torch==2.12.0", "torchvision==0.27.0"}
    assert re.findall(r"[a-z]+==[0-9.]+", more) == ["einops==0.8.1"]
    folders = [target.node.python for target in (site.targets[0], *site.targets[0].environments.values())]
    assert len(set(folders)) == 4
    assert folders[0] == f"/opt/shardlab/python-{software.compute_packages_digest()}/bin/python"
    constraints = [change.change.content.decode() for change in changes if "tested package versions" in change.description]
    assert ["torch==" in text or "torchvision==" in text for text in constraints] == [False, True, True]
    assert all("\ntransformers==" in text for text in constraints)


def test_environments_that_exist_need_no_change(tmp_path):
    further = ("torch==2.12.0", "torchvision==0.27.0")
    site = machines(tmp_path, default=complete(), older=complete(further), more=complete(("einops==0.8.1",)), wheels=complete())
    planned = SOFTWARE.plan(site, site.targets[0])
    assert isinstance(planned, Nothing)
    assert [part.partition(":")[0] for part in planned.why.split("; environment ")[1:]] == ["older", "more", "wheels"]


def test_space_is_needed_for_each_environment_that_does_not_exist(tmp_path):
    site = machines(tmp_path, default=complete())
    planned = space.plan(site, site.targets[0])
    assert isinstance(planned, Nothing)
    assert "and packages and 3 Python environments may take 18 GiB" in planned.why  # 2, and 2 + 12 + 2: one is from the index
    with pytest.raises(Unanswered, match="and packages and 4 Python environments may take 30 GiB; nothing was installed"):
        _plan_space(machines(tmp_path), 20)


def _plan_space(site: Site, free_gib: int) -> None:
    target = site.targets[0]
    room = FreeSpace(free_gib << 30, 10**6, "/")
    folder = target.node.python.rpartition("/bin")[0]
    target.facts.answers |= {make_free_space_query("/").name: room, make_free_space_query(folder).name: room}
    space.plan(site, target)


def test_the_inventory_has_the_environments_that_exist_on_all_nodes(tmp_path):
    further = ("einops==0.8.1",)
    site = machines(tmp_path, default=complete(), more=complete(further))
    more = site.targets[0].environments["more"].node.python
    entry = ProvisionedEnvironment(
        more, site.cluster.environments["more"].compute_digest(), "3.11.2",
        software.compute_packages_digest(own_packages=further),
        software.digest_source(),
    )  # fmt: skip
    assert inventory._list_environments(site) == {"more": entry}
    site.targets[1].environments["more"].facts.answers[ENVIRONMENT.name] = InstalledEnvironment(version="3.11.2")
    assert inventory._list_environments(site) == {}


def test_the_environments_of_a_site_have_folders_of_their_own(tmp_path):
    site = load(tmp_path, SITE)
    folders = [slurm.find_environment_folder(site.for_environment(name)) for name in (None, *site.environments)]
    assert len(set(folders)) == 5
    alone = msgspec.structs.replace(site, environments={})
    assert folders[0] == slurm.find_environment_folder(alone)


@pytest.mark.parametrize(("text", "key"), [(NODES, "packages: [einops==0.8.1]"), (SITE, "modules: [cuda/13]")])
@pytest.mark.parametrize("is_plain", [True, False])
def test_an_environment_with_the_keys_of_the_default_does_not_move_the_default(tmp_path, text, key, is_plain):
    keys = "" if is_plain else key
    head = f"{text.partition('environments:')[0]}environment: {{{keys}}}\n"
    alone = load(tmp_path, head)
    site = load(tmp_path, f"{head}environments: {{same: {{{keys}}}, again: {{{keys}}}}}\n")
    provider, workspace = verbs.find_provider(site.provider), Workspace(tmp_path)

    def python(member):
        return provider.nodes(member, workspace)[0].python

    assert python(site) == python(alone)
    assert python(site.for_environment("same")) == python(site.for_environment("again")) != python(site)


def test_environments_with_equal_keys_are_made_once(tmp_path):
    texts = (NODES, f"{NODES}  more-again: {{packages: [einops==0.8.1]}}\n")
    sites = [machines(tmp_path, text) for text in texts]
    plain, doubled = ([change.description for change in SOFTWARE.plan(site, site.targets[0])] for site in sites)
    assert doubled == plain != []


def test_a_change_is_planned_anew_from_the_present_state_of_all_environments(tmp_path):
    """After an operation changed an environment, the answers about all environments of the node are asked again."""
    bench = load(tmp_path, f"schema: 1\nname: h\nprovider: local\nenvironments: {{other: {{use: {tmp_path}}}}}\n")
    site = verbs._make_site(bench, Workspace(tmp_path), [LocalNode()], None)
    other = site.targets[0].environments["other"]
    assert other.node.python == f"{tmp_path}/bin/python"
    assert other.facts[ENVIRONMENT].packages is None
    mark = RunCommand("mark", ["sh", "-c", f"echo 0123 > {tmp_path}/packages.made"], root=False)
    operation = msgspec.structs.replace(SOFTWARE, plan=lambda site, target: [mark])
    converge_site(site, [operation], targets=site.targets, only_names={SOFTWARE.name}, is_dry_run=False)
    assert other.facts[ENVIRONMENT].packages == "0123"


def test_provision_plan_lists_the_changes_of_each_environment(tmp_path, capsys):
    (tmp_path / "cluster.yaml").write_text(NODES)
    words = ["plan", "--pretend", str(FACTS), "--workspace", str(tmp_path), "--only", "environment"]
    main([str(tmp_path / "cluster.yaml"), *words, "--trust"])
    printed = capsys.readouterr().out
    assert "environment older: install the packages from /opt/older-wheels" in printed
    assert "environment more: install the packages" in printed
