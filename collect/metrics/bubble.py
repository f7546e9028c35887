"""Metrics of the bubble of a pipeline, the time in which its ranks wait for each other: by theory, and from step records."""

from __future__ import annotations

import polars as pl

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn
from collect.sources.steps import unwatched


def theory(run: LoadedRun) -> Quantity | None:
    """The bubble of a run's pipeline by theory, in percent: 100 (P - 1) / (v M + P - 1).

    P: number of ranks of a pipeline; M: number of micro-batches; v: number of stages per rank. None for a cell without a
    pipeline, and for a run without timed steps.
    """
    cell = run.cell
    if cell.pp < 2 or run.timed.is_empty():
        return None
    per_rank = cell.options.get("stages_per_rank", 1)
    assert isinstance(per_rank, int)
    return Quantity(theory_pct(cell.pp, per_rank * cell.gradient_accumulation_steps), "%")


def theory_pct(ranks: int, passes: float) -> float:
    """The bubble of a pipeline by theory, in percent of its time.

    ranks: number of ranks of the pipeline. passes: number of micro-batches times number of stages per rank.
    """
    return 100 * (ranks - 1) / (passes + ranks - 1)


def seen(run: LoadedRun) -> Quantity | None:
    """The measured bubble in percent: 100 (1 - (F + B) / T), where each time is a sum over the timed steps.

    F: forward time of the first stage; B: backward time of the last stage (both are means over replicas); T: forward and
    backward time of the slowest rank.

    The forward and backward times of a rank include the time in which it waits. The first stage never waits in forward, and the
    last stage never waits in backward, so F + B is the time that a rank computes if all stages take equally long. None if a
    rank has several stages, or if F + B is greater than T, because the stages then do not take equally long.
    """
    cell = run.cell
    if cell.pp < 2 or cell.options.get("stages_per_rank", 1) != 1:
        return None
    rows = unwatched(run.timed).drop_nulls(["forward_ms", "backward_ms"])
    # `across` is the number of ranks of one stage. These ranks have consecutive numbers (trainers/parallel/mesh_model.py).
    across = cell.gpus // cell.pp
    rows = rows.with_columns(stage=pl.col("rank") // across, passes=pl.col("forward_ms") + pl.col("backward_ms"))
    total = float(rows.group_by("step", maintain_order=True).agg(pl.max("passes"))["passes"].sum())
    first, last = rows.filter(pl.col("stage") == 0), rows.filter(pl.col("stage") == cell.pp - 1)
    if total <= 0 or first.is_empty() or last.is_empty():
        return None
    computed = (float(first["forward_ms"].sum()) + float(last["backward_ms"].sum())) / across
    return Quantity(100 * (1 - computed / total), "%", "of equally long stages") if computed <= total else None


METRICS = (
    Metric(
        name="bubble_theory_pct",
        column=MetricColumn("times", 50, "Bubble, theory", 3),
        unit="%",
        direction="lower is better",
        definition="Share of a pipeline's time in which a rank has nothing to do, (P - 1) / (v M + P - 1) for P ranks, M "
        "micro-batches and v stages a rank (Huang et al., GPipe, 2019, section 2.3; Narayanan et al., 2021, section 2.2, "
        "which divide by the busy time instead: (P - 1) / (v M)).",
        of_run=theory,
        exact=True,
    ),
    Metric(
        name="bubble_pct",
        column=MetricColumn("times", 40, "Bubble", 3),
        unit="%",
        direction="lower is better",
        definition="Share of the forward and backward time in which a rank waits, computed from the step records for stages "
        "that take equally long: the first stage never waits in forward, the last stage never in backward; the rest of the "
        "slowest rank's time is the bubble, which includes the time for sending. Blank if a rank has several stages.",
        of_run=seen,
    ),
)
