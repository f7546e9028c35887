"""Local SGD with real ranks: its parameters are those of a loop over the ranks' data in one process, and its bytes are those of
an all-reduce of the parameters every few steps."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from shardlab.matrix.cell import CheckpointSettings, Instruments, Optimizer
from shardlab.runs import checkpoint
from trainers import menu
from trainers.data.order import TIMED, DataOrder
from trainers.strategies.local_sgd import explain_other_work

pytest_plugins = ["support_trainers"]
ADAMW = Optimizer(name="adamw", lr=1e-3)
SGD = Optimizer(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01)
STEPS = 8
KEYS = {"strategy": "local-sgd", "gpus": 2, "steps": STEPS, "accumulation": 2}
SAVED = Instruments(checkpoints=CheckpointSettings(every_steps=STEPS))
PSI = 882_176  # bytes of the parameters of gpt2-tiny


def read_tensors(run_dir, step=STEPS):
    """The tensors of a checkpoint by name, as flat arrays."""
    folder = checkpoint.make_checkpoint_path(run_dir.path, step)
    tensors = msgspec.json.decode((folder / "index.json").read_bytes())["tensors"]
    values = {}
    for name, entry in tensors.items():
        (box,) = entry["boxes"]
        if entry["dtype"] == "float32":
            count = int(np.prod(entry["shape"]))
            values[name] = np.frombuffer((folder / box["file"]).read_bytes(), np.float32, count, box["begin"])
    return values


def train_by_hand(run_dir, period):
    """Train the ranks of a run one after the other in this process. Returns (losses of each rank, its parameters by name)."""
    run = run_dir.read_run()
    cell, ranks = run.cell, range(run.cell.gpus)
    task = menu.find_workload(cell.workload).build(cell, Path(run.data_path))
    order = DataOrder(task.source.items, cell.global_batch_size, cell.seed)
    models = []
    for _ in ranks:
        torch.manual_seed(cell.seed)
        models.append(task.model())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=ADAMW.weight_decay) for model in models]
    losses = [[] for _ in ranks]
    for step in range(cell.steps):
        for rank, model, optimizer in zip(ranks, models, optimizers, strict=True):
            slices = order.list_micro_batches(
                TIMED, step, slice_index=rank, slice_count=cell.gpus, micro_batch_size=cell.micro_batch_size
            )
            batches = [task.fetch(indices, torch.device("cpu")) for indices in slices]
            step_losses = [task.criterion(task.outputs(model, batch), batch.targets) / len(batches) for batch in batches]
            sum(step_losses).backward()
            losses[rank].append(float(sum(step_losses).detach()))
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % period == 0 or step + 1 == cell.steps:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(same) / len(same)
                    for parameter in same:
                        parameter.copy_(mean)
    return losses, {name: parameter.detach().numpy() for name, parameter in models[0].named_parameters()}


@pytest.mark.parametrize("period", [3, 4])
def test_parameters_are_those_of_a_loop_over_the_ranks_in_one_process(bench, period):
    """With a period of 3, the last average is that of `finish`: 8 steps are no multiple of 3."""
    options = {"averaging_period": period}
    run_dir = bench.complete(optimizer=ADAMW, instruments=SAVED, options=options, **KEYS)
    losses, parameters = train_by_hand(run_dir, period)
    saved = read_tensors(run_dir)
    for rank in range(2):
        assert [record.loss for record in run_dir.steps(rank).records] == pytest.approx(losses[rank], rel=1e-5)
        for name, values in parameters.items():
            found = saved[f"rank-{rank:05d}/parameters/{name}"]
            assert np.linalg.norm(found - values.ravel()) < 1e-4 * np.linalg.norm(values), name
    moments = [saved[f"rank-{rank:05d}/optimizer/exp_avg/{next(iter(parameters))}"] for rank in range(2)]
    assert not np.allclose(*moments), "each rank keeps its own optimizer state"
    assert run_dir.read_result().knobs["effective"]["averaging_period"] == period


def test_between_two_averages_ranks_have_different_parameters(bench):
    saved = read_tensors(bench.complete(optimizer=ADAMW, instruments=SAVED, **{**KEYS, "steps": STEPS + 1}))
    assert all(np.array_equal(saved[name], saved[name.replace("00000", "00001")]) for name in saved if "parameters" in name)
    apart = Instruments(checkpoints=CheckpointSettings(every_steps=6))
    saved = read_tensors(bench.complete(optimizer=ADAMW, instruments=apart, **KEYS), 6)
    names = [name for name in saved if name.startswith("rank-00000/parameters")]
    assert names
    assert not any(np.array_equal(saved[name], saved[name.replace("00000", "00001")]) for name in names)


def test_with_sgd_and_an_average_after_each_step_it_does_the_work_of_ddp(bench):
    keys = {**KEYS, "optimizer": SGD, "prove": "auto"}
    alike = bench.complete(**keys, options={"averaging_period": 1})
    ddp = bench.complete(**{**keys, "strategy": "ddp"})
    for rank in range(2):
        losses = [[record.loss for record in run_dir.steps(rank).records] for run_dir in (alike, ddp)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    result = alike.read_result()
    assert result.same_work.verdict == "proven", result.same_work.why
    assert result.communication_bytes["counted"] == ddp.read_result().communication_bytes["counted"] == 2 * PSI


def test_the_bytes_of_a_period_are_one_all_reduce_of_the_parameters(bench):
    result = bench.complete(**KEYS, options={"averaging_period": 3}, prove="auto").read_result()
    assert result.same_work.verdict == "other work"
    assert result.same_work.why == "each rank trains alone between two averages of the parameters, which are 3 steps apart"
    sent = result.communication_bytes  # two ranks, of which each sends 2 x 1/2 of psi every 3 steps
    assert [sent[name] for name in ("counted", "theory", "textbook")] == pytest.approx([2 * PSI / 3] * 2 + [4 * PSI / 3])


@pytest.mark.parametrize(
    ("keys", "period", "why"),
    [
        ({"optimizer": SGD}, 1, None),
        ({"gpus": 1}, 4, None),
        ({"optimizer": SGD}, 2, "each rank trains alone between two averages of the parameters, which are 2 steps apart"),
        ({"optimizer": ADAMW}, 1, "each rank applies adamw to the gradients of its own items, and only the updated"),
        ({"max_grad_norm": 1.0, "optimizer": SGD}, 1, "each rank clips the gradients of its own items, and only the updated"),
    ],
)
def test_other_work_is_declared_with_its_reason(bench, keys, period, why):
    cell = bench.run_dir(**{**KEYS, "options": {"averaging_period": period}, **keys}).read_run().cell
    reason = explain_other_work(cell)
    assert (reason is None) == (why is None)
    assert why is None or reason.startswith(why)
