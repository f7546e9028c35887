"""The same-work proof accepts correct code, detects wrong code, and counts the bytes of a step, which agree with theory."""

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import support_folder_order
import torch
from support_cells import CELL
from support_fork import FORK_RANKS

from shardlab.matrix.cell import Cell
from shardlab.runs.record import SameWork
from trainers import menu
from trainers.proof import proof

pytest_plugins = ["support_trainers"]
# A program that breaks one place of the code, forks two ranks, runs the proof on them, and prints the verdict of rank 0.
TWO_RANKS = """
import os, sys, tempfile
import msgspec, torch
from pathlib import Path
from shardlab.matrix.cell import Cell
from trainers import menu; from trainers.proof import proof
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import Ranks

cell = msgspec.json.decode(sys.argv[1], type=Cell)
BREAK
def rank(number, store):
    ranks = Ranks(Rank(number, number, 2, store))
    task = menu.find_workload(cell.workload).build(cell, Path(sys.argv[2]))
    found = proof.prove_same_work(cell, task, Path(sys.argv[2]), ranks, None)
    if number == 0:
        print(msgspec.json.encode(found).decode())
    ranks.leave_group()

"""
BROKEN = {
    "no all-reduce": """
from contextlib import nullcontext
from trainers.engines.ddp import DdpEngine
DdpEngine.one_pass = lambda self, *, last: self.model.no_sync()
""",
    "a sum for a mean": """
from trainers.engines.ddp import DdpEngine
right = DdpEngine.forward_backward
def doubled(self, batches, clock):
    loss = right(self, batches, clock)
    for parameter in self.model.parameters():
        parameter.grad *= 2
    return loss
DdpEngine.forward_backward = doubled
""",
    "the same data on both ranks": """
from trainers.replicated import ReplicatedEngine
made = ReplicatedEngine.__init__
def same_slice(self, *arguments):
    made(self, *arguments)
    self.data_rank = 0
ReplicatedEngine.__init__ = same_slice
""",
    "other weights": """
from trainers.engines import ddp
build = ddp.build
def reseeded(cell, task, ranks):
    torch.manual_seed(7)
    return build(cell, task, ranks)
ddp.build = reseeded
""",
    "the gradient norm of a half": """
from trainers.replicated import ReplicatedEngine
whole = ReplicatedEngine.gradient_norm
ReplicatedEngine.gradient_norm = lambda self: whole(self) / self.data_ranks
""",
}
AVERAGED = "parameters are averaged every 8 steps"
# Replaces the all-reduce of DDP: after every 8th step, ranks average their parameters instead.
AVERAGING = """
import torch.distributed as dist
from trainers.communication import Term, bytes_of
from trainers.engines.ddp import DdpEngine
EVERY, BY_DESIGN = 8, SAYS
real, update = menu.find_strategy, DdpEngine.update
DdpEngine.one_pass = lambda self, *, last: self.model.no_sync()
DdpEngine.steps = 0
def averaging(self):
    update(self)
    self.steps += 1
    for parameter in self.model.parameters() if self.data_ranks > 1 and self.steps % EVERY == 0 else ():
        dist.all_reduce(parameter.data)
        parameter.data /= self.data_ranks
DdpEngine.update = averaging
psi = lambda self: bytes_of(self.model.parameters())
DdpEngine.theory = lambda self: [Term("parameters, a share of each step", "all_reduce", psi(self), self.data_ranks, 1 / EVERY)]
menu.find_strategy = lambda name: msgspec.structs.replace(
    real(name), communication_period=lambda cell: EVERY, other_work=lambda cell: BY_DESIGN) if name == "ddp" else real(name)
"""


# Makes the proof compare with one process that computes the global batch in one pass, as people do who train on one GPU.
ONE_PASS = """
single = proof._run_reference
proof._run_reference = lambda cell, task, ranks, steps: single(
    msgspec.structs.replace(cell, micro_batch_size=cell.global_batch_size, gradient_accumulation_steps=1), task, ranks, steps)
"""
# The workload is already small and names no smaller model for the proof. This code gives it the smaller model of the full
# workload, and makes the proof believe that the memory is too small for anything larger.
NO_MEMORY = """
real = menu.find_workload
menu.find_workload = lambda name: msgspec.structs.replace(real(name), proof_options={"n_layer": 2})
proof._fits_in_memory = lambda parameters, device: False
"""


def prove(bench, cell: Cell, broken: str = "") -> SameWork:
    words = [msgspec.json.encode(cell).decode(), str(bench.data)]
    done = bench.scripts.run(TWO_RANKS.replace("BREAK", broken) + FORK_RANKS, *words)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=SameWork)


def cell_of(bench, **keys) -> Cell:
    return msgspec.structs.replace(bench.run_dir(gpus=2, **keys).read_run().cell, prove="auto")


@pytest.mark.parametrize("broken", BROKEN)
def test_wrong_work_is_called_different(bench, broken):
    found = prove(bench, cell_of(bench, strategy="ddp"), BROKEN[broken])
    assert found.verdict == "different", found.why


PSI = 220_544 * 4  # bytes of the parameters of gpt2-tiny, psi


def test_work_that_differs_by_design_is_marked_and_its_bytes_are_counted(bench):
    """An all-reduce of psi bytes over n ranks sends 2 (n-1)/n psi per rank, so two ranks together send 2 psi. Here the ranks
    average once in 8 steps, which is psi / 4 per step."""
    found = prove(bench, cell_of(bench, strategy="ddp"), AVERAGING.replace("SAYS", repr(AVERAGED)))
    assert (found.verdict, found.why) == ("other work", AVERAGED)
    assert found.communication_bytes == {"theory": PSI / 4, "counted": PSI / 4, "wire": PSI / 4, "textbook": 4 * PSI}
    assert found.loss_difference is None


def test_the_same_work_in_a_strategy_that_does_not_say_so_is_called_different(bench):
    found = prove(bench, cell_of(bench, strategy="ddp"), AVERAGING.replace("SAYS", "None"))
    assert found.verdict == "different", found.why
    # The 10 steps are the two steps that every proof makes, and a whole period of 8 steps.
    assert "compared to one process, 10 steps" in found.why
    assert found.communication_bytes["counted"] == PSI / 4


@pytest.mark.parametrize(("period", "walked", "counted"), [(1, 3, 1), (8, 10, 8), (64, 66, 64), (65, 3, 0), (None, 3, 0)])
def test_a_whole_period_is_walked_and_counted_unless_it_is_too_long(period, walked, counted):
    """After two steps, the proof makes a whole period of communication and counts its bytes, or one step if it is too long."""
    strategy = msgspec.structs.replace(menu.find_strategy("ddp"), communication_period=lambda _: period)
    assert (proof._count_steps(None, strategy), proof._count_counted_steps(None, strategy)) == (walked, counted)


@pytest.mark.parametrize(("ranks", "counted"), [([1.0, 2.0], {"counted": 3.0}), ([1.0, None], {})])
def test_uncounted_bytes_are_absent_and_not_zero(ranks, counted):
    class Gathered:
        def all_gather_numbers(self, mine):
            return np.array([[sent or 0.0, 5.0, 6.0, float(sent is None)] for sent in ranks])

    walked = msgspec.structs.replace(trajectory(), sent_bytes=ranks[0])
    assert proof._sum_sent_bytes(CELL, Gathered(), walked) == {"theory": 10.0, "wire": 12.0, **counted}


def trajectory(losses=(1.0,), norms=(1.0,), before=0.0, after=1.0):
    parameters = [{"weight": torch.full((2,), value)} for value in (before, after)]
    sent = {"sent_bytes": 0.0, "theory_bytes": 0.0, "wire_bytes": 0.0, "textbook_bytes": None}
    return proof.Trajectory(list(losses), list(norms), *parameters, **sent)


def test_each_of_the_three_differences_decides_alone():
    """The proof fails if one of three differences (loss, gradient norm, parameters) is above its tolerance, infinite or NaN."""
    allowed = proof.TOLERANCES["fp32"]
    right = {"loss": allowed.loss, "norm": allowed.gradient_norm, "parameters": allowed.parameters}
    assert proof._is_within(allowed, **right)
    for name, bound in right.items():
        for wrong in (1.01 * bound, math.inf, math.nan):
            assert not proof._is_within(allowed, **{**right, name: wrong}), (name, wrong)


@pytest.mark.parametrize("ours", [[1.0, math.nan], [math.nan, 1.0], [1.0, math.inf]])
def test_a_loss_that_is_not_finite_is_infinitely_far_away(ours):
    assert proof._find_largest_difference(ours, [1.0, 1.0]) == math.inf


def test_weights_that_start_elsewhere_and_end_alike_are_not_the_same_work():
    """Two runs with different weights at the start do not do the same work, even if their last weights are equal."""
    assert proof._measure_parameter_distance(trajectory(), trajectory()) == 0
    assert proof._measure_parameter_distance(trajectory(before=0.1), trajectory()) == math.inf


CLIPPED_APART = """
from trainers import model_options
from torch.distributed.tensor import DTensor
whole = model_options.compute_gradient_norm
def of_one_shard(parameters):
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    return torch.nn.utils.get_total_norm(grads)
model_options.clip_gradients = lambda parameters, max_norm, norm, real=model_options.clip_gradients: (
    parameters := list(parameters), real(parameters, max_norm, of_one_shard(parameters)))
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1-full-shard", "fsdp2", "zero2", "zero3"])
def test_clipping_is_part_of_what_is_proven(bench, strategy):
    run_dir = bench.complete(strategy=strategy, gpus=2, max_grad_norm=0.1, prove="auto", steps=1)
    found = run_dir.read_result().same_work
    assert found.verdict == "proven", found.why


def test_clipping_by_a_shards_own_norm_is_called_different(bench):
    found = prove(bench, cell_of(bench, strategy="fsdp2", max_grad_norm=0.1), CLIPPED_APART)
    assert found.verdict == "different", found.why


def test_bf16_is_held_against_bf16(bench):
    found = prove(bench, cell_of(bench, strategy="fsdp2", precision="bf16"))
    assert found.verdict == "proven", found.why
    assert "bf16" in found.why
    # The reference casts weights as fully_shard does. If it computed in fp32, the difference would be 0.02.
    assert found.parameter_difference < 1e-3


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1-full-shard", "fsdp2", "zero3"])
def test_batch_norm_is_frozen_for_the_proof_with_a_remark_in_the_verdict(bench, strategy):
    result = bench.complete(workload="densenet121-tiny", strategy=strategy, gpus=2, prove="auto", steps=1).read_result()
    assert result.same_work.verdict == "proven", result.same_work.why
    assert "BatchNorm is frozen here; in the run each rank and pass normalises by its own 4 of 8 items" in result.same_work.why
    sent = result.communication_bytes
    assert sent["counted"] == pytest.approx(sent["theory"], rel=0.001)


def test_unfrozen_batch_norm_is_another_computation(bench):
    unfrozen = "proof.frozen_statistics.freeze_statistics = lambda task, *_: task"
    cell = cell_of(bench, workload="densenet121-tiny", strategy="ddp")
    found = prove(bench, cell, unfrozen + ONE_PASS)
    assert found.verdict == "different", found.why


def test_dropout_is_off_in_the_proof_alone(bench):
    dropping = {"workload": "vgg16-tiny", "strategy": "ddp", "gpus": 2, "steps": 2, "options": {"dropout": True}}
    result = bench.complete(**dropping, prove="auto").read_result()
    assert result.same_work.verdict == "proven", result.same_work.why
    assert "dropout is off here, but on in the run" in result.same_work.why
    without = bench.complete(**{**dropping, "options": {}}).read_result()
    assert result.final_loss != without.final_loss


@pytest.mark.parametrize(("strategy", "keys"), [("tp", {"tp": 2}), ("pp-1f1b", {"pp": 2, "accumulation": 2})])
def test_a_model_that_one_process_cannot_hold_is_proven_at_reduced_depth(bench, strategy, keys):
    cell = cell_of(bench, workload="llm-7b-tiny", strategy=strategy, **keys)
    found = prove(bench, cell, NO_MEMORY)
    assert found.verdict == "proven", found.why
    assert "at reduced depth (n_layer: 2)" in found.why
    assert found.communication_bytes is None  # the proof ran a smaller model, whose bytes would not be those of the cell


def test_activation_checkpointing_does_not_change_the_work(bench):
    """The same test for torch.compile is in tests/trainers/model/test_trainers_model_options.py, because compiled blocks exist
    there already."""
    found = prove(bench, cell_of(bench, strategy="fsdp2", activation_checkpointing="every-2"))
    assert found.verdict == "proven", found.why


def test_the_proof_does_not_change_what_is_trained(bench):
    assert bench.losses(strategy="ddp", gpus=2, prove="auto") == bench.losses(strategy="ddp", gpus=2)


def test_a_proof_is_made_once_and_holds_for_any_length(bench, tmp_path):
    kept = tmp_path / "proofs"

    def complete(**keys) -> SameWork:
        run_dir = bench.run_dir(strategy="ddp", gpus=2, prove="auto", **keys)
        frozen = json.loads(run_dir.run_json.read_text())
        run_dir.run_json.write_text(json.dumps(frozen | {"proofs_path": str(kept)}))
        code, errors = bench.finish(run_dir)
        assert code == 0, errors
        return run_dir.read_result().same_work

    complete(steps=2)
    (file,) = kept.iterdir()
    told = msgspec.json.decode(file.read_bytes(), type=SameWork)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(told, why="read from the file")))
    assert complete(steps=3, warmup_steps=1).why == "read from the file"
    assert complete(steps=2, global_batch_size=4).why != "read from the file"
    assert len(list(kept.iterdir())) == 2


def test_a_cell_without_the_key_prove_is_not_proven(bench):
    """A cell without the key `prove` is trained without a same-work proof."""
    assert bench.complete(strategy="single", steps=1).read_result().same_work.verdict == "not proven"
    assert Path(bench.data).exists()


def test_the_digest_of_the_trainers_does_not_depend_on_the_order_of_folders(monkeypatch):
    digests = []
    for descending in (False, True):
        with monkeypatch.context() as patched:
            support_folder_order.reverse(patched, descending=descending)
            digests.append(proof._digest_source())
    assert digests[0] == digests[1]
