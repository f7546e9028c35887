"""prediction.json: what the planner predicted of a run before it was submitted. `jobs` writes it beside run.json, and `collect`
compares it with the measurement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from shardlab import files
from shardlab.decoders import DECODE_FAULTS, decoder
from shardlab.errors import WorkspaceError

SCHEMA = 1
Fits = Literal["yes", "likely", "unlikely", "no"]
"""yes: even the highest prediction fits the smallest capacity. no: even the lowest does not fit the largest capacity. likely,
unlikely: in between, by the likely values."""


class PredictedRange(msgspec.Struct, frozen=True):
    """A predicted number: from `low` to `high`, most likely `likely`. All three in the unit that the field's name ends with."""

    low: float
    likely: float
    high: float

    def __add__(self, other: PredictedRange) -> PredictedRange:
        return PredictedRange(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def times(self, factor: float) -> PredictedRange:
        """Each of the three multiplied by a factor that is not negative."""
        return PredictedRange(self.low * factor, self.likely * factor, self.high * factor)


ZERO = PredictedRange(0.0, 0.0, 0.0)


def exactly(value: float) -> PredictedRange:
    """A range without width: a number that follows from arithmetic."""
    return PredictedRange(value, value, value)


def total(ranges: Mapping[str, PredictedRange]) -> PredictedRange:
    """The sum. It is too wide if the terms are independent, and so it errs to the safe side."""
    return sum(ranges.values(), start=ZERO)


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What is predicted of a run of one cell. A number that is not known is null, never 0."""

    schema: int = SCHEMA
    memory_bytes: PredictedRange | None = None
    """Peak memory of a step on the rank that needs most."""
    memory_by_category: dict[str, PredictedRange] = {}
    """The same by category; the categories are those of docs/instruments.md, and the terms beside tensors."""
    tensor_bytes: PredictedRange | None = None
    """The part of it that torch's allocator counts as allocated: all but the CUDA context, NCCL's buffers and fragmentation."""
    capacity_bytes: PredictedRange | None = None
    """Memory of the GPU, or the cell's own limit."""
    fits: Fits | None = None
    largest_micro_batch: int | None = None
    """The largest micro_batch_size that is likely to fit; 0: none does."""
    step_s: PredictedRange | None = None
    """An optimizer step."""
    step_parts_s: dict[str, float] = {}
    """The likely step by part: compute, optimizer, launches, exposed communication, bubble."""
    time_s: PredictedRange | None = None
    """A whole run: start, warm-up steps and timed steps."""
    gpu_hours: PredictedRange | None = None
    energy_kwh: PredictedRange | None = None
    """Energy of the GPUs that train."""
    cost: PredictedRange | None = None
    """In the currency of `price_per_gpu_hour` in the cluster file."""
    sent_bytes: float | None = None
    """What a rank sends in a step, by theory; the rank that sends most."""
    bottleneck: str | None = None
    """The largest part of the step."""
    how: str = ""
    """From what the numbers were obtained, as a sentence."""
    gpu: str | None = None
    """The GPU for which it was made, as the cluster file or NVML names it; null: none, or not known."""
    formula_step_s: float | None = None
    """The likely step before it was corrected by earlier runs. The next calibration compares it with the measurement."""
    formula_tensor_bytes: float | None = None
    """The likely `tensor_bytes` before it was corrected."""


def path_in(run_folder: Path) -> Path:
    """Where the prediction of a run is."""
    return run_folder / "prediction.json"


def read(run_folder: Path) -> Prediction | None:
    """The prediction of a run; None if there is none, or if it is damaged: no number depends on it."""
    try:
        return decoder(Prediction).decode(files.read(path_in(run_folder)))
    except (FileNotFoundError, *DECODE_FAULTS):
        return None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read") from error
