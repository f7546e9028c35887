"""Makes and trains a cell with one rank, and finds the rank's GPU in NVML, for the checks of stages C and D."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from shardlab.matrix.cell import Cell, Optimizer
from shardlab.runs.record import LineWriter
from trainers import dtypes, menu
from trainers.data.order import DataOrder
from trainers.instrument import RunInstruments
from trainers.ranks.ranks import Ranks
from trainers.run import loop


def small(*, workload: str = "gpt2-tiny", strategy: str = "single", options: dict[str, Any] | None = None, **keys: Any) -> Cell:
    """A cell with one rank, with these keys and the default options of its workload and strategy."""
    of_workload = menu.find_workload(workload)
    defaults = {option.name: option.default for option in (*of_workload.options, *menu.find_strategy(strategy).options)}
    plain = Cell(
        workload=workload, strategy=strategy, gpus=1, dp=1, global_batch_size=8, micro_batch_size=8,
        seq_len=of_workload.seq_len, steps=1, prove="off", optimizer=Optimizer("adamw", 1e-3),
        options={**defaults, **(options or {})},
    )  # fmt: skip
    return msgspec.structs.replace(plain, **keys)


def train(
    cell: Cell,
    ranks: Ranks,
    *,
    weights_on: torch.device,
    at_first: Callable[[], object] = lambda: None,
    at_last: Callable[[], object] = lambda: None,
) -> tuple[float, list[float]]:
    """Train a cell. Returns (the duration of all timed steps in seconds, by the clock of the host; step_ms of each timed step).

    weights_on: the device on which the weights are initialized; on a CPU, this takes ten seconds for GPT-2 Large.
    at_first: a function that is called when the first timed step begins. at_last: a function that is called after the last
    step.
    """
    dtypes.set_tf32(cell.precision, ranks.device)
    with tempfile.TemporaryDirectory() as folder:
        task = menu.find_workload(cell.workload).build(cell, Path(folder))
        order = DataOrder(task.source.items, cell.global_batch_size, cell.seed)
        torch.manual_seed(cell.seed)
        with weights_on:
            engine = menu.find_strategy(cell.strategy).build(cell, task, ranks)
        step, passed = engine.forward_backward, 0

        def counted(*args: Any) -> torch.Tensor:
            nonlocal passed
            passed += 1
            if passed == cell.warmup_steps + 1:
                at_first()
            return step(*args)

        engine.forward_backward = counted  # type: ignore[method-assign]
        with LineWriter(Path(folder) / "steps.jsonl") as lines:
            recorder, watch = loop.Recorder(lines), RunInstruments([], ranks.device)
            took_s = loop._run_steps(cell, task, order, engine, ranks.device, ranks, recorder, watch)
        at_last()
        engine.close()
    return took_s, recorder.step_ms


def uuid() -> str:
    """NVML's UUID of the GPU that is number 0 in torch."""
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def nvml_handle() -> Any:
    """NVML's handle of the GPU that is number 0 in torch. Raises NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(uuid())
