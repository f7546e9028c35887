"""Callbacks of Trainers tell steps and checksums. transformers' own events are sent; Lightning is not installed here, so that
its events are sent by hand, as its page of callbacks describes them."""

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from shardlab import steps


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Reads (the records of steps, those of checksums) that this process wrote."""
    for variable, name in ((steps.FOLDER_VARIABLE, "steps"), (steps.CHECKSUMS_VARIABLE, "checksums")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setattr(steps, "_reporter", None)

    def read():
        lines = ((tmp_path / name / "rank-00000.jsonl").read_text().splitlines() for name in ("steps", "checksums"))
        return [[json.loads(line) for line in file_lines] for file_lines in lines]

    return read


def test_a_trainer_of_transformers_tells_steps_losses_tokens_and_checksums(told):
    from transformers import TrainerControl, TrainerState
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
    from transformers.trainer_utils import IntervalStrategy

    from shardlab.callbacks.transformers import TrainerStepCallback

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    never = IntervalStrategy.NO
    arguments = SimpleNamespace(
        process_index=0, logging_first_step=False, logging_strategy=IntervalStrategy.STEPS, eval_strategy=never,
        save_strategy=never, eval_delay=0,
    )  # fmt: skip
    callbacks = [DefaultFlowCallback(), TrainerStepCallback(checksum_after=2)]
    handler = CallbackHandler(callbacks, model, None, optimizer, None)
    state, control = TrainerState(logging_steps=2, max_steps=9), TrainerControl()
    handler.on_train_begin(arguments, state, control)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        state.num_input_tokens_seen += 64
        handler.on_optimizer_step(arguments, state, control)
        optimizer.zero_grad()
        state.global_step += 1
        control = handler.on_step_end(arguments, state, control)
        if control.should_log:
            handler.on_log(arguments, state, control, {"loss": 1.5})
    handler.on_log(arguments, state, control, {"train_loss": 1.5})
    step_records, checksums = told()
    assert [(record["step"], record.get("loss"), record["units"]) for record in step_records] == [
        (1, None, 64), (2, 1.5, 64), (3, None, 64),
    ]  # fmt: skip
    assert [(record["step"], record["optimizer"]) for record in checksums] == [(0, "AdamW"), (2, "AdamW")]
    assert ["gradient" in record["pieces"][0] for record in checksums] == [False, True]


def test_a_trainer_of_lightning_tells_a_step_after_its_last_batch(told, monkeypatch):
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["lightning.pytorch.callbacks"], "Callback", object, raising=False)
    monkeypatch.delitem(sys.modules, "shardlab.callbacks.lightning", raising=False)
    callback = importlib.import_module("shardlab.callbacks.lightning").LightningStepCallback(tokens=len, checksum_after=10)
    model = torch.nn.Linear(2, 2)
    trainer = SimpleNamespace(global_step=0, model=model, optimizers=[torch.optim.SGD(model.parameters(), 0.1)])
    callback.on_train_start(trainer, None)
    for batch_index in range(20):
        trainer.global_step += batch_index % 2  # two batches of a step
        callback.on_train_batch_end(trainer, None, {"loss": torch.tensor(0.25)}, "abc", batch_index)
    step_records, checksums = told()
    assert [record["step"] for record in step_records] == list(range(1, 11))
    assert [record.get("loss") for record in step_records] == [None] * 9 + [0.5]
    assert {record["units"] for record in step_records} == {6}
    assert [(record["step"], record["optimizer"]) for record in checksums] == [(0, "SGD"), (10, "SGD")]
