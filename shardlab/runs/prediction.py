"""prediction.json: the prediction of the planner for a run, made before the run is submitted.

`jobs` writes it beside run.json, and `collect` compares it with the measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from shardlab.errors import WorkspaceError
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.record_types import Count, Measured
from shardlab.runs.rehearsed import RehearsedCollective

SCHEMA = 1
FitVerdict = Literal["yes", "likely", "unlikely", "no"]
"""yes: even the highest predicted memory fits into the smallest capacity. no: even the lowest memory does not fit into the
largest capacity. likely, unlikely: otherwise; the likely memory fits, or does not fit, into the likely capacity."""


PredictionSource = Literal["rehearsal", "formula"]
"""The source of a number: a rehearsal of the cell (shardlab/runs/rehearsed.py), or a formula of the planner."""


class PredictedRange(msgspec.Struct, frozen=True):
    """A predicted number, which lies between `low` and `high`. The name of the field whose value is this range has the unit."""

    low: Measured
    """Lower end."""
    likely: Measured
    """Most likely value."""
    high: Measured
    """Upper end."""

    def __add__(self, other: PredictedRange) -> PredictedRange:
        return PredictedRange(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def times(self, factor: float) -> PredictedRange:
        """The range multiplied by a factor, which must not be negative."""
        return PredictedRange(self.low * factor, self.likely * factor, self.high * factor)


ZERO = PredictedRange(0.0, 0.0, 0.0)


def make_exact_range(known_value: float) -> PredictedRange:
    """A range in which all three numbers are `known_value`, for a number that is known exactly."""
    return PredictedRange(known_value, known_value, known_value)


def sum_ranges(range_by_name: Mapping[str, PredictedRange]) -> PredictedRange:
    """The sum of the ranges. If the numbers are independent of each other, the sum is wider than necessary, which is safe."""
    return sum(range_by_name.values(), start=ZERO)


class PredictedExchange(msgspec.Struct, frozen=True):
    """One kind of communication of a rank in a step, by the theory of its strategy."""

    op: str
    """The kind of communication: all_reduce, all_gather, reduce_scatter, broadcast or send."""
    sent_bytes: Measured
    """The bytes that the rank sends in a step for this kind of communication."""
    calls: Measured
    """How often the rank starts this communication in a step."""
    ranks: Count
    """The number of ranks that take part in one call."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for a run of one cell. A number that is not known is null, never 0."""

    schema: Count = SCHEMA
    memory_bytes: PredictedRange | None = None
    """Peak memory of a step, on the rank that needs the most memory."""
    memory_by_category: dict[str, PredictedRange] = {}
    """`memory_bytes` by category: the categories of docs/instruments.md, and the memory that is not used by tensors
    (cuda_context, nccl_buffers, fragmentation)."""
    tensor_bytes: PredictedRange | None = None
    """The part of `memory_bytes` that torch's allocator counts as allocated: all but the CUDA context, NCCL's buffers and
    fragmentation."""
    capacity_bytes: PredictedRange | None = None
    """The memory of a GPU that a rank may use; `memory_limit_gib` of the cell lowers it."""
    host_bytes: PredictedRange | None = None
    """Peak host memory of the processes of a run on a node, in bytes, on the node that needs the most; pages that processes
    share count once or not."""
    host_capacity_bytes: Measured | None = None
    """The memory of a node, in bytes; of different nodes, the smallest."""
    fits: FitVerdict | None = None
    """Whether memory_bytes fits into capacity_bytes."""
    largest_micro_batch: Count | None = None
    """The largest micro_batch_size that is likely to fit; 0: none does."""
    step_s: PredictedRange | None = None
    """The time of an optimizer step."""
    step_parts_s: dict[str, Measured] = {}
    """The likely time of each part of a step: compute, optimizer, launches, exposed communication, bubble."""
    time_s: PredictedRange | None = None
    """The time of a whole run: start, warm-up steps and timed steps."""
    gpu_hours: PredictedRange | None = None
    """The number of GPUs that train, multiplied by the duration of the run in hours."""
    energy_kwh: PredictedRange | None = None
    """The energy of the GPUs that train, for the whole run."""
    cost: PredictedRange | None = None
    """The cost of the run, in the currency of `price_per_gpu_hour` in the cluster file."""
    sent_bytes: Measured | None = None
    """The bytes that a rank sends in a step by theory; the value of the rank that sends the most."""
    memory_from: PredictionSource | None = None
    """The source of the predicted memory."""
    sent_from: PredictionSource | None = None
    """The source of `sent_bytes`."""
    collectives: tuple[RehearsedCollective, ...] = ()
    """The collectives that the rank that sends the most starts in a step; empty if the cell was not rehearsed."""
    exchanges: tuple[PredictedExchange, ...] | None = None
    """The communication of the rank that sends the most, by the theory of its strategy; null: not known, or the prediction was
    made by an older release."""
    bottleneck: str | None = None
    """The name of the part of a step that takes the longest time."""
    how: str = ""
    """A sentence that says how the numbers were obtained."""
    gpu: str | None = None
    """The GPU model for which the prediction was made, as the cluster file or NVML names it; null: no GPU, or not known."""
    formula_step_s: Measured | None = None
    """The likely time of a step by the formula, before earlier runs corrected it. The next calibration compares this time with
    the measured time."""
    formula_tensor_bytes: Measured | None = None
    """The likely `tensor_bytes` by the formula, before earlier runs corrected it."""


def find_prediction_path(run_folder: Path) -> Path:
    """The path of the prediction in the folder of a run."""
    return run_folder / "prediction.json"


def read_prediction(run_folder: Path) -> Prediction | None:
    """The prediction of a run; None if prediction.json does not exist or is damaged.

    A missing prediction is no error, because no result of a run depends on it. Raises WorkspaceError if an existing file cannot
    be read.
    """
    try:
        return get_decoder(Prediction).decode(files.read(find_prediction_path(run_folder)))
    except (FileNotFoundError, *DECODE_FAULTS):
        return None
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read") from error
