"""Every provider declares its features. A missing feature is reported by the same code for all providers."""

import re
from pathlib import Path

import pytest

from provision import order
from provision.operation import Nothing
from provision.plan import MACHINE_OPERATION
from provision.provider import NOTHING_TO_DO, Provider, find_provider
from provision.providers import virtual
from shardlab import registry
from shardlab.cluster.cluster import Cluster
from shardlab.errors import ShardlabError, UnknownName
from shardlab.workspace.workspace import Workspace

NAMES = registry.list_plugin_names("provision.providers")
LEAST = Provider("given", "somebody else runs its machines", lambda cluster, workspace: [])
CLUSTER = Cluster(schema=1, name="bench", provider="ssh")


@pytest.mark.parametrize("name", NAMES)
def test_a_provider_has_the_name_of_its_file_and_existing_operations_and_checks(name):
    made = find_provider(name)
    assert made.name == name
    operations = {MACHINE_OPERATION, *(operation.name for operation in order.ALL_OPERATIONS)}
    assert (made.operations or set()) <= operations
    checks = {check.name for stage in order.select_checks(LEAST) for check in stage} | order.ONLY_NAMED
    assert (made.checks or set()) <= checks


def test_a_provider_without_a_function_for_a_verb_says_why_there_is_nothing_to_do(tmp_path):
    answers = {verb: LEAST.carry_out_verb(verb, CLUSTER, Workspace(tmp_path)) for verb in NOTHING_TO_DO}
    assert {verb: answer for verb, answer in answers.items() if not re.match("provider given.* nothing to ", answer)} == {}
    assert {verb for verb, answer in answers.items() if LEAST.origin in answer} == {"request", "profile", "extend"}


def test_a_provider_with_only_nodes_gets_every_root_operation_and_one_lock(tmp_path):
    names = [operation.name for operation in order.select_operations(LEAST)]
    assert names == [operation.name for operation in order.ALL_OPERATIONS if operation.name not in order.ONLY_NAMED]
    assert {"site-environment", "extra-disks"} <= order.ONLY_NAMED
    assert LEAST.bring_up(CLUSTER, Workspace(tmp_path), None) == Nothing("this machine already exists")
    assert LEAST.locks(CLUSTER) == [Path.home() / ".cache/shardlab/locks/bench.lock"]


def test_a_provider_chooses_its_operations_and_checks_and_not_their_order():
    some = Provider(
        "site", "a site runs them", list, operations=frozenset({"inventory", "environment"}), checks=frozenset({"gpus"})
    )
    assert [operation.name for operation in order.select_operations(some)] == ["environment", "inventory"]
    assert [[check.name for check in stage] for stage in order.select_checks(some)] == [[], ["gpus"], [], []]


def test_a_function_of_a_provider_is_called_with_the_cluster_and_the_workspace(tmp_path):
    def request(cluster, workspace):
        return f"{cluster.name} in {workspace.path}"

    some = Provider("cloud", "a portal lends them", lambda cluster, workspace: [], request=request)
    assert some.carry_out_verb("request", CLUSTER, Workspace(tmp_path)) == f"bench in {tmp_path}"


def test_operations_of_a_single_provider_keep_the_common_order():
    cloudlab = find_provider("cloudlab")
    names = [operation.name for operation in order.select_operations(cloudlab)]
    assert names.index("disks") < names.index("extra-disks") < names.index("nfs-server")
    assert "experiment_network" in [check.name for stage in order.select_checks(cloudlab) for check in stage]
    assert "experiment_network" not in [check.name for stage in order.select_checks(LEAST) for check in stage]


def test_an_unknown_provider_is_refused_with_the_menu():
    with pytest.raises(UnknownName, match="cloudlab, local, slurm, ssh, virtual"):
        find_provider("cloud")
    assert issubclass(UnknownName, ShardlabError)


ALL = frozenset({"bring_up", "locks", "request", "profile", "warm", "down", "present", "obtain", "extend", "confirmation"})
# For each provider: its own functions, its only operations, its only checks (None: all), and its additional ones.
PROVIDERS = {
    "cloudlab": (ALL - {"bring_up", "locks", "warm"}, None, None, {"extra-disks", "experiment_network"}),
    "local": ({"locks"}, {"datasets", "inventory"}, {"torch", "gpus", "all_reduce", "compile"}, set()),
    "slurm": (set(), {"workspaces", "site-environment", "datasets", "inventory"}, {"node_types"}, set()),
    "ssh": (set(), None, None, set()),
    "virtual": ({"bring_up", "locks", "warm", "down"}, None, None, set()),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_provider_has_its_functions_operations_and_checks(name):
    made = find_provider(name)
    functions = {field for field in ALL if getattr(made, field) is not getattr(LEAST, field)}
    assert (functions, made.operations, made.checks, made.additional) == PROVIDERS[name]


def test_provider_local_locks_no_cluster_and_practice_nodes_lock_theirs(tmp_path, monkeypatch):
    monkeypatch.setattr(virtual, "LOCKS_FOLDER", tmp_path / "locks")  # else this test needs root
    assert find_provider("local").locks(CLUSTER) == []
    assert len(find_provider("virtual").locks(CLUSTER)) > 0
