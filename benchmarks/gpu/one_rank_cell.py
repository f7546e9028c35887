"""Makes and trains a cell with one rank, and finds its GPU in NVML, for the checks of stages C and D."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from shardlab.cell import Cell, Instruments, Optimizer, Schedule
from shardlab.record import LineWriter
from trainers import dtypes, loop, menu
from trainers.data.order import Order
from trainers.instrument import RunInstruments
from trainers.ranks import Ranks


def small(*, workload: str = "gpt2-tiny", strategy: str = "single", options: dict[str, Any] | None = None, **keys: Any) -> Cell:
    """A cell of one rank with these keys and the menu's defaults."""
    of_workload = menu.workload(workload)
    defaults = {option.name: option.default for option in (*of_workload.options, *menu.strategy(strategy).options)}
    plain = Cell(
        workload=workload, strategy=strategy, gpus=1, nnodes=1, dp=1, tp=1, pp=1, servers=0, launcher="torchrun",
        global_batch_size=8, micro_batch_size=8, gradient_accumulation_steps=1, seq_len=of_workload.seq_len, steps=1,
        epochs=None, warmup_steps=0, precision="fp32", activation_checkpointing="none", compile=False, max_grad_norm=None,
        prove="off", optimizer=Optimizer("adamw", 1e-3), schedule=Schedule(), instruments=Instruments(),
        memory_limit_gib=None, seed=42,
        time_limit_s=None, expect=[], options={**defaults, **(options or {})},
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
    """Train a cell; returns (seconds of all timed steps by the host's clock, their step_ms).

    weights_on: where the weights are initialized; on a CPU, those of GPT-2 Large take ten seconds. at_first: called when the
    first timed step begins. at_last: called after the last step.
    """
    dtypes.set_tf32(cell.precision, ranks.device)
    with tempfile.TemporaryDirectory() as folder:
        task = menu.workload(cell.workload).build(cell, Path(folder))
        order = Order(task.source.items, cell.global_batch_size, cell.seed)
        torch.manual_seed(cell.seed)
        with weights_on:
            engine = menu.strategy(cell.strategy).build(cell, task, ranks)
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
            took_s = loop._steps(cell, task, order, engine, ranks.device, ranks, recorder, watch)
        at_last()
        engine.close()
    return took_s, recorder.step_ms


def uuid() -> str:
    """NVML's UUID of the GPU that torch calls 0."""
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def nvml_handle() -> Any:
    """NVML's handle of the GPU that torch calls 0. Raises NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(uuid())
