"""Makes steps of an engine and records their memory by category, their collectives and their operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import sdpa_backward_flop, sdpa_flop

from trainers import communication
from trainers.communication import CountedCall
from trainers.instruments.memory_timeline import CATEGORIES
from trainers.instruments.step_memory import StepMemory
from trainers.instruments.storages import StorageLog
from trainers.model import counted_flops
from trainers.rehearsal.fake_tensors import DEVICE, list_live_fake_tensors

if TYPE_CHECKING:
    from trainers.engine import Engine
    from trainers.instruments.timing import Clock
    from trainers.task import Batch

BytesByCategory = dict[str, int]
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class CountedStep(NamedTuple):
    """What was recorded in a step of one rank, or in the steps of one period of its communication."""

    peaks: dict[str, BytesByCategory]
    """For each section of the step, the bytes by category at the peak of the section. The sections are forward, the first and
    the second half of backward, and everything else, such as the update. The peak of the step is the largest of these peaks."""
    memory_after: BytesByCategory
    """Bytes by category after the step."""
    calls: list[tuple[CountedCall, float]]
    """Each collective, with the number of its starts per step."""
    flops: float
    """Floating-point operations per step."""


def count_step(engine: Engine, batches: Sequence[Batch], clock: Clock, *, period: int) -> CountedStep:
    """Make `period` steps on fake tensors (which have shapes, but no memory), and record them. Earlier steps must have
    allocated the optimizer's state."""
    step_memory, flop_counter = StepMemory(engine, DEVICE, _SectionLog), _FlopCounter()
    for tensor in list_live_fake_tensors():
        step_memory.log.find_storage(tensor)  # the log would not find tensors that no operator reads, or that the step replaces
    clock.start()
    with step_memory, flop_counter, communication.count_collectives() as calls:
        for _ in range(period):
            engine.forward_backward(batches, clock)
            engine.update()
    assert isinstance(step_memory.log, _SectionLog)
    peaks, memory_after = _compute_peaks(step_memory.log, step_memory.find_category)
    starts_per_step = [(call, times / period) for call, times in Counter(calls).items()]
    return CountedStep(peaks, memory_after, starts_per_step, flop_counter.flops / period)


class _SectionLog(StorageLog):  # type: ignore[no-untyped-call]
    """A log that also records in which section of the step each change happened. Recomputation of forward counts as
    backward."""

    def __init__(self, device: torch.device, between_passes: Callable[[], object]) -> None:
        super().__init__(device, between_passes)
        self.sections: list[str] = []

    def _record_change(self, *change: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        self.sections.append(BACKWARD if in_backward else FORWARD if torch.is_grad_enabled() else UPDATE)
        super()._record_change(*change)


def _compute_peaks(log: _SectionLog, find_category: Callable[[int], str]) -> tuple[dict[str, BytesByCategory], BytesByCategory]:
    """Compute (the memory at the peak of each section, the memory after the step), in bytes by category."""
    memory = dict.fromkeys(CATEGORIES, 0)
    changes = list(zip(log.changes, log.sections, strict=True))
    for change, _ in changes:
        if change.t_s == 0.0:
            memory[find_category(change.number)] += change.nbytes
    peaks: dict[str, BytesByCategory] = {}
    step_changes = [(change, section) for change, section in changes if change.t_s > 0.0]
    for section, section_pairs in groupby(step_changes, key=lambda pair: pair[1]):
        section_changes = list(section_pairs)
        for index, (change, _) in enumerate(section_changes):
            memory[find_category(change.number)] += change.nbytes
            half_suffix = f" {1 + 2 * index // len(section_changes)}" if section == BACKWARD else ""
            highest_memory = peaks.get(section + half_suffix)
            if highest_memory is None or sum(memory.values()) > sum(highest_memory.values()):
                peaks[section + half_suffix] = dict(memory)
    return peaks, memory


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations of matrix products, convolutions and attention, by the formulas of torch.

    torch's FlopCounterMode is not used: for a tensor that is split over ranks (DTensor), it counts the operations of all ranks,
    and it keeps activations in memory that are recomputed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._formulas: dict[Any, Callable[..., int]] = {
            **counted_flops.make_flop_counter().flop_registry,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
        }

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(tensor_class, "__tensor_flatten__") for tensor_class in types):
            return NotImplemented  # then DTensor and similar classes call operators on their inner tensors: these are counted
        outputs = operator(*args, **(kwargs or {}))
        if (formula := self._formulas.get(operator._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=outputs)
        return outputs
