"""Writes the result of a run (result.json) from the results of all ranks, after the last step of every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from shardlab import files, host
from shardlab.record import SCHEMA, Result, SameWork, Spread
from shardlab.run import Run
from shardlab.rundir import RunDir
from trainers import gpu_identity, menu

if TYPE_CHECKING:
    import numpy as np

    from trainers.ranks import Company, Ranks
    from trainers.strategy import Engine
    from trainers.workload import Task


class OfRank(msgspec.Struct, frozen=True):
    """The results of one rank: wall-clock seconds of its timed steps, its loss at the last step (NaN if the rank had no data in
    this step), peak memory in bytes, and the time of each timed step."""

    train_time_s: float
    loss: float
    peak_bytes: dict[str, int]
    step_ms: list[float]
    watched: list[bool]  # which of them an instrument slowed down
    items: list[int]  # items of all ranks together in each timed step
    goes_back: bool  # whether step_ms begins with the run's first timed step, even if the run resumed from a checkpoint


def write(
    run: Run,
    run_dir: RunDir,
    ranks: Ranks,
    company: Company,
    mine: OfRank,
    engine: Engine,
    task: Task,
    steps_per_epoch: int,
    same_work: SameWork,
    instruments: dict[str, dict[str, Any]],
    *,
    resumed_from_step: int | None,
) -> None:
    """Gather the results of the ranks of `company`; rank 0 writes them. A collective: it returns when the file is written.

    The time of a step is that of its slowest rank. (Ranks drift within a step, so these times add up to slightly more than the
    wall-clock time, and never to less than the steps of any rank.)
    throughput_per_s: units of all timed steps on all ranks / seconds of all timed steps. step_time_ms: the spread of the times.
    peak_memory_bytes: of the worst rank. These three leave out steps that an instrument slowed down.
    train_time_s: wall-clock time of the slowest rank from the start of the first timed step to the end of the last, with the
    time between steps, but without the time of instruments there.
    All values are of the ranks that trained to the end. If a rank was lost, the state is not completed, and its units do not
    count.
    """
    import numpy as np

    kinds = sorted(mine.peak_bytes)
    everyone = company.gather([mine.train_time_s, mine.loss, *(mine.peak_bytes[kind] for kind in kinds), *mine.step_ms])
    gpus = gpu_identity.names(company.gather(gpu_identity.numbers(ranks.device)))
    knobs = {"asked": _asked(run), "effective": engine.effective()}  # on every rank: reading them may need all
    parameters = engine.parameters() - task.padding
    sent = same_work.communication_bytes or _by_theory(run, company, engine)
    company.barrier()
    if ranks.rank == 0:
        steps_ms = everyone[:, 2 + len(kinds) :].max(axis=0)
        counted = ~np.array(mine.watched, dtype=bool)
        counted_ms = steps_ms[counted]
        peaks = everyone[:, 2 : 2 + len(kinds)].max(axis=0)
        workload = menu.workload(run.cell.workload)
        finished = len(everyone) / run.cell.gpus  # ranks have equal shares of every batch
        units = int(np.array(mine.items)[counted].sum()) * task.units_per_item * finished
        # Steps of another cell's checkpoint have no records: all times are of this run's own steps.
        brought = (resumed_from_step or 0) if not mine.goes_back else 0
        result = Result(
            schema=SCHEMA,
            run_id=run.run_id,
            state="completed" if finished == 1 else "failed",
            rehearsal=run.rehearsal or ranks.forked,
            steps=brought + len(steps_ms),
            unit=workload.unit,
            resumed_from_step=resumed_from_step,
            final_loss=float(np.nanmean(everyone[:, 1])),
            final_accuracy=instruments.get("validation", {}).get("accuracy"),
            throughput_per_s=units / (float(counted_ms.sum()) / 1000) if len(counted_ms) else None,
            step_time_ms=_spread(counted_ms) if len(counted_ms) else None,
            train_time_s=float(everyone[:, 0].max()),
            epoch_time_s=_epochs(steps_ms, steps_per_epoch) if run.cell.epochs is not None and not brought else None,
            peak_memory_bytes={kind: int(size) for kind, size in zip(kinds, peaks)} | _by_category(instruments),
            parameters=parameters,
            flops_per_unit=task.flops_per_unit(),
            same_work=same_work,
            communication_bytes=sent,
            data=msgspec.to_builtins(task.source),
            instruments=instruments,
            knobs=knobs,
            versions=host.packages(),
            gpus=gpus,
        )
        files.write_json(run_dir.result, result)
    company.barrier()


def _by_theory(run: Run, company: Company, engine: Engine) -> dict[str, float] | None:
    """Bytes of a step by theory, if they were not counted; None with servers, whose bytes this rank does not know."""
    theory = company.gather([sum(term.sent_bytes for term in engine.theory())])
    textbook = engine.textbook_bytes()
    if run.cell.servers or len(theory) < run.cell.gpus:
        return None
    return {"theory": float(theory.sum()), **({"textbook": textbook * run.cell.gpus} if textbook is not None else {})}


def _asked(run: Run) -> dict[str, Any]:
    """The options, precision and optimizer that the cell asked for."""
    cell = run.cell
    return {
        **cell.options,
        "precision": cell.precision,
        "micro_batch_size": cell.micro_batch_size,
        "gradient_accumulation_steps": cell.gradient_accumulation_steps,
        "optimizer": msgspec.to_builtins(cell.optimizer),
        "schedule": msgspec.to_builtins(cell.schedule),
    }


def _by_category(instruments: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Memory by category at the peak of the recorded step; empty if no step was recorded."""
    found: dict[str, int] = instruments.get("memory", {}).get("peak_bytes", {})
    return found


def _spread(steps_ms: np.ndarray) -> Spread:
    import numpy as np

    p5, median, p95 = (float(value) for value in np.percentile(steps_ms, (5, 50, 95)))
    return Spread(median=median, mean=float(steps_ms.mean()), p5=p5, p95=p95, n=len(steps_ms))


def _epochs(steps_ms: np.ndarray, steps_per_epoch: int) -> list[float]:
    """Seconds of each epoch, as the sum of its steps."""
    return [float(epoch.sum()) / 1000 for epoch in steps_ms.reshape(-1, steps_per_epoch)]
