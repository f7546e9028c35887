"""What a run of a command has in its folder: the working folder, the steps that the script told, and its checkpoints."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from shardlab.files import files
from shardlab.matrix.command import CHECKPOINT_PLACEHOLDER
from shardlab.runs.record import SCHEMA, Result, SameWork, StepRecord, read_records
from shardlab.runs.run import STEP_UNIT, Run
from shardlab.runs.rundir import RunDir

TOKENS_UNIT = "tokens"


class CommandStep(StepRecord, kw_only=True):
    """A step that a script told."""

    counts_units: bool = False
    """Whether the script said how many tokens it trained on; if not, the step itself is the unit."""
    diverged: bool = False
    """Whether the loss is no finite number."""


def list_command_words(run_dir: RunDir, run: Run, python_path: str) -> list[str]:
    """The words of the command line of a run. python_path: the interpreter that stands for a first word `python`.

    If an earlier attempt, or an earlier start of this run, left a checkpoint, the words of `resume` are at the end."""
    cell_command = run.cell.command
    assert cell_command is not None
    words = [python_path if cell_command.words[0] in ("python", "python3") else cell_command.words[0], *cell_command.words[1:]]
    checkpoint = find_checkpoint(
        [run_dir, *(RunDir(run_dir.path.parent / run_id) for run_id in run.resume)], cell_command.checkpoint
    )
    if checkpoint is not None:
        words += [word.replace(f"{{{CHECKPOINT_PLACEHOLDER}}}", str(checkpoint)) for word in cell_command.resume]
    return words


def find_checkpoint(run_dirs: Sequence[RunDir], pattern: str | None) -> Path | None:
    """The newest checkpoint in the working folders of these runs: the one whose name has the largest last number.

    pattern: of the checkpoints' paths; None: the script writes none that shardlab knows.
    """
    paths = [path for run_dir in run_dirs for path in sorted(run_dir.work.glob(pattern))] if pattern is not None else []
    return max(paths, key=parse_last_number, default=None)


def parse_last_number(checkpoint_path: Path) -> int:
    """The last number in the name of a checkpoint, such as its step; 0 if there is none."""
    return int(["0", *re.findall(r"\d{1,18}", checkpoint_path.name)][-1])


def write_result(run_dir: RunDir, run: Run) -> str:
    """Write the result of a run whose command ended with exit code 0. Returns why there is none; '' if it was written."""
    steps_by_rank = _read_timed_steps(run_dir, run)
    if not steps_by_rank:
        return _explain_no_steps(run)
    diverged_step = min((step.step for steps in steps_by_rank for step in steps if step.diverged), default=None)
    if diverged_step is not None:
        return f"the loss is no finite number at step {diverged_step}"
    common_steps = set.intersection(*({step.step for step in steps} for steps in steps_by_rank))
    common_steps_by_rank = [[step for step in steps if step.step in common_steps] for steps in steps_by_rank]
    steps_ms = [max(step.step_ms for step in steps) for steps in zip(*common_steps_by_rank, strict=True)]
    if not steps_ms:
        return _explain_no_steps(run)
    counts_units = any(step.counts_units for steps in common_steps_by_rank for step in steps)
    unit_count = sum(step.units for steps in common_steps_by_rank for step in steps)
    losses_by_rank = ([step.loss for step in steps if step.loss is not None] for steps in common_steps_by_rank)
    last_losses = [rank_losses[-1] for rank_losses in losses_by_rank if rank_losses]
    result = Result(
        schema=SCHEMA,
        run_id=run.run_id,
        state="completed",
        rehearsal=run.rehearsal,
        steps=len(steps_ms),
        unit=TOKENS_UNIT if counts_units else STEP_UNIT,
        final_loss=statistics.fmean(last_losses) if last_losses else None,
        throughput_per_s=1000 * unit_count / sum(steps_ms) if sum(steps_ms) else None,
        train_time_s=sum(steps_ms) / 1000,
        same_work=SameWork(verdict="not proven", why="shardlab does not see the work of a command."),
    )
    files.write_json(run_dir.result, result)
    return ""


def _explain_no_steps(run: Run) -> str:
    """Why a command that ended with exit code 0 has no time of a step, and what helps. The first step has no time."""
    steps = run.cell.command.steps if run.cell.command else None
    if steps is None:
        cause = (
            "it did not call shardlab.steps.report twice, and the matrix has no `steps: {regex: ...}` or `steps: {jsonl: ...}`"
        )
    elif steps.jsonl is not None:
        cause = f"the file {steps.jsonl} has fewer than two lines of steps"
    else:
        cause = f"fewer than two lines of its output match {steps.regex!r}; `sample` lets `jobs plan` try the pattern on a line"
    return f"the command ended with exit code 0, but told no step after the first: {cause} (docs/how-to/own-script.md)"


def _read_timed_steps(run_dir: RunDir, run: Run) -> list[list[CommandStep]]:
    """The timed steps of each rank that told steps."""
    records_by_rank = (read_records(run_dir.steps_file(rank), CommandStep).records for rank in range(run.cell.gpus))
    timed_by_rank = [[step for step in records if not step.warmup and not step.watched] for records in records_by_rank]
    return [timed_steps for timed_steps in timed_by_rank if timed_steps]
