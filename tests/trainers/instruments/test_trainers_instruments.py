"""Instruments (telemetry, profiler, memory) measure what really happens, do not add to the time of a step, and say what they
cannot measure."""

import gzip
import json
import math
import os
import socket
from itertools import pairwise

import msgspec
import pytest
import torch
from support_cells import CELL
from support_document_keys import wrong

from shardlab.matrix.cell import Instruments, Optimizer, Profile
from trainers.engine import Accountable
from trainers.instruments import environment, observed_steps
from trainers.instruments.memory_categories import estimate_memory
from trainers.instruments.memory_timeline import MOST_POINTS, compute_timeline
from trainers.instruments.step_memory import StepMemory

pytest_plugins = ["support_trainers"]
ADAM = Optimizer(name="adamw", lr=1e-3)
CATEGORIES = Instruments(memory="categories")
# With these options, DeepSpeed's ZeRO-3 shards every parameter and frees it after use, as textbooks describe it.
CUT = {"param_persistence_threshold": 0, "max_reuse_distance": 0}


def categories(run_dir, rank=0):
    return json.loads(run_dir.memory_file(rank).read_text())


# (strategy, number of ranks, options, three numbers, one number). The three numbers say over how many ranks the strategy is
# said to shard parameters, gradients and optimizer state. The last number says over how many ranks the gradients are sharded
# that a rank really holds: DeepSpeed's stage 1 reduces each gradient to the rank that owns it during backward; its stage 3
# keeps its part of the gradients and also gives the optimizer a copy.
STRATEGIES = (
    ("single", 1, {}, (1, 1, 1), 1), ("ddp", 2, {}, (1, 1, 1), 1), ("fsdp2", 2, {}, (2, 2, 2), 2),
    ("fsdp1-full-shard", 2, {}, (2, 2, 2), 2), ("zero0", 2, {}, (1, 1, 1), 1), ("zero1", 2, {}, (1, 1, 2), 2),
    ("zero2", 2, {}, (1, 2, 2), 2), ("zero3", 2, CUT, (2, 2, 2), 1), ("fsdp2-hsdp", 4, {}, (2, 2, 2), 2),
)  # fmt: skip


@pytest.mark.parametrize(("strategy", "gpus", "options", "cuts", "gradients"), STRATEGIES)
def test_categories_agree_with_arithmetic(bench, strategy, gpus, options, cuts, gradients):
    """With P parameters in fp32, the parameters take 4 P bytes, the gradients 4 P, and the two moments of Adam 8 P. Each of
    these is divided by the number of ranks over which the strategy shards it, and the estimate rounds up to whole bytes."""
    keys = {"strategy": strategy, "gpus": gpus, "options": options, "optimizer": ADAM, "instruments": CATEGORIES}
    run_dir = bench.complete(**keys, steps=2, warmup_steps=1)
    result = run_dir.read_result()
    found, psi = result.instruments["memory"], 4 * result.parameters
    whole = {"parameter": psi, "gradient": psi, "optimizer_state": 2 * psi}
    expected = {name: math.ceil(nbytes / cut) for (name, nbytes), cut in zip(whole.items(), cuts, strict=True)}
    assert found["estimate_bytes"] == expected
    start, most = categories(run_dir)["start"], found["largest_bytes"]
    assert start["parameter"] == pytest.approx(expected["parameter"], rel=0.02)
    assert start["optimizer_state"] == pytest.approx(expected["optimizer_state"], rel=0.02)
    assert most["gradient"] == pytest.approx(psi / gradients, rel=0.02)
    if strategy == "ddp":
        # The gradients are views of DDP's buckets, which exist before the first step.
        assert start["gradient"] == pytest.approx(psi, rel=0.02)


def test_the_sum_of_memory_curves_reaches_the_recorded_peak(bench):
    """The memory curve of each category has all its points, and their largest sum equals the recorded peak."""
    two_steps = Instruments(memory="categories", memory_steps=2)
    run_dir = bench.complete(strategy="ddp", gpus=2, optimizer=ADAM, steps=4, instruments=two_steps)
    result = run_dir.read_result()
    for rank in (0, 1):
        found = categories(run_dir, rank)
        assert wrong("runs/RUN_ID/memory/rank-RRRRR.json", found) == []
        assert (found["schema"], found["rank"], found["step"], found["steps"], found["device"]) == (1, rank, 2, 2, "cpu")
        columns = [found["points"][name] for name in found["categories"]]
        assert {len(column) for column in columns} == {len(found["t_ms"])} == {len(found["phase"])}
        assert found["t_ms"] == sorted(found["t_ms"])
        assert min(map(min, columns)) >= 0
        assert max(map(sum, zip(*columns, strict=True))) == sum(found["peak"].values())
        assert found["peak"]["activation"] > found["peak"]["parameter"]
        assert found["end"]["activation"] == found["end"]["temporary"] == 0
        # DDP keeps its buckets, and so the gradients in them, after the step.
        assert found["end"]["gradient"] == pytest.approx(4 * result.parameters, rel=0.02)
        assert {"forward", "backward", "outside"} == set(found["phase"])
        # Activations grow and are released once in each of the two steps.
        high = [value > found["peak"]["activation"] / 2 for value in found["points"]["activation"]]
        assert sum(now and not before for before, now in pairwise([False, *high])) == 2
    peak = result.instruments["memory"]["peak_bytes"]
    assert result.peak_memory_bytes == {"rss": result.peak_memory_bytes["rss"], **peak}
    assert [record.watched for record in run_dir.steps(1).records] == [False, True, True, False]
    assert result.step_time_ms.n == 2  # the steps in which the memory is recorded do not count as timed


# The tolerance of fsdp2 is larger: a gathered block stays in memory until the other rank has used it, and the two figures that
# are compared come from different steps.
@pytest.mark.parametrize(("strategy", "gpus", "keys", "within"), [
    ("single", 1, {"activation_checkpointing": "full"}, 0.01), ("fsdp2", 2, {}, 0.05), ("ddp", 2, {"warmup_steps": 1}, 0.01),
])  # fmt: skip
def test_the_sum_of_memory_categories_equals_the_allocations_of_torch(bench, strategy, gpus, keys, within):
    """Compares two figures for the peak of what a step allocates in addition to the memory at its start: the sum of the
    categories, and the figure of torch's profiler for the next step."""
    look = Instruments(memory="categories", profile=Profile(first_step=3, steps=1, memory=True))
    run_dir = bench.complete(strategy=strategy, gpus=gpus, optimizer=ADAM, steps=3, instruments=look, **keys)
    found = categories(run_dir)
    events = [event for event in trace(run_dir)["traceEvents"] if event["name"] == "[memory]"]
    sizes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    allocated = max(sum(sizes[: index + 1]) for index in range(len(sizes)))
    assert sum(found["peak"].values()) - sum(found["start"].values()) == pytest.approx(allocated, rel=within)


def trace(run_dir, rank=0):
    with gzip.open(run_dir.trace_file(rank)) as file:
        return json.load(file)


@pytest.fixture(scope="module")
def profiled(bench):
    profile = Profile(first_step=2, steps=2, ranks=[1], shapes=True, stacks=True)
    return bench.complete(strategy="ddp", gpus=2, steps=4, instruments=Instruments(profile=profile))


def test_a_trace_holds_the_steps_of_its_rank_and_no_others(profiled):
    assert sorted(path.name for path in (profiled.path / "trace").iterdir()) == ["rank-00001.json.gz"]
    found = trace(profiled, 1)
    names = [event["name"] for event in found["traceEvents"]]
    assert sorted({name for name in names if name.startswith("ProfilerStep#")}) == ["ProfilerStep#2", "ProfilerStep#3"]
    assert (found["distributedInfo"]["rank"], found["distributedInfo"]["world_size"]) == (1, 2)
    assert "gloo:all_reduce" in names
    operators = [event for event in found["traceEvents"] if event["name"] == "aten::addmm"]
    assert operators
    assert all(event["args"]["Input Dims"] for event in operators)


def test_steps_profiled_on_one_rank_are_untimed_on_all_ranks(profiled):
    result = profiled.read_result()
    for rank in (0, 1):
        assert [record.watched for record in profiled.steps(rank).records] == [False, True, True, False]
    assert result.step_time_ms.n == 2
    assert result.steps == 4
    assert result.instruments["profile"]["watched_steps"] == [2, 3]
    assert result.instruments["profile"]["cost_s"] > 0


@pytest.mark.parametrize(
    ("look", "keys", "why"),
    [
        ({"profile": Profile(first_step=3, steps=2)}, {"steps": 3}, "found steps 3 to 4, but the last timed step is 3"),
        ({"profile": Profile(first_step=9, steps=1)}, {"steps": None, "epochs": 1}, "step 9, but the last timed step is 8"),
        ({"profile": Profile(ranks=[0, 2])}, {}, "ranks: found [0, 2]. Allowed: one or more of 0 to 0."),
        ({"profile": Profile(ranks=[])}, {}, "ranks: found []"),
        ({"memory": "categories"}, {"steps": 1}, "categories needs timed step 2: found steps: 1"),
        ({"memory": "categories", "profile": Profile(first_step=1, steps=3)}, {"steps": 3}, "step 4, the first that is not"),
        ({"memory": "categories"}, {"compile": True}, "compiled blocks"),
        ({"memory": "snapshot"}, {}, "snapshot records the CUDA allocator"),
        ({"memory": "snapshot"}, {"launcher": "torchrun"}, "snapshot records the CUDA allocator"),
    ],
)
def test_instruments_that_do_not_fit_the_run_are_refused_before_training(bench, look, keys, why):
    run_dir = bench.run_dir(workload="vit-tiny", global_batch_size=250, instruments=Instruments(**look), **keys)
    code, errors = bench.finish(run_dir)
    assert code == 1
    assert why in errors
    assert not any(record for record in run_dir.steps(0).records)


def test_the_estimate_is_that_of_the_study():
    """The study says that the model is GPT-2 Large in FP16, but its figures are those of GPT-2 (124,439,808 parameters) with 4
    bytes per parameter."""
    found = estimate_memory(124_439_808, "fp32", ADAM)
    assert [round(nbytes / 2**20, 2) for nbytes in found.values()] == [474.70, 474.70, 949.40]
    assert round(sum(found.values()) / 2**20, 2) == 1898.80


def test_the_estimate_follows_rule_precision_and_cut():
    """The estimated memory depends on the optimizer, the precision, and the number of ranks that share a category (`cut`)."""
    plain = Optimizer(name="sgd", lr=0.1, momentum=0.0)
    assert estimate_memory(10, "fp32", plain) == {"parameter": 40, "gradient": 40, "optimizer_state": 0}
    assert estimate_memory(10, "bf16", Optimizer(name="sgd", lr=0.1))["optimizer_state"] == 40
    cut = estimate_memory(10, "bf16-pure", ADAM, ranks_by_category={"optimizer_state": 3})
    assert cut == {"parameter": 20, "gradient": 20, "optimizer_state": 14}


def test_a_memory_timeline_equals_a_computation_by_hand():
    """Storage 0 is a parameter of 10 bytes and exists from the start. Storage 1 is an activation of 5 bytes that is allocated
    at 1 s and freed at 3 s. Storage 2 is a gradient of 7 bytes that is allocated at 2 s. So the peak is 10 + 5 + 7 bytes at 2
    s."""
    changes = [(0.0, "outside", 0, 10), (1.0, "forward", 1, 5), (2.0, "backward", 2, 7), (3.0, "backward", 1, -5)]
    found = compute_timeline(changes, lambda number: ("parameter", "activation", "gradient")[number])
    assert (found.peak_t_ms, found.peak_phase, sum(found.peak.values())) == (2000.0, "backward", 22)
    assert (found.start["parameter"], found.end["gradient"], found.most["activation"]) == (10, 7, 5)
    assert found.t_ms == [0.0, 1000.0, 2000.0, 3000.0]
    assert found.points["activation"] == [0, 5, 5, 0]


def test_long_curves_keep_their_peak():
    changes = [(index / 1000, "forward", index, 100 if index == 5001 else index % 7) for index in range(20_000)]
    changes += [(index / 1000 + 0.0005, "forward", index, -nbytes) for index, (_, _, _, nbytes) in enumerate(changes)]
    found = compute_timeline(changes, lambda _: "temporary")
    assert len(found.t_ms) <= MOST_POINTS
    assert max(found.points["temporary"]) == found.peak["temporary"] == 100
    assert found.end["temporary"] == 0


class SmallEngine(Accountable):
    def __init__(self):
        self.model = torch.nn.Linear(500, 400, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def theory(self):
        return []

    def effective(self):
        return {}

    def step(self):
        self.model(torch.ones(1, 500)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_gradients_are_found_in_each_of_several_steps():
    engine, psi = SmallEngine(), 4 * 500 * 400
    with StepMemory(engine, torch.device("cpu")) as memory:
        for _ in range(3):
            memory.begin_next_step()
            engine.step()
    changes = [
        (change.nbytes, memory.find_category(change.number)) for change in memory.log.changes if abs(change.nbytes) == psi
    ]
    assert changes == [(psi, "parameter"), *[(psi, "gradient"), (-psi, "gradient")] * 3]


@pytest.mark.parametrize(
    ("look", "steps", "why"),
    [
        ({"memory": "peak", "memory_steps": 2}, 9, "found 2 with memory: peak. Allowed: 1."),
        ({"memory": "categories", "memory_steps": 9}, 9, "found steps 2 to 10, but the last timed step is 9. Allowed: 1 to 8."),
        ({"memory": "categories", "memory_steps": 3, "profile": Profile(first_step=4, steps=1)}, 9,
         "found steps 2 to 4, but step 4 is profiled. Allowed: 1 to 2."),
        ({"memory": "categories", "memory_steps": 8}, 9, None),
        ({"memory": "categories", "memory_steps": 2, "profile": Profile(first_step=4, steps=1)}, 9, None),
    ],
)  # fmt: skip
def test_steps_whose_memory_cannot_be_followed_are_refused(look, steps, why):
    cell = msgspec.structs.replace(CELL, instruments=Instruments(**look))
    refused = [] if why is None else [("instruments.memory_steps", why)]
    assert list(observed_steps.list_refusals(cell, steps)) == refused


def test_workers_of_parameter_servers_are_profiled(bench):
    run_dir = bench.complete(strategy="ps-sync", gpus=2, servers=1, steps=2, instruments=CATEGORIES)
    found, result = categories(run_dir, 1), run_dir.read_result()
    assert found["start"]["parameter"] == 4 * result.parameters
    # The estimate exists only for strategies that shard a model over data-parallel ranks. Parameter servers do not shard a
    # model in this way.
    assert "estimate_bytes" not in result.instruments["memory"]


def test_the_environment_says_where_sockets_really_are(bench, profiled):
    found = json.loads(profiled.environment_file(socket.gethostname()).read_text())
    assert found["interfaces"]["used_by"] == "gloo"
    assert sum(found["interfaces"]["sockets"].values()) > 0
    assert not [name for name in found["interfaces"]["sockets"] if name.startswith("unknown")]
    assert found["variables"]["OMP_NUM_THREADS"] == "1"
    # With NCCL_DEBUG=INFO, NCCL logs lines that `collect` reads.
    assert found["variables"]["NCCL_DEBUG"] == os.environ.get("NCCL_DEBUG", "INFO")
    assert found["numa_nodes"][0]["cpus"]
    assert {nic["name"]: nic["mtu"] for nic in found["nics"]}["lo"] > 0
    assert "gpus" in found or found["gpu_why_absent"]
    alone = bench.complete(steps=1)
    assert "interfaces" not in json.loads(alone.environment_file(socket.gethostname()).read_text())


def test_a_socket_is_found_on_its_interface():
    names = {"10.0.0.7": "eth0", "fe80::1%eth1": "eth1"}
    asked = ("127.0.1.1", "::1", "::ffff:10.0.0.7", "fe80::1%eth1", "192.0.2.1")
    expected = ["lo (loopback)", "lo (loopback)", "eth0", "eth1", "unknown (192.0.2.1)"]
    assert [environment.find_interface(address, names) for address in asked] == expected
