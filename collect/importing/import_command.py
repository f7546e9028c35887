"""`collect import`: turns logs of other programs into one run, which reports show beside our own."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from collect.importing import log_formats, log_rows
from collect.importing.log_formats import FORMAT_NAMES, SNAPSHOT
from collect.importing.log_rows import LogRows, StepRow
from collect.importing.log_values import LogClock, parse_zone
from collect.sources import snapshot
from shardlab.errors import InputError, UnknownName
from shardlab.files import files
from shardlab.matrix.cell import AnyCell, Instruments
from shardlab.matrix.expansion import Expansion
from shardlab.record_types import PLAIN_WORD_PATTERN
from shardlab.runs import run as run_file
from shardlab.runs.record import SCHEMA, LineWriter, Result, SameWork, Sample, StepRecord
from shardlab.runs.run import ImportedFile, Run, World
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import IMPORTED
from shardlab.terminal import notation
from shardlab.terminal.console import Output
from shardlab.terminal.table import Column, Table
from shardlab.workspace.workspace import Workspace

MATRIX = "imported"  # the matrix of imported runs, if --into names no other
MOST_RANKS = 1 << 20


class ImportOptions(NamedTuple):
    """The options of `collect import`, as they are typed."""

    format: str | None
    into: str
    name: str | None
    strategy: str
    gpus: int | None
    host: str
    zone: str
    start: str | None
    every_s: float
    columns: str | None


class ImportedLog(NamedTuple):
    """A log and what was found in it."""

    file: ImportedFile
    rows: LogRows
    snapshot_json: bytes | None
    """The snapshot of the CUDA allocator, as JSON; None if the log is none."""


def import_logs(workspace: Workspace, paths: Sequence[str], options: ImportOptions, output: Output) -> int:
    """Make a run of these logs, print what was found, and return exit code 0. Raises InputError if nothing can be imported.

    paths: the files, all of one run.
    """
    _check_options(options)
    logs = [_read_log(Path(path), options) for path in paths]
    samples = sorted((sample for log in logs for sample in log.rows.samples.values()), key=lambda sample: sample.wall_s)
    step_rows = [row for log in logs for row in log.rows.steps]
    gpu_count = options.gpus or _count_gpus(samples, step_rows)
    if gpu_count is None:
        raise InputError(
            "--gpus: the logs do not show on how many GPUs the program ran. Allowed: --gpus N, as a label of the run."
        )
    workload_name = options.name or re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(paths[0]).stem).strip("-._")[:40] or "log"
    snapshots = [log.snapshot_json for log in logs if log.snapshot_json is not None]
    steps_by_rank, data_unit = log_rows.build_steps(step_rows, gpu_count)
    cell = _make_imported_cell(workload_name, options.strategy, gpu_count, has_snapshot=bool(snapshots))
    imported_files = [log.file for log in logs]
    with workspace.hold_runs_lock():
        run_dir = _write_run(workspace, options.into, cell, imported_files, steps_by_rank, data_unit, samples, snapshots)
    remarks = _list_remarks(logs, options, gpu_count, steps_by_rank)
    _show_log_table(output, logs)
    for remark in remarks:
        output.print_remark(remark, style="yellow")
    output.print_line(f"run: {run_dir.path}")
    output.print_remark(
        f"`collect summarize --matrix {options.into}` shows it; strategy {options.strategy} and {gpu_count} GPUs are labels."
    )
    output.print_document(
        {"run": run_dir.run_id, "matrix": options.into, "files": imported_files, "remarks": remarks,
         "steps": {str(rank): len(records) for rank, records in steps_by_rank.items()}, "samples": len(samples)}
    )  # fmt: skip
    return 0


def _check_options(options: ImportOptions) -> None:
    """Raises InputError if the value of an option is not allowed."""
    if options.format is not None and options.format not in FORMAT_NAMES:
        raise UnknownName("format", options.format, FORMAT_NAMES, place="--as")
    if options.gpus is not None and not 1 <= options.gpus <= MOST_RANKS:
        raise InputError(f"--gpus: found {options.gpus}. Allowed: 1 to {MOST_RANKS}.")
    if not 0 < options.every_s <= 1e6:
        raise InputError(f"--every: found {options.every_s:g}. Allowed: more than 0, at most 1,000,000 seconds.")
    for option_name, label_text in (("--name", options.name), ("--strategy", options.strategy), ("--host", options.host)):
        if label_text is not None and not re.search(PLAIN_WORD_PATTERN, label_text):
            raise InputError(
                f"{option_name}: found {label_text[:64]!r}. Allowed: up to 63 letters, digits and the signs _ . -, "
                "beginning with a letter or digit."
            )
    if not run_file.RUN_ID.fullmatch(options.into):
        raise InputError(f"--into: found {options.into[:64]!r}. Allowed: text that matches {run_file.RUN_ID.pattern}.")


def _make_clock(options: ImportOptions) -> LogClock:
    time_zone = parse_zone(options.zone)
    start_s = LogClock(time_zone, None, options.every_s).read_time(options.start) if options.start is not None else None
    if options.start is not None and start_s is None:
        raise InputError(f"--start: {options.start[:64]!r} is no time. Allowed: a time such as 2031-06-01T10:00:00+02:00.")
    return LogClock(time_zone, start_s, options.every_s)


def _read_log(path: Path, options: ImportOptions) -> ImportedLog:
    """Read one log. Raises InputError if its format is not known, or if nothing in it can be used."""
    rows = LogRows(_make_clock(options), options.host)
    log_content, rows.unread_count = log_formats.read_log_text(path, options.columns.split(",") if options.columns else None)
    format_name = options.format or log_formats.recognize_format(log_content)
    if format_name is None:
        raise InputError(
            f"{path}: its format is not known. Allowed: {', '.join(FORMAT_NAMES)}; --as names one of them, and "
            "--columns the columns of a CSV file without a heading."
        )
    snapshot_json = None
    if format_name == SNAPSHOT:
        snapshot_json = msgspec.json.encode(snapshot.read_snapshot_document(path))
    else:
        log_formats.read_log(log_content, format_name, rows)
        if not rows.samples and not rows.steps:
            time_hint = "its lines have no times or no dates: --start TIME (and --every SECONDS) states them, or "
            format_title = log_formats.FORMATS[format_name].title
            raise InputError(
                f"{path}: nothing was found in it as {format_title}; {rows.unread_count:,} lines could not be read. "
                f"Allowed: {time_hint if rows.lacks_times else ''}another format (--as)."
            )
    digest = hashlib.sha256(log_content.content).hexdigest()
    return ImportedLog(
        ImportedFile(name=path.name, format=format_name, sha256=digest, unread_lines=rows.unread_count), rows, snapshot_json
    )


def _count_gpus(samples: Sequence[Sample], step_rows: Sequence[StepRow]) -> int | None:
    """The number of GPUs in the telemetry, or of ranks in the steps; None if neither shows it."""
    sampled_gpus = {(sample.host, gpu.uuid) for sample in samples for gpu in sample.gpus or ()}
    ranks = {row.rank for row in step_rows if row.rank is not None}
    return len(sampled_gpus) or (len(ranks) if len(ranks) > 1 else None)


def _make_imported_cell(workload_name: str, strategy: str, gpu_count: int, *, has_snapshot: bool) -> AnyCell:
    """The cell of an imported run."""
    return AnyCell(
        workload=workload_name, strategy=strategy, gpus=gpu_count, prove="off",
        imported=f"{workload_name}, {strategy}, {gpu_count} GPUs",
        instruments=Instruments(memory="snapshot" if has_snapshot else "peak"),
    )  # fmt: skip


def _write_run(
    workspace: Workspace, matrix_name: str, cell: AnyCell, imported_files: list[ImportedFile],
    steps_by_rank: dict[int, list[StepRecord]], data_unit: str, samples: Sequence[Sample], snapshots: Sequence[bytes],
) -> RunDir:  # fmt: skip
    """Write the folder of the run, which appears complete or not at all, and the matrix if it is new. Returns the folder.

    A run with the same labels is another repeat of the same cell."""
    present_ids = set(workspace.list_run_ids())
    repeat = next(number for number in range(1, len(present_ids) + 2) if run_file.make_run_id(cell, number) not in present_ids)
    run_id = run_file.make_run_id(cell, repeat)
    source_text = "imported from " + ", ".join(f"{file.name} ({file.format})" for file in imported_files)
    new_run_dir = RunDir(workspace.runs / f".{run_id}.new")
    shutil.rmtree(new_run_dir.path, ignore_errors=True)
    try:
        with files.as_workspace_error("write"):
            for rank, rank_records in steps_by_rank.items():
                _write_records(new_run_dir.steps_file(rank), rank_records)
            for host in {sample.host for sample in samples}:
                _write_records(new_run_dir.samples_file(host), [sample for sample in samples if sample.host == host])
            for rank, snapshot_json in enumerate(snapshots):
                files.make_folder(new_run_dir.snapshot_file(rank).parent)
                files.write_new(new_run_dir.snapshot_file(rank), gzip.compress(snapshot_json, mtime=0))
            files.make_folder(new_run_dir.path)
            files.write_json(new_run_dir.run_json, _make_imported_run(run_id, matrix_name, cell, repeat, imported_files))
            gpu_names = sorted({gpu.uuid for sample in samples for gpu in sample.gpus or ()})
            result = Result(
                schema=SCHEMA, run_id=run_id, state=IMPORTED, rehearsal=False, unit=data_unit,
                steps=max(map(len, steps_by_rank.values()), default=0), gpus=gpu_names or None,
                same_work=SameWork(verdict="not proven", why=source_text),
            )  # fmt: skip
            files.write_json(new_run_dir.result, result)
            new_run_dir.write_event("import", IMPORTED, why=source_text)
            os.rename(new_run_dir.path, workspace.runs / run_id)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(new_run_dir.path)
    if matrix_name not in workspace.list_matrix_names():
        matrix_title = "Runs from logs of other programs"
        workspace.store_expansion(
            Expansion(schema=1, name=matrix_name, title=matrix_title, path="", cells=[], excluded=[], baseline=cell.strategy)
        )
    return RunDir(workspace.runs / run_id)


def _write_records(path: Path, records: Sequence[StepRecord | Sample]) -> None:
    with LineWriter(path) as record_writer:
        for record in records:
            record_writer.write_record(record)


def _make_imported_run(run_id: str, matrix_name: str, cell: AnyCell, repeat: int, imported_files: list[ImportedFile]) -> Run:
    return Run(
        schema=1, run_id=run_id, matrix=matrix_name, cell=cell, cell_hash=cell.hash(), repeat=repeat, attempt=1,
        launcher=cell.launcher, rehearsal=False, world=World(nnodes=1, nproc_per_node=cell.gpus, world_size=cell.gpus),
        cluster={"name": "unknown", "provider": "unknown"}, data_path="", versions={}, git_commit=None, templates={},
        created=datetime.now(UTC).isoformat(timespec="seconds"), imported=imported_files,
    )  # fmt: skip


def _list_remarks(
    logs: Sequence[ImportedLog], options: ImportOptions, gpu_count: int, steps_by_rank: dict[int, list[StepRecord]]
) -> list[str]:
    """What a reader must know to judge the imported numbers, as sentences."""
    remarks = [f"{log.file.name}: {remark}" for log in logs for remark in log.rows.remarks]
    remarks += [f"{log.file.name}: {log.file.unread_lines:,} lines could not be read." for log in logs if log.file.unread_lines]
    remarks += [f"{log.file.name}: values without a known time were left out." for log in logs if log.rows.lacks_times]
    zoneless_names = [log.file.name for log in logs if log.rows.clock.needs_zone]
    if zoneless_names:
        remarks.append(f"times in {', '.join(zoneless_names)} name no zone and were read as {options.zone} (--zone).")
    if options.gpus is None:
        remarks.append(f"{gpu_count} GPUs were counted in the logs; --gpus states another number.")
    # The first step of a rank often has no time, because a time follows from the line before.
    if untimed_count := sum(record.watched for rank_records in steps_by_rank.values() for record in rank_records[1:]):
        remarks.append(f"{untimed_count:,} steps have no time or no data, and count only with their loss.")
    names_and_spans = [(log.file.name, time_span) for log in logs if (time_span := _find_time_span(log.rows)) is not None]
    for (log_name, time_span), (other_log_name, other_time_span) in itertools.combinations(names_and_spans, 2):
        if time_span[1] < other_time_span[0] or other_time_span[1] < time_span[0]:
            remarks.append(
                f"{log_name} and {other_log_name} do not overlap in time ({notation.format_time(time_span[0])} and "
                f"{notation.format_time(other_time_span[0])}), so the telemetry is not that of the steps; check "
                "--zone and --start."
            )
    return remarks


def _find_time_span(rows: LogRows) -> tuple[float, float] | None:
    """The first and the last time in a log; None if it has none."""
    times_s = [wall_s for _, wall_s in rows.samples] + [row.wall_s for row in rows.steps if row.wall_s is not None]
    return (min(times_s), max(times_s)) if times_s else None


def _show_log_table(output: Output, imported_logs: Sequence[ImportedLog]) -> None:
    def format_span(imported_log: ImportedLog) -> str:
        if (time_span := _find_time_span(imported_log.rows)) is None:
            return ""
        first_s, last_s = time_span
        return f"{notation.format_time(first_s)}, {last_s - first_s:,.0f} s"

    columns: list[Column[ImportedLog]] = [
        Column("File", lambda imported_log: imported_log.file.name),
        Column("Format", lambda imported_log: imported_log.file.format),
        Column("Samples", lambda imported_log: len(imported_log.rows.samples) or None),
        Column("Steps", lambda imported_log: len(imported_log.rows.steps) or None),
        Column("Time", format_span),
        Column("Lines not read", lambda imported_log: imported_log.file.unread_lines or None),
    ]
    output.show_table(Table("Imported", columns, list(imported_logs), "imported"))
