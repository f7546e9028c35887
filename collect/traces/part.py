"""Analyses one part of a folder of traces. This program is the process of a run that `jobs trace` submitted.

    python -m collect.traces.part RUN_DIR

For each trace file, it writes a summary and a step record, so that `jobs status` shows the progress. At the end it writes
result.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from collect.traces import trace
from collect.traces.file_figures import compute_file_figures
from shardlab.errors import InputError, ShardlabError
from shardlab.files import files
from shardlab.runs.record import SCHEMA, LineWriter, Result, StepRecord
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.runs.trace_part import SUMMARIES_FOLDER, make_summary_name
from shardlab.terminal import console


def main(argv: Sequence[str]) -> int:
    """Analyse the traces of a run; return the exit code. argv: RUN_DIR. Raises ShardlabError if a file cannot be read."""
    if len(argv) != 1:
        raise InputError("usage: python -m collect.traces.part RUN_DIR")
    run_dir = RunDir(Path(argv[0]).absolute())
    run = run_dir.read_run()
    try:
        analyse_part(run_dir, run)
    except ShardlabError as error:
        run_dir.write_event("trace", "failed", why=str(error))
        raise
    return 0


def analyse_part(run_dir: RunDir, run: Run) -> None:
    """Analyse the traces of a run. If a trace is damaged, its summary says what is damaged, and the next trace is analysed.

    Raises InputError if the run does not analyse traces, WorkspaceError if a trace cannot be opened.
    """
    trace_part = run.traces
    if trace_part is None:
        raise InputError(f"{run_dir.run_json}: this run does not analyse traces.")
    begin_s = time.monotonic()
    files.make_folder(run_dir.path / SUMMARIES_FOLDER)
    files.make_folder(run_dir.steps_file(0).parent)
    with LineWriter(run_dir.steps_file(0)) as step_writer:
        for file_number, file_name in enumerate(trace_part.files):
            file_start_s, trace_path = time.monotonic(), Path(trace_part.folder) / file_name
            with files.as_workspace_error("read"):
                loaded_trace, trace_bytes = trace.read_trace(trace_path), trace_path.stat().st_size
            files.write_json(
                run_dir.path / SUMMARIES_FOLDER / make_summary_name(file_number), compute_file_figures(loaded_trace), sync=False
            )
            file_end_s = time.monotonic()
            step_record = StepRecord(
                schema=SCHEMA,
                step=file_number + 1,
                t_s=file_end_s,
                wall_s=time.time(),
                units=trace_bytes,
                step_ms=1000 * (file_end_s - file_start_s),
            )
            step_writer.write_record(step_record)
    run_result = Result(
        schema=SCHEMA,
        run_id=run.run_id,
        state="completed",
        rehearsal=run.rehearsal,
        steps=len(trace_part.files),
        unit="bytes of traces",
        train_time_s=time.monotonic() - begin_s,
    )
    files.write_json(run_dir.result, run_result)


if __name__ == "__main__":
    sys.exit(console.run_command(lambda: main(sys.argv[1:])))
