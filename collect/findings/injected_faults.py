"""The effects of faults on purpose: how long other ranks wait for a slowed rank, and what a cell loses with a lost worker."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec
import polars as pl

from collect.findings.columns import label_of
from collect.findings.comparability import without_faults
from collect.findings.row import CellRow
from collect.loading.loaded_run import LoadedRun
from collect.metrics.rank_times import waiting_by_rank
from collect.reading.load import Loaded, LoadedCell
from collect.timeline.timeline import straggler_of

REMARK = (
    "a fault on purpose (instruments.straggler, instruments.lost_worker), so the figures are not those of an ordinary run: {}"
)


class StragglerEffect(msgspec.Struct, frozen=True, kw_only=True):
    """A cell with a rank that is slowed on purpose, over its completed repeats, beside the same cell without the fault."""

    cell: str
    rank: int  # the rank that is slowed
    delay_ms: float  # the delay on purpose in each step
    n: int  # number of completed repeats
    found: int | None  # the rank that the timeline names as the straggler, if all repeats agree
    waiting_ms: list[float]  # for each rank, how long it waits in a step (metric `phase_waiting_ms`); empty if not known
    ordinary: str | None  # the id of the same cell without the fault
    throughput_per_s: float | None  # all ranks together, by the slowest rank of each step
    ordinary_throughput_per_s: float | None  # the same of the cell without the fault
    rank_throughput_per_s: float | None  # the sum over ranks, each by its own time
    ordinary_rank_throughput_per_s: float | None  # the same of the cell without the fault
    staleness_mean: float | None  # updates; only with parameter servers
    ordinary_staleness_mean: float | None  # the same of the cell without the fault


class LostWorkerEffect(msgspec.Struct, frozen=True, kw_only=True):
    """A cell with a rank whose process ends on purpose, over its repeats. Means over the repeats that lost the rank."""

    cell: str
    rank: int  # the rank that is lost
    step: int  # the timed step that it does not make
    state: str  # the states of the repeats
    n: int  # number of repeats that lost the rank
    before_per_s: float | None  # units per second of all ranks until the loss
    after_per_s: float | None  # the same after the loss, until the first of the other ranks ends; None if the run ended
    unseen_units: float | None  # units of the asked steps on which no rank trained
    unseen_pct: float | None  # their share of all units of the asked steps
    last_step: int | None  # the last timed step that all ranks made, without the lost rank after its end
    last_loss: float | None  # the loss of this step
    ordinary: str | None  # the id of the same cell without the fault
    ordinary_loss: float | None  # the loss of that cell at its last step


class Window(msgspec.Struct, frozen=True):
    """The units that ranks finished in a stretch of time, and its seconds."""

    units: float
    seconds: float


def remarks(rows: Sequence[CellRow]) -> list[str]:
    """A remark that names the cells with faults on purpose; empty if there are none."""
    labels = label_of(rows)
    named = [labels[row.id] for row in rows if "fault" in row.flat]
    return [REMARK.format("; ".join(named))] if named else []


def stragglers(loaded: Loaded, rows: Sequence[CellRow]) -> list[StragglerEffect]:
    """The effects of slowed ranks, for each cell that has such a rank and completed runs."""
    ordinary = _ordinary(rows)
    found = []
    for cell, row in zip(loaded.cells, rows, strict=True):
        asked = cell.cell.instruments.straggler
        if asked is None or not cell.completed:
            continue
        twin = ordinary.get(without_faults(row.cell))
        named = {late.rank if (late := straggler_of(run)) else None for run in cell.completed}
        metrics = ("throughput_per_s", "rank_throughput_per_s", "staleness_mean")
        found.append(
            StragglerEffect(
                cell=cell.id,
                rank=asked.rank,
                delay_ms=asked.delay_ms,
                n=len(cell.completed),
                found=named.pop() if len(named) == 1 else None,
                waiting_ms=_waiting(cell),
                ordinary=twin.id if twin else None,
                **{name: _value(row, name) for name in metrics},
                **{f"ordinary_{name}": _value(twin, name) for name in metrics},
            )
        )
    return found


def lost_workers(loaded: Loaded, rows: Sequence[CellRow]) -> list[LostWorkerEffect]:
    """The effects of lost workers, for each cell that has one and whose runs came so far."""
    ordinary = _ordinary(rows)
    found = []
    for cell, row in zip(loaded.cells, rows, strict=True):
        asked = cell.cell.instruments.lost_worker
        runs = [run for run in cell.runs if asked is not None and lost_at(run) is not None]
        if asked is None or not runs:
            continue
        twin = ordinary.get(without_faults(row.cell))
        unseen = [_unseen(run) for run in runs]
        losses = [(run.world["step"][-1], run.world["loss"][-1]) for run in runs if not run.world.is_empty()]
        found.append(
            LostWorkerEffect(
                cell=cell.id,
                rank=asked.rank,
                step=asked.step,
                state=row.state,
                n=len(runs),
                before_per_s=_rate(before(run) for run in runs),
                after_per_s=_rate(after(run) for run in runs),
                unseen_units=_mean(part[0] if part else None for part in unseen),
                unseen_pct=_mean(100 * part[0] / part[1] if part else None for part in unseen),
                last_step=min(step for step, _ in losses) if losses else None,
                last_loss=_mean(loss for _, loss in losses),
                ordinary=twin.id if twin else None,
                ordinary_loss=_value(twin, "final_loss"),
            )
        )
    return found


def lost_at(run: LoadedRun) -> float | None:
    """When a run lost the rank that its cell ends on purpose: the end of the last step of this rank, in seconds since the
    epoch. None if the rank did not come so far."""
    lost = run.run.cell.instruments.lost_worker if run.run is not None else None
    if lost is None:
        return None
    own = _timed(run).filter(pl.col("rank") == lost.rank)
    return float(own["wall_s"].max()) if own.height == lost.step - 1 else None  # type: ignore[arg-type]


def before(run: LoadedRun) -> Window | None:
    """The units that all ranks finished from the start of the first timed step to the loss of the rank."""
    steps, end = _timed(run), lost_at(run)
    if end is None:
        return None
    start = float((steps["wall_s"] - steps["step_ms"] / 1000).min())  # type: ignore[arg-type]
    return Window(float(steps.filter(pl.col("wall_s") <= end)["units"].sum()), end - start)


def after(run: LoadedRun) -> Window | None:
    """The units that the other ranks finished from the loss of the rank until the first of them had made all its steps.

    None if the run did not go on after the loss.
    """
    start = lost_at(run)
    if start is None or not run.completed:
        return None
    lost = run.cell.instruments.lost_worker
    assert lost is not None
    others = _timed(run).filter(pl.col("rank") != lost.rank)
    end = float(others.group_by("rank").agg(pl.col("wall_s").max())["wall_s"].min())  # type: ignore[arg-type]
    inside = others.filter((pl.col("wall_s") > start) & (pl.col("wall_s") <= end))
    return Window(float(inside["units"].sum()), end - start) if end > start else None


def _timed(run: LoadedRun) -> pl.DataFrame:
    """Every timed step that any rank recorded. Units of ranks that share a model are divided among them."""
    return run.steps.filter(~pl.col("warmup")).with_columns(pl.col("units") * (run.cell.dp / run.cell.gpus))


def _unseen(run: LoadedRun) -> tuple[float, float] | None:
    """(units of data that no rank trained on, units of data of the whole run); None if the number of steps is not known."""
    asked = run.cell.steps or (run.result.steps if run.result else None)
    steps = _timed(run)
    first = steps.filter(pl.col("step") == 1)
    if asked is None or first["rank"].n_unique() < run.cell.gpus:
        return None
    whole = float(first["units"].sum()) * asked
    return whole - float(steps["units"].sum()), whole


def _ordinary(rows: Iterable[CellRow]) -> dict[bytes, CellRow]:
    return {without_faults(row.cell): row for row in rows if "fault" not in row.flat}


def _waiting(cell: LoadedCell) -> list[float]:
    of_runs = [waiting_by_rank(run) for run in cell.completed]
    if not all(of_runs):
        return []
    return [statistics.fmean(one[rank] for one in of_runs) for rank in range(cell.cell.gpus)]


def _value(row: CellRow | None, metric: str) -> float | None:
    estimate = row.metrics.get(metric) if row is not None else None
    return None if estimate is None else estimate.value


def _rate(windows: Iterable[Window | None]) -> float | None:
    return _mean(window.units / window.seconds for window in windows if window is not None and window.seconds > 0)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
