"""Tests of DDP with the option to train the rest of an epoch too: in the last step some ranks have no data, and the ranks still
do the work of one process."""

import msgspec
import numpy as np
import pytest

from collect.sources.steps import RecordedSteps, build_step_frames
from trainers import menu

pytest_plugins = ["support_trainers"]
ROUNDING = 1e-5  # how much losses may differ because sums are computed in a different order
# An epoch of 23 items has three steps of 6 items, then one step of 4 items on two of the three ranks. One item is left out,
# because each rank needs two.
ITEMS, BATCH, RANKS = 23, 6, 3
JOINING = {
    "workload": "vit-tiny", "strategy": "ddp", "gpus": RANKS, "global_batch_size": BATCH, "steps": None, "epochs": 1,
    "warmup_steps": 5,
}  # fmt: skip
SCRIPT = """
import os, sys, tempfile, traceback, numpy as np, torch
from pathlib import Path
from shardlab.runs.rundir import RunDir
from trainers.run import loop; from trainers import menu; from trainers.model import optimization
from trainers.data.order import TIMED, WARMUP, DataOrder
from trainers.instruments.timing import HostClock
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import Ranks
from trainers.engines.ddp import DdpEngine
from trainers.tasks import vision_library
vision_library.import_torchvision()

run_dir, out = RunDir(Path(sys.argv[1])), Path(sys.argv[2])
run = run_dir.read_run()
cell = run.cell

def keep(name, engine, **more):
    np.savez(out / name, **more, **{name: value.numpy() for name, value in engine.whole_parameters().items()})

def ours(rank, store):
    DdpEngine.close = lambda engine: keep(f"rank-{rank}", engine)
    ranks = Ranks(Rank(rank, rank, cell.world_size, store))
    loop.train(run, run_dir, ranks)
    ranks.leave_group()

def one_process():
    ranks = Ranks(Rank())
    task = menu.find_workload(cell.workload).build(cell, Path(run.data_path))
    torch.manual_seed(cell.seed)
    engine = menu.find_strategy("single").build(cell, task, ranks)
    optimization.set_learning_rate(engine.optimizer, cell.optimizer.lr)
    order = DataOrder(task.source.items, cell.global_batch_size, cell.seed, short_step_items=4)
    clock, losses = HostClock(), []
    for phase, count in ((WARMUP, cell.warmup_steps), (TIMED, order.steps_per_epoch)):
        for step in range(count):
            clock.start()
            batch = task.fetch(order.list_batch_items(phase, step), ranks.device)
            losses.append(float(engine.forward_backward([batch], clock)))
            engine.update()
    keep("one", engine, losses=losses)

children, store = [], tempfile.mkdtemp() + "/store"
for rank in range(cell.world_size + 1):
    if not (pid := os.fork()):
        code = 1
        try:
            ours(rank, store) if rank < cell.world_size else one_process()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    children.append(pid)
assert not any(os.waitpid(child, 0)[1] for child in children)
"""


@pytest.mark.parametrize("more", [{}, {"accumulation": 2, "max_grad_norm": 0.5}], ids=["plain", "accumulated and clipped"])
def test_three_ranks_with_uneven_data_do_the_work_of_one(bench, tmp_path, more):
    run_dir = bench.run_dir(**JOINING, options={"join": True, "subset": ITEMS}, **more)
    made = bench.scripts.run(SCRIPT, str(run_dir.path), str(tmp_path))
    assert made.returncode == 0, made.stderr
    one = dict(np.load(tmp_path / "one.npz"))
    expected = one.pop("losses")
    records = {rank: run_dir.steps(rank).records for rank in range(RANKS)}
    last = [records[rank][-1] for rank in range(RANKS)]
    assert [(record.step, record.units, record.loss is None) for record in last] == [(4, 2, False), (4, 2, False), (4, 0, True)]
    world = build_step_frames(RecordedSteps(records, RANKS, RANKS)).world_steps
    assert world["units"].to_list() == [6, 6, 6, 4]
    assert np.abs(world["loss"].to_numpy() - expected[-4:]).max() < ROUNDING
    for rank in range(RANKS):
        ours = np.load(tmp_path / f"rank-{rank}.npz")
        assert ours.files
        assert max(float(np.abs(ours[name] - one[name]).max()) for name in one) < ROUNDING
    result = run_dir.read_result()
    assert result.steps == 4
    assert result.final_loss == pytest.approx(expected[-1], abs=ROUNDING)
    assert result.throughput_per_s == pytest.approx(22 / (float(world["step_ms"].sum()) / 1000))
    assert result.knobs["effective"]["joined"] is True
    assert len(result.epoch_time_s) == 1


def test_without_join_the_incomplete_last_step_is_not_trained(bench):
    """Without the option `join`, the last, incomplete step of the epoch is not trained."""
    run_dir = bench.complete(**JOINING, options={"subset": ITEMS}, prove="auto")
    result = run_dir.read_result()
    assert (result.steps, result.knobs["effective"]["joined"], result.same_work.verdict) == (3, False, "proven")


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"epochs": 2}, {}, "found epochs: 2. Allowed: epochs: 1."),
        ({"epochs": None, "steps": 7}, {}, "found steps: 7. Allowed: epochs: 1."),
        ({}, {"static_graph": True}, "neither comm_hook nor static_graph"),
        ({"precision": "bf16"}, {"comm_hook": "bf16"}, "neither comm_hook nor static_graph"),
    ],
)
def test_join_refuses_options_that_it_does_not_support(bench, change, options, words):
    """The option `join` needs epochs: 1 and refuses the options comm_hook and static_graph."""
    allowed = bench.run_dir(**JOINING, options={"join": True}).read_run().cell
    assert menu.find_strategy("ddp").refuse(allowed) is None
    changed = msgspec.structs.replace(allowed, **change, options={**allowed.options, **options})
    assert words in menu.find_strategy("ddp").refuse(changed)
