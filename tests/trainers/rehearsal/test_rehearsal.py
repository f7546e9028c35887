"""A rehearsal of a cell with fake tensors, which hold no data, predicts the memory and the collectives of a step. The tests
compare the prediction with real steps, and test the command `python -m trainers rehearse`."""

import json
import subprocess
import sys

import msgspec
import pytest
from support_cells import CELL
from support_long import LONG, only_long
from support_rehearsal import Rehearser
from support_trainers import Bench

from shardlab.matrix.cell import Optimizer
from shardlab.runs import rehearsed
from shardlab.runs.rehearsed import MemoryByCategory, NotRehearsed, RehearsalRequest, Rehearsed
from trainers import menu
from trainers.instruments.memory_timeline import CATEGORIES
from trainers.rehearsal import depths
from trainers.rehearsal.rehearse import ERROR_PCT

ADAMW = Optimizer(name="adamw", lr=0.001)
ALLOWED = 0.08  # how much the predicted peak of memory may differ, as a share of the measured peak

# (strategy, number of ranks that train, keys of the cell): every strategy on the menu at least once
REAL_COLLECTIVES = [
    ("single", 1, {}),
    ("ddp", 2, {"accumulation": 2}),
    ("ddp", 2, {"workload": "resnet50-tiny"}),  # the buffers of a ResNet are broadcast
    ("local-sgd", 2, {"options": {"averaging_period": 1}}),
    ("fsdp1-full-shard", 2, {"precision": "bf16"}),
    ("fsdp1-shard-grad-op", 2, {}),
    ("fsdp1-no-shard", 2, {}),
    ("fsdp1-hybrid-shard", 4, {}),
    ("fsdp1-hybrid-shard-zero2", 4, {}),
    ("fsdp2", 4, {"accumulation": 2, "activation_checkpointing": "full"}),
    ("fsdp2", 2, {"precision": "fp16", "max_grad_norm": 1.0}),
    ("fsdp2-zero2", 2, {}),
    ("fsdp2", 2, {"accumulation": 2, "options": {"sync": "every_pass"}}),
    ("fsdp2-hsdp", 4, {}),
    ("fsdp2-hsdp", 4, {"accumulation": 2, "options": {"sync": "shard_every_pass"}}),
    ("fsdp2-hsdp-zero2", 4, {}),
    ("tp", 2, {"tp": 2, "options": {"sequence_parallel": True}}),
    ("tp-fsdp2", 4, {"tp": 2}),
    ("tp-pp", 4, {"tp": 2, "pp": 2, "accumulation": 2}),
    ("pp-fsdp2", 4, {"pp": 2, "accumulation": 2}),
    ("pp-gpipe", 2, {"pp": 2, "accumulation": 4}),
    ("pp-1f1b", 2, {"pp": 2, "accumulation": 4}),
    ("pp-interleaved", 2, {"pp": 2, "accumulation": 4}),
    ("ps-sync", 2, {"servers": 1}),
    ("ps-async", 2, {"servers": 1}),
    ("ps-ssp", 2, {"servers": 1}),
    ("zero0", 2, {"optimizer": ADAMW}),
    ("zero1", 2, {"precision": "bf16"}),
    ("zero2", 2, {"optimizer": ADAMW, "accumulation": 2}),
    ("zero3", 2, {"optimizer": ADAMW}),
]
ONLY_REHEARSED = {
    "tp-pp-fsdp2": "needs 8 ranks",
    "ddp-powersgd": "a real run cannot count it: its second all-reduce starts in a callback, on another thread",
}
MEASURED_MEMORY = [
    ("single", 1, {"workload": "llm-7b-tiny", "precision": "bf16-autocast", "optimizer": ADAMW}),
    ("ddp", 4, {"optimizer": ADAMW}),
    ("ddp", 2, {"options": {"comm_hook": "bf16"}, "precision": "bf16"}),
    ("ddp-powersgd", 2, {}),
    ("fsdp1-full-shard", 4, {"precision": "bf16", "optimizer": ADAMW}),
    ("fsdp1-shard-grad-op", 2, {}),
    ("fsdp2", 4, {"precision": "bf16", "optimizer": ADAMW, "activation_checkpointing": "full"}),
    ("fsdp2", 2, {"accumulation": 2, "workload": "vit-tiny"}),
    ("fsdp2-hsdp", 4, {}),
    ("tp", 2, {"tp": 2}),
    ("tp-fsdp2", 4, {"tp": 2, "workload": "llm-7b-tiny", "precision": "bf16", "optimizer": ADAMW}),
    ("pp-1f1b", 2, {"pp": 2, "accumulation": 4}),
    ("ps-sync", 2, {"servers": 1}),
    ("zero1", 2, {"optimizer": ADAMW}),
    ("zero2", 4, {"precision": "bf16", "optimizer": ADAMW}),
    ("zero3", 4, {"optimizer": ADAMW}),
]
SHARDED = ("fsdp1-full-shard", "fsdp2", "zero3")
WORLDS = (2, 4, 8, 64)


@pytest.fixture(scope="module")
def cell_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    bench = Bench(folder)

    def made(strategy, gpus, keys):
        cell = bench.run_dir(strategy=strategy, gpus=gpus, **keys).read_run().cell
        cell.options["data"] = "synthetic"
        return cell

    return made


@pytest.fixture(scope="module")
def rehearse():
    process = Rehearser()
    yield process
    process.close()


def _short(cases, step):
    """Returns all cases in the long form of the tests. In the short form, returns every `step`-th of the cases with at most two
    ranks, starting with the second."""
    return cases if LONG else [case for case in cases if case[1] <= 2][1::step]


def _named(case):
    return f"{case[0]}-{case[1]}"


@pytest.mark.parametrize("case", _short(REAL_COLLECTIVES, 5), ids=_named)
def test_collectives_are_those_of_real_ranks(cell_of, rehearse, case):
    answer, measured = rehearse(cell_of(*case), "collectives")
    assert isinstance(answer, Rehearsed), answer.why
    assert sum(rank.stands_for for rank in answer.ranks) == case[1]
    for rank, real in zip(answer.ranks, measured, strict=True):
        assert sorted([c.op, c.payload_bytes, c.ranks, c.times] for c in rank.collectives) == real, rank.rank


def test_collectives_that_only_some_steps_start_are_counted_over_their_period(cell_of, rehearse):
    of_each_step, of_4_steps, of_many = (
        rehearse(cell_of("local-sgd", 2, {"options": {"averaging_period": period}}))[0] for period in (1, 4, 65)
    )
    ((one,), (mean,)) = (answer.ranks[0].collectives for answer in (of_each_step, of_4_steps))
    assert (one.times, one.payload_bytes) == (1, 882_176)
    assert mean == msgspec.structs.replace(one, times=1 / 4)
    assert of_4_steps.ranks[0].flops == of_each_step.ranks[0].flops
    assert of_many.why == "its communication repeats after 65 steps, and a rehearsal makes at most 64."


@pytest.mark.parametrize("case", _short(MEASURED_MEMORY, 4), ids=_named)
def test_memory_is_what_the_allocator_counts(cell_of, rehearse, case):
    answer, measured = rehearse(cell_of(*case), "memory")
    assert isinstance(answer, Rehearsed), answer.why
    for rank, real in zip(answer.ranks, measured, strict=True):
        assert rank.peak_bytes == pytest.approx(real, rel=ALLOWED), rank
        assert rank.peak_bytes == pytest.approx(real, rel=ERROR_PCT / 100 + 0.005), "the error that answers name"


@pytest.mark.parametrize(
    ("strategy", "precision", "whole"),
    # Bytes per parameter of the whole gradients that live between passes: FSDP1 keeps them as backward computes them.
    [
        ("fsdp2", "fp32", 4),
        ("fsdp1-full-shard", "bf16", 2),
        *only_long(("fsdp1-full-shard", "fp32", 4), ("tp-fsdp2", "fp32", 4)),
    ],
)
def test_no_whole_gradients_live_between_passes_that_reduce_them(cell_of, rehearse, strategy, precision, whole):
    """With `sync: every_pass`, the peak of a step is smaller by whole gradients, and larger by the shard that replaces them.
    Both peaks are what torch's allocator counts in a real step."""
    keys = {"accumulation": 2, "precision": precision, "optimizer": ADAMW, "tp": 2 if strategy == "tp-fsdp2" else 1}
    peaks = {}
    for sync in ("last_pass", "every_pass"):
        answer, (measured,) = rehearse(cell_of(strategy, 4, {**keys, "options": {"sync": sync}}), "memory")
        peaks[sync] = answer.worst_rank.peak_bytes
        assert peaks[sync] == pytest.approx(measured, rel=ERROR_PCT / 100 + 0.005)
    elements, shards = (242_688 * 2 // 4, 2) if strategy == "tp-fsdp2" else (220_544, 4)
    assert peaks["last_pass"] - peaks["every_pass"] == pytest.approx(elements * (whole - 4 / shards), rel=0.01)


def test_every_strategy_of_the_menu_is_compared_or_has_a_reason():
    assert {case[0] for case in REAL_COLLECTIVES} | set(ONLY_REHEARSED) == set(menu.load_strategies())


@pytest.mark.parametrize("name", SHARDED if LONG else SHARDED[1:2])
def test_more_ranks_never_need_more_memory_if_everything_is_sharded(cell_of, rehearse, name):
    """The batch of one rank is the same for every number of ranks. If everything is sharded, more ranks must not increase the
    memory of a rank."""
    worlds = WORLDS if LONG else WORLDS[::2]
    found = [rehearse(cell_of(name, world, {"global_batch_size": 2 * world}))[0].worst_rank.peak_bytes for world in worlds]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


DEEP = {"workload": "llm-7b-tiny", "options": {"n_layer": 24}, "optimizer": ADAMW, "precision": "bf16"}
DEEP_PIPELINE = {**DEEP, "pp": 2, "accumulation": 2, "options": {"n_layer": 32}}


@pytest.mark.parametrize(("blocks", "pp", "expected"), [(12, 1, None), (13, 1, (4, 6)), (24, 2, None), (26, 2, (8, 12))])
def test_a_model_of_more_than_twelve_blocks_a_rank_is_rehearsed_at_two_depths(blocks, pp, expected):
    cell = msgspec.structs.replace(CELL, workload="gpt2", pp=pp, options={"n_layer": blocks})
    assert depths.choose_depths(cell) == expected


@pytest.mark.parametrize(
    "case", [("fsdp2", 4, DEEP), *only_long(("zero3", 4, DEEP), ("pp-1f1b", 2, DEEP_PIPELINE))], ids=_named
)
def test_a_deep_model_is_extrapolated_from_two_depths(cell_of, rehearse, case):
    (short, _), (whole, _) = (rehearse(cell_of(*case), full_depth=full_depth) for full_depth in (False, True))
    assert short.depths == ((8, 12) if "pp" in case[2] else (4, 6))
    assert whole.depths is None
    for rank, real in zip(short.ranks, whole.ranks, strict=True):
        assert rank.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)
        assert rank.flops == pytest.approx(real.flops, rel=1e-6)
        assert _sums(rank) == pytest.approx(_sums(real), rel=0.02)


def _sums(rank):
    sums = {}
    for call in rank.collectives:
        sums[call.op] = sums.get(call.op, 0) + call.times * call.payload_bytes
    return sums


def test_operations_are_those_of_the_formula(cell_of, rehearse):
    """The rehearsal counts the operations of forward and backward for one rank. They agree with the formula in the menu entry
    of the workload."""
    cell = cell_of("ddp", 2, {})
    answer, _ = rehearse(cell)
    per_token = menu.find_workload("gpt2-tiny").flops_per_unit
    assert answer.worst_rank.flops == pytest.approx(per_token * cell.gpu_batch_size * cell.seq_len, rel=0.02)


def test_the_categories_are_those_of_the_instrument():
    assert list(MemoryByCategory.__struct_fields__) == list(CATEGORIES)


def _command(*arguments, given=b""):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "trainers", "rehearse", *map(str, arguments)],
        input=given, capture_output=True, check=False,
    )  # fmt: skip


def test_the_command_keeps_its_answer_in_the_cache(cell_of, tmp_path):
    cell = cell_of("zero1", 4, {})
    request = msgspec.json.encode(RehearsalRequest(cell))
    first = _command("-", "--cache", tmp_path, given=request)
    # Standard output contains only the answer; DeepSpeed prints its own lines elsewhere.
    answer = rehearsed.decode_answer(first.stdout)
    assert (answer.cell, answer.world_size, answer.how) == (cell.hash(), 4, "fake_tensors")
    (kept,) = tmp_path.iterdir()
    marked = msgspec.structs.replace(answer, remarks=("from the cache",))
    kept.write_bytes(msgspec.json.encode(marked))
    # The seed and the number of steps do not change what a step does, so the answer in the cache is valid for this cell.
    another = msgspec.structs.replace(cell, seed=7, steps=99)
    file = tmp_path / "request"
    file.write_bytes(msgspec.json.encode(RehearsalRequest(another)))
    assert rehearsed.decode_answer(_command(file, "--cache", tmp_path).stdout) == marked
    if LONG:
        kept.write_bytes(kept.read_bytes()[:100])
        assert rehearsed.decode_answer(_command("-", "--cache", tmp_path, given=request).stdout).remarks == ()


def test_the_key_of_the_cache_depends_on_what_changes_a_step(cell_of):
    """The key is the same for another seed, launcher or number of steps, and differs for another precision or optimizer."""

    def key(full_depth=False, **keys):
        cell = cell_of("fsdp2", 4, keys)
        return RehearsalRequest(cell).compute_cache_key(full_depth=full_depth)

    assert key() == key(seed=1, steps=3, launcher="torchrun")
    assert (
        len({key(), key(True), key(precision="bf16"), key(optimizer=ADAMW), key(accumulation=2), key(max_grad_norm=1.0)}) == 6
    )


def test_a_cell_that_cannot_be_rehearsed_has_a_reason(cell_of):
    request = RehearsalRequest(cell_of("fsdp2", 4, {"options": {"offload": "cpu"}}))
    answer = rehearsed.decode_answer(_command("-", given=msgspec.json.encode(request)).stdout)
    assert isinstance(answer, NotRehearsed)
    assert answer.why.startswith("offload: ")


def test_a_request_without_a_cell_is_refused(tmp_path):
    done = _command("-", given=json.dumps({"cell": 1}).encode())
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"standard input: no request" in done.stderr
    assert _command(tmp_path / "missing").returncode == 2


@pytest.mark.parametrize("layers", [2, *only_long(32)])
def test_a_layer_of_seven_billion_parameters_is_rehearsed_on_512_ranks(cell_of, rehearse, layers):
    keys = {"workload": "llm-7b", "global_batch_size": 512, "precision": "bf16", "optimizer": ADAMW}
    cell = cell_of("fsdp2", 512, {**keys, "activation_checkpointing": "full", "options": {"n_layer": layers}})
    answer, _ = rehearse(cell)
    gathers = {c.payload_bytes: c.times for c in answer.worst_rank.collectives if c.op == "all_gather"}
    # The bytes of one gather. FSDP2 pads rows to a multiple of the number of ranks: 11,008 rows of the MLP become 11,264, and
    # 32,000 rows of the embedding tables become 32,256. A number in bf16 has 2 bytes.
    block = 4 * 4096**2 + 2 * 11_264 * 4096 + 4096 * 11_008 + 2 * 4096
    rest = 2 * 32_256 * 4096 + 4096
    assert gathers == {2 * block: 2 * layers, 2 * rest: 1}
    kept = answer.worst_rank.kept
    mine = 4 * (layers * block + rest) // 512  # the bytes of the fp32 weights that one of the 512 ranks holds
    assert kept.parameter == pytest.approx(mine, rel=0.01)
    assert kept.optimizer_state == pytest.approx(2 * mine, rel=0.01)
