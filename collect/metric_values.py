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


def result_metric(key: str, *, unit: str, factor: float = 1, **metric_fields: Any) -> Metric:
    """A metric whose value is that of a key of result.json. Without the key, the value is not known.

    factor: the value of the key is multiplied by this number. metric_fields: the other fields of the metric.
    """

    def of_run(run: LoadedRun) -> Quantity | None:
        value = read_result_value(run, key)
        return None if value is None else Quantity(factor * value, unit)

    return Metric(unit=unit, of_run=of_run, reads=Reads(result=(key,)), **metric_fields)


def read_result_value(run: LoadedRun, key: str) -> Any:
    """The value of a key of result.json, such as `instruments.memory.peak_bytes`; None without a result or without the key."""
    value: Any = run.result
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value


def mean_over_ranks(
    ranks: Iterable[RankT], measure: Callable[[RankT], float | None], unit: str, unit_size: float = 1
) -> Quantity | None:
    """The mean of a number over the profiled ranks that have it; None if no rank has it.

    measure: a function that returns the number of one rank, or None. unit_size: how many units of `measure` make one `unit`.
    """
    numbers = [(number, rank.kind) for rank in ranks if (number := measure(rank)) is not None]
    return Quantity(fmean(number for number, _ in numbers) / unit_size, unit, numbers[0][1]) if numbers else None


def mean_per_step(
    ranks: Iterable[RankT], measure: Callable[[RankT], float | None], unit: str, unit_size: float = 1
) -> Quantity | None:
    """As `mean_over_ranks`, for each profiled step. measure: returns the number of one rank, all its steps together.

    Ranks that were not profiled by steps do not count.
    """

    def measure_step(rank: RankT) -> float | None:
        return None if not rank.steps or (number := measure(rank)) is None else number / rank.steps

    return mean_over_ranks(ranks, measure_step, unit, unit_size)


def mean_ms_per_step(ranks: Iterable[RankT], ns: Callable[[RankT], float | None]) -> Quantity | None:
    """The mean of a time in ms for each profiled step. ns: returns the time of one rank in ns, all its steps together."""
    return mean_per_step(ranks, ns, "ms", NS_PER_MS)
