"""How often a kernel or an operator is called, or a class of them, how long that takes, and how much longer than elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from collect.metric import Compared, Measured, Metric, Quantity
from collect.metrics.beside import more
from collect.traces import names
from collect.traces.breakdown import Tally

OF = "`of` is a name, as whole words or with a * at its end, or a class of names: " + ", ".join(names.CLASSES)
EXAMPLE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def calls(measured: Measured, of: str) -> Quantity | None:
    """Calls a step, mean over the ranks that were profiled by steps."""
    return _a_step(measured, of, "calls", lambda one: one.count)


def time(measured: Measured, of: str) -> Quantity | None:
    """ms a step, mean over the ranks that were profiled by steps."""
    return _a_step(measured, of, "ms", lambda one: one.total_ns / 1e6)


def _a_step(measured: Measured, of: str, unit: str, size: Callable[[Tally], float]) -> Quantity | None:
    """None without profiled steps, and where nothing of a trace of operators has the name: it may be a kernel's. 0 where a GPU
    has no such kernel."""
    ranks = [one for one in measured.breakdowns if one.steps]
    wanted = [names.pattern(of, one.source) for one in ranks]
    found = [[each for each in one.kernels if look and look.search(each.name)] for one, look in zip(ranks, wanted, strict=True)]
    if not ranks or (not any(found) and any(one.source != "gpu" for one in ranks)):
        return None
    shares = [sum(map(size, each)) / one.steps for one, each in zip(ranks, found, strict=True)]
    return Quantity(sum(shares) / len(shares), unit, ranks[0].kind)


def difference(compared: Compared) -> Quantity | None:
    return more(compared, "ms")


METRICS = (
    Metric(
        name="operator_count",
        unit="calls",
        direction="neither",
        definition="Calls of a kernel, or of an operator where there is no GPU, in a profiled step; mean over the profiled "
        f"ranks. {OF}.",
        of_run_at=calls,
        argument="of",
        example=EXAMPLE,
    ),
    Metric(
        name="operator_ms",
        unit="ms",
        direction="lower is better",
        definition="Durations of a kernel's calls in a profiled step added up, overlaps counted twice; of an operator with all "
        f"that it calls where there is no GPU; mean over the profiled ranks. {OF}.",
        of_run_at=time,
        argument="of",
        example=EXAMPLE,
    ),
    Metric(
        name="operator_difference_ms",
        unit="ms",
        direction="lower is better",
        definition="operator_ms less that of the baseline, as study 2 prints in section 4.5.1 what a strategy adds.",
        of_cells=difference,
        compares="operator_ms",
        argument="of",
        example="GEMM",
    ),
)
