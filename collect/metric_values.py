"""Values that many metrics share: a key of result.json, and means over the profiled ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, Reads

if TYPE_CHECKING:
    from collect.traces.breakdown import Breakdown
    from collect.traces.rank_analysis import RankAnalysis

NS_PER_MS = 1e6
RankT = TypeVar("RankT", "Breakdown", "RankAnalysis")


def make_result_metric(result_key: str, *, unit: str, unit_factor: float = 1, **metric_fields: Any) -> Metric:
    """A metric whose value is that of a key of result.json. Without the key, the value is not known.

    unit_factor: the value of the key is multiplied by this number. metric_fields: the other fields of the metric.
    """

    def read_quantity(run: LoadedRun) -> Quantity | None:
        result_value = read_result_value(run, result_key)
        return None if result_value is None else Quantity(unit_factor * result_value, unit)

    return Metric(unit=unit, of_run=read_quantity, reads=Reads(result=(result_key,)), **metric_fields)


def read_result_value(run: LoadedRun, result_key: str) -> Any:
    """The value of a key of result.json, such as `instruments.memory.peak_bytes`; None without a result or without the key."""
    value: Any = run.result
    for key_part in result_key.split("."):
        value = value.get(key_part) if isinstance(value, dict) else getattr(value, key_part, None)
    return value


def average_over_ranks(
    ranks: Iterable[RankT], measure_rank: Callable[[RankT], float | None], unit: str, units_per_result: float = 1
) -> Quantity | None:
    """The mean of a number over the profiled ranks that have it; None if no rank has it.

    measure_rank: a function that returns the number of one rank, or None. units_per_result: how many units of `measure_rank`
    make one `unit`."""
    numbers = [(number, rank.kind) for rank in ranks if (number := measure_rank(rank)) is not None]
    return Quantity(fmean(number for number, _ in numbers) / units_per_result, unit, numbers[0][1]) if numbers else None


def average_per_step(
    ranks: Iterable[RankT], measure_rank: Callable[[RankT], float | None], unit: str, units_per_result: float = 1
) -> Quantity | None:
    """As `average_over_ranks`, for each profiled step. measure_rank: returns the number of one rank, all its steps together.

    Ranks that were not profiled by steps do not count.
    """

    def measure_step(rank: RankT) -> float | None:
        return None if not rank.steps or (rank_number := measure_rank(rank)) is None else rank_number / rank.steps

    return average_over_ranks(ranks, measure_step, unit, units_per_result)


def average_ms_per_step(ranks: Iterable[RankT], measure_ns: Callable[[RankT], float | None]) -> Quantity | None:
    """The mean of a time in ms for each profiled step. measure_ns: returns the ns of one rank, all its steps together."""
    return average_per_step(ranks, measure_ns, "ms", NS_PER_MS)
