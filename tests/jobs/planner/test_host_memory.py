"""The predicted host memory of the processes of a run on a node: compared with real ranks, and the cells that are left out."""

import time
from pathlib import Path

import pytest
from support_planner import cell
from support_trainers import Bench

from jobs.planner import host_memory, memory, planner_table, predict
from jobs.planner.machine import NO_GPU_MACHINE, PlannedMachine
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.slurm_keys import Slurm
from shardlab.files import files
from shardlab.runs.prediction import make_exact_range
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace

GIB = 1 << 30
PARAMETERS = 774_030_080  # of gpt2-large
GPU = PlannedMachine(True, "a100-80gb", gpu_memory_bytes=make_exact_range(80 * GIB))
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainers", "run")


def host_bytes(one, machine=GPU, node_bytes=None):
    return predict.predict_run(one, machine, node_bytes=node_bytes).host_bytes


def private_bytes(folder):
    """The private bytes of each process that works in a folder, by process id."""
    sizes = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                lines = [line.split() for line in (entry / "smaps_rollup").read_text().splitlines()]
                sizes[entry.name] = sum(int(line[1]) << 10 for line in lines if line[0] in ("Private_Clean:", "Private_Dirty:"))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return sizes


@pytest.mark.parametrize(("launcher", "command"), [("fork", ()), ("torchrun", TORCHRUN)])
def test_the_private_pages_of_real_ranks_are_within_the_predicted_range(tmp_path, launcher, command):
    bench = Bench(tmp_path)
    run_dir = bench.run_dir(strategy="ddp", gpus=2, steps=300)
    largest = {}
    with bench.start(run_dir, *command) as process:
        while process.poll() is None:
            for number, size in private_bytes(run_dir.path.resolve()).items():
                largest[number] = max(size, largest.get(number, 0))
            time.sleep(0.1)
    assert process.returncode == 0
    ranks = sorted(largest.values())[-2:]
    term = memory.read_memory_terms()["rank_fork" if launcher == "fork" else "rank_process"].scale(memory.MIB)
    tensors = memory.predict_memory(run_dir.read_run().cell, on_gpu=False).tensor_bytes
    for size in ranks:
        assert term.low <= size <= term.high + 2 * tensors.high, (launcher, largest)


@pytest.mark.parametrize(("strategy", "options", "on_host"), [
    ("ddp", {}, 8 * 4), ("zero2", {}, 8 * 4),  # each rank makes the whole model in fp32
    ("fsdp2", {}, 4), ("zero3", {}, 4),  # rank 0 makes it, and the other ranks get their shards
    ("fsdp2", {"offload": "cpu"}, 4 + 4 + 8),  # the ranks keep weights, gradients and two states of Adam, each rank an eighth
    ("zero3", {"offload_optimizer": "cpu", "offload_param": "cpu"}, 4 + 4 + 8 + 2),
])  # fmt: skip
def test_a_node_holds_the_initial_model_or_what_ranks_offload(strategy, options, on_host):
    one = cell("gpt2-large", strategy, 8, precision="bf16", options=options)
    without = host_bytes(cell("gpt2-tiny", strategy, 8, precision="bf16", options=options))
    assert host_bytes(one).low - without.low == pytest.approx(on_host * PARAMETERS, rel=0.01)


def test_the_proof_keeps_whole_copies_of_the_parameters_on_each_rank():
    proven, unproven = (host_bytes(cell("gpt2-large", "fsdp2", 8, prove=prove)) for prove in ("auto", "off"))
    assert proven.low == unproven.low  # the result of an earlier proof may be stored
    assert proven.likely - unproven.likely == pytest.approx(8 * PARAMETERS * (8 + 1))


def test_ranks_of_several_nodes_share_the_offloaded_states():
    options = {"offload": "cpu"}
    single_node, two_nodes = (host_bytes(cell("llm-7b", "fsdp2", 16, options=options, nnodes=nodes)) for nodes in (1, 2))
    assert single_node.likely == pytest.approx(2 * two_nodes.likely, rel=0.01)


def test_without_a_gpu_the_tensors_of_all_ranks_are_in_host_memory():
    one = cell("gpt2-large", "ddp", 2, launcher="fork")
    tensors = memory.predict_memory(one, on_gpu=False)
    found = host_bytes(one, NO_GPU_MACHINE)
    kept = sum(tensors.bytes_by_category[name].low for name in ("parameter", "optimizer_state"))
    assert 2 * kept < found.low < 2 * kept + GIB
    assert 2 * tensors.tensor_bytes.likely < found.likely < 2 * tensors.tensor_bytes.likely + GIB


def test_the_memory_of_parameter_servers_is_not_known():
    assert host_bytes(cell("resnet50", "ps-sync", 4, servers=1)) is None


def test_a_cell_above_the_memory_of_a_node_is_left_out_and_one_near_it_is_named():
    one = cell("gpt2-large", "ddp", 8, precision="bf16")
    needed = host_bytes(one)
    for node_bytes, left_out, words in (
        (needed.low - 1, [one.name()], "1 of 1 cell(s) need more than all of the host memory of a node; `jobs submit`"),
        (needed.likely / 0.81, [], "1 of 1 cell(s) need more than 80% of the host memory of a node"),
        (needed.likely / 0.79, [], None),
        (None, [], None),
    ):
        found = {one.name(): predict.predict_run(one, GPU, node_bytes=node_bytes)}
        assert predict.list_names_over_memory({one.name(): one}, found) == left_out
        sentences = planner_table.describe_host_memory(found)
        assert len(sentences) == (words is not None)
        assert all(words in sentence for sentence in sentences)
    found = {one.name(): predict.predict_run(one, GPU, node_bytes=GIB)}
    assert planner_table.describe_missing_memory(found[one.name()]).endswith("of a node's 1.0 GiB")
    assert host_memory.exceeds_node(found[one.name()])
    expects_oom = cell("gpt2-large", "ddp", 8, precision="bf16", expect=("oom",))
    assert predict.list_names_over_memory({one.name(): expects_oom}, found) == []


WORKERS = [
    {"name": name, "host": name, "roles": roles, "facts": {"memory_bytes": size}}
    for name, roles, size in (("head", ["controller"], GIB), ("w1", ["worker"], 64 * GIB), ("w2", ["worker"], 32 * GIB))
]
SITE = [{"partition": name, "memory_mib": size} for name, size in (("gpu", 512 << 10), ("cpu", 1 << 10))]


@pytest.mark.parametrize(("provider", "content", "expected"), [
    ("ssh", {"nodes": WORKERS}, 32 * GIB),
    ("ssh", {"nodes": [{"name": "w1", "host": "w1"}]}, None),
    ("slurm", {"nodes": WORKERS, "node_types": SITE}, 512 * GIB),
    ("slurm", {"nodes": WORKERS}, None),  # only the login node is known
])  # fmt: skip
def test_the_memory_of_a_node_is_that_of_the_smallest_node_in_the_inventory(tmp_path, provider, content, expected):
    workspace = Workspace(tmp_path)
    files.make_folder(workspace.shardlab_folder)
    files.write_json(inventory.inventory_path(workspace), {"schema": 1, "cluster": "c", **content})
    slurm = {"slurm": Slurm(partition="gpu")} if provider == "slurm" else {}
    cluster = Cluster(**{"schema": 1, "name": "c", "provider": provider, **slurm})
    assert inventory.read_node_bytes(workspace, cluster) == expected


def test_the_memory_of_this_machine_is_known(tmp_path):
    cluster = Cluster(schema=1, name="c", provider="local")
    assert inventory.read_node_bytes(Workspace(tmp_path), cluster) > GIB
