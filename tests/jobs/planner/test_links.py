"""The links of the planner: latency and bandwidth are fitted to the all-reduces that `provision` measured."""

import json
import math

import msgspec
import pytest

from jobs.cli import main
from jobs.planner import link_fit
from provision import inventory_file
from provision.check import Outcome
from provision.fact import FactAnswers
from provision.operation import Site, Target
from provision.verify import Finding
from shardlab.cluster.all_reduce import AllReduceTime, MeasuredAllReduce
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 256 * KIB, 16 * MIB)


def ring_s(ranks, size, alpha_s, bandwidth):
    """Seconds of an all-reduce by a ring of n ranks: 2(n-1) hops; in each hop, a rank sends an n-th of the tensor."""
    return sum(alpha_s + size / ranks / bandwidth for _ in range(2 * (ranks - 1)))


def tree_s(ranks, size, alpha_s, bandwidth):
    """Seconds of an all-reduce by a binary tree, up and down.

    The tensor is sent in pieces, so each level of the tree adds latency only.
    """
    return 2 * math.ceil(math.log2(ranks)) * alpha_s + 2 * size / bandwidth


def measured(seconds, *, nodes=("a", "b"), ranks=2, backend="gloo", gpu=None, sizes=SIZES, noise=0.0):
    times = tuple(
        AllReduceTime(size, one, one * (1 - noise), one * (1 + noise), size / one / 1e9)
        for size in sizes
        for one in [seconds(size)]
    )
    return MeasuredAllReduce(tuple(nodes), ranks, backend, gpu, "2026-11-24T12:00:00+00:00", times)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_latency_and_bandwidth_of_a_ring_are_found_again(ranks):
    found = link_fit.fit_all_reduce(measured(lambda size: ring_s(ranks, size, 40e-6, 1.1e9), ranks=ranks))
    assert (found.alpha_s, found.bytes_per_s) == (pytest.approx(40e-6), pytest.approx(1.1e9))
    assert found.relative_spread == 0.10  # the smallest spread that a fit reports


def test_nccl_uses_a_tree_for_small_tensors_of_many_ranks():
    def seconds(size):
        return min(ring_s(32, size, 10e-6, 20e9), tree_s(32, size, 10e-6, 20e9))

    found = link_fit.fit_all_reduce(measured(seconds, ranks=32, backend="nccl", sizes=(16 * KIB, 16 * MIB, 128 * MIB)))
    assert (found.alpha_s, found.bytes_per_s) == (pytest.approx(10e-6), pytest.approx(20e9))


def test_the_range_contains_the_slowest_and_the_fastest_iteration():
    one = measured(lambda size: ring_s(2, size, 40e-6, 1e9), noise=0.3)
    fitted = link_fit.fit_link("network", [one])
    assert fitted.bytes_per_s.low <= 1e9 / 1.3
    assert fitted.bytes_per_s.high >= 1e9 / 0.7 * 0.9
    assert fitted.alpha_s.high < 40e-6 < fitted.alpha_s.low  # `low` is the slow link, with more latency
    assert fitted.how == "measured by provision's all-reduce of 2 nodes (gloo, 2026-11-24)"


def test_the_link_of_several_nodes_has_their_median_and_full_range():
    rates = {"a": 100e9, "b": 200e9, "c": 220e9}
    several = [
        measured(lambda size, rate=rate: ring_s(2, size, 5e-6, rate), nodes=(name,), backend="nccl", gpu="g")
        for name, rate in rates.items()
    ]
    fitted = link_fit.fit_link("nvlink", several)
    assert fitted.bytes_per_s.likely == pytest.approx(200e9)
    assert (fitted.bytes_per_s.low, fitted.bytes_per_s.high) == (pytest.approx(100e9 / 1.1), pytest.approx(220e9 * 1.1))


@pytest.mark.parametrize(
    "one",
    [measured(lambda size: 0.01, sizes=(MIB,)), measured(lambda size: 1 / size)],
    ids=["one size", "large tensors are faster than small ones"],
)
def test_times_that_show_no_bandwidth_give_no_link(one):
    assert link_fit.fit_all_reduce(one) is None
    assert link_fit.fit_link("network", [one]) is None


CLUSTER = """\
schema: 1
name: site
provider: ssh
nodes:
  - {name: a, host: 127.0.0.1, roles: [controller, worker]}
  - {name: b, host: 127.0.0.2, roles: [worker]}
gpus: {type: a100, per_node: 8, memory_gib: 80}
storage: {shared: /scratch/a}
slurm: {}
"""
MATRIX = """\
schema: 1
name: m
defaults: {workload: gpt2-large, strategy: ddp, gpus: 16, gpu_batch_size: 1, steps: 2, precision: bf16}
"""


def planned(folder, capsys, all_reduces, network=""):
    """The prediction of a cell on two nodes whose inventory has these measurements."""
    (folder / "cluster.yaml").write_text(CLUSTER + network)
    (folder / "m.yaml").write_text(MATRIX)
    nodes = [{"name": name, "host": name, "roles": ["worker"]} for name in "ab"]
    files.make_folder(folder / ".shardlab")
    known = {"schema": 1, "cluster": "site", "nodes": nodes, "all_reduces": msgspec.to_builtins(all_reduces)}
    inventory.inventory_path(Workspace(folder)).write_text(json.dumps(known))
    assert main(["plan", "--matrix", str(folder / "m.yaml"), "--workspace", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["cells"][0]["predicted"]


def test_a_plan_uses_the_measured_network_in_place_of_the_table_and_says_so(tmp_path, capsys):
    fast, slow = (measured(lambda size, rate=rate: ring_s(2, size, 50e-6, rate)) for rate in (3e9, 0.1e9))
    assert planned(tmp_path, capsys, [])["step_s"] is None  # the cluster file names no link between nodes
    steps = [planned(tmp_path, capsys, [one]) for one in (fast, slow)]
    assert steps[0]["step_s"]["likely"] < steps[1]["step_s"]["likely"]
    assert "link: network measured by provision's all-reduce of 2 nodes (gloo, 2026-11-24)" in steps[0]["how"]
    # 3.1 GB of gradients at 0.1 GB/s take longer than backward, so overlap cannot hide them
    assert steps[1]["step_s"]["likely"] > 2 * 15 / 16 * 774_030_080 * 4 / 0.1e9 * 0.9
    named = planned(tmp_path, capsys, [fast], "network: {between_nodes: ethernet-25}\n")
    assert "link: ethernet-25 measured by provision's" in named["how"]


def test_measurements_over_another_backend_or_gpu_are_not_used_for_a_link(tmp_path, capsys):
    slow = measured(lambda size: ring_s(2, size, 50e-6, 0.1e9))
    hdr = "network: {between_nodes: infiniband-hdr}\n"
    assert "link: infiniband-hdr by its data sheet" in planned(tmp_path, capsys, [slow], hdr)["how"]
    over_nccl = msgspec.structs.replace(slow, backend="nccl", gpu="NVIDIA H100 80GB HBM3")
    assert "link: infiniband-hdr by its data sheet" in planned(tmp_path, capsys, [over_nccl], hdr)["how"]
    on_these = msgspec.structs.replace(over_nccl, gpu="NVIDIA A100-SXM4-80GB")
    assert "link: infiniband-hdr measured by provision's" in planned(tmp_path, capsys, [on_these], hdr)["how"]


@pytest.mark.parametrize("damage", [{"seconds": 0}, {"bytes": "x"}, {"seconds": -1.0}])
def test_a_damaged_measurement_is_named_and_provision_drops_it(tmp_path, damage):
    one = msgspec.to_builtins(measured(lambda size: ring_s(2, size, 50e-6, 1e9)))
    one["times"] = [{**entry, **damage} for entry in one["times"]]
    path = inventory.inventory_path(Workspace(tmp_path))
    files.make_folder(path.parent)
    path.write_text(json.dumps({"schema": 1, "cluster": "site", "nodes": [], "all_reduces": [one]}))
    with pytest.raises(InputError, match=rf"{next(iter(damage))}.*provision CLUSTER\.yaml"):
        inventory.read_any_inventory(Workspace(tmp_path))
    assert inventory.read_all_reduces(Workspace(tmp_path), "site") == ()
    assert inventory_file.select_measurements(site(tmp_path, "a", "b"), path.read_bytes()) == []


class NamedNode:
    """A node of which only the name is known."""

    def __init__(self, name):
        self.name = name


def site(folder, *names):
    targets = [Target(NamedNode(name), FactAnswers(NamedNode(name))) for name in names]
    return Site(Cluster(schema=1, name="site", provider="ssh"), Workspace(folder), targets)


def finding(one):
    return Finding("a", "network", Outcome(True, "", all_reduces=(one,)))


def test_an_inventory_keeps_the_first_measurement_until_verify_measures_again(tmp_path):
    here, path = site(tmp_path, "a", "b"), inventory.inventory_path(Workspace(tmp_path))
    first, second = (measured(lambda size, rate=rate: size / rate) for rate in (1e9, 2e9))
    inventory_file.record_all_reduces(here, [finding(first)], replaces_earlier=False)
    assert not path.exists()  # without an inventory, nothing is stored
    files.make_folder(path.parent)
    path.write_text('{"schema": 1, "cluster": "site", "nodes": [], "later": 1}')
    inventory_file.record_all_reduces(here, [finding(first)], replaces_earlier=False)
    inventory_file.record_all_reduces(here, [finding(second)], replaces_earlier=False)
    assert inventory.read_all_reduces(Workspace(tmp_path), "site") == (first,)
    inventory_file.record_all_reduces(here, [finding(second)], replaces_earlier=True)
    assert inventory.read_all_reduces(Workspace(tmp_path), "site") == (second,)
    assert json.loads(path.read_text())["later"] == 1
    assert inventory.read_all_reduces(Workspace(tmp_path), "other") == ()


def test_measurements_of_a_node_that_left_the_cluster_are_dropped(tmp_path):
    both, alone = measured(lambda size: size / 1e9), measured(lambda size: size / 1e9, nodes=("a",))
    written = msgspec.json.encode({"all_reduces": [both, alone, {"nodes": []}]})
    kept = inventory_file.select_measurements(site(tmp_path, "a"), written)
    assert kept == msgspec.to_builtins([alone])
    assert len(inventory_file.select_measurements(site(tmp_path, "a", "b"), written)) == 2
