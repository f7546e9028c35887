"""Makes flat tables (polars frames) of the summary, the step records and the host samples, and writes them as CSV or
Parquet."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from collect.loading.loaded_run import LoadedRun
from collect.metric import load_metrics
from collect.reading.load import LoadedMatrix
from collect.summary import Summary
from shardlab.files import files
from shardlab.terminal import printable

CELL_KEYS = (
    "strategy", "workload", "launcher", "gpus", "nnodes", "global_batch_size", "micro_batch_size",
    "gradient_accumulation_steps", "seq_len", "precision", "steps", "epochs", "warmup_steps", "seed",
)  # fmt: skip


def make_frames(loaded: LoadedMatrix, summary: Summary) -> dict[str, pl.DataFrame]:
    """All flat tables: {name of a table: the table}. The names are `summary`, `steps` and `samples`."""
    return {"summary": make_summary_frame(summary), "steps": make_steps_frame(loaded), "samples": make_samples_frame(loaded)}


def write_csv(table: pl.DataFrame, path: Path) -> None:
    """Write a table as a new CSV file. Raises WorkspaceError if the file cannot be written.

    A spreadsheet takes a text that begins with = + - or @ for a formula and computes it. So an apostrophe is written before
    each text that begins with one of these characters. No name that shardlab itself makes begins with one of them. Columns of
    numbers are not changed.
    """
    is_formula = pl.col(pl.String).str.contains(r"^\s*[=+\-@]")
    guarded_text = pl.when(is_formula).then(pl.lit("'") + pl.col(pl.String)).otherwise(pl.col(pl.String))
    _write_file(clean_table_texts(table).with_columns(guarded_text.name.keep()).write_csv, path)


def write_parquet(table: pl.DataFrame, path: Path) -> None:
    """Write a table as a new Parquet file. Raises WorkspaceError if the file cannot be written."""
    _write_file(clean_table_texts(table).write_parquet, path)


def _write_file(write_to: Callable[[io.BytesIO], Any], path: Path) -> None:
    """Write a new file at `path`. write_to: a write function of polars, which writes the bytes of the file into memory first.

    If polars wrote into the file itself and the disk were full, its error would not name the reason."""
    byte_buffer = io.BytesIO()
    write_to(byte_buffer)
    files.write_new(path, byte_buffer.getbuffer())


def clean_table_texts(table: pl.DataFrame) -> pl.DataFrame:
    """The table with every text converted by `printable.clean_to_one_line`. Equal texts of a column are converted only once."""
    for column_name, column_type in table.schema.items():
        if column_type == pl.String:
            texts = table[column_name].unique().drop_nulls().to_list()
            replacements = {text: clean_text for text in texts if (clean_text := printable.clean_to_one_line(text)) != text}
            if replacements:
                table = table.with_columns(pl.col(column_name).replace(replacements))
    return table


def make_summary_frame(summary: Summary) -> pl.DataFrame:
    """A table with one row per cell. Every metric has five columns: its value, both ends of its 95 % interval, unit and kind.

    If no cell has a value of a metric, the columns of the metric are there but empty, so that every summary has the same
    columns.
    """
    text, number = pl.String, pl.Float64
    schema: dict[str, Any] = {"matrix": text, "cell": text, "state": text, "n": pl.Int64} | _make_key_schema()
    for metric in load_metrics():
        name = metric.name
        schema |= {name: number, f"{name}_low": number, f"{name}_high": number, f"{name}_unit": text, f"{name}_kind": text}
    schema["rehearsal"] = pl.Boolean
    rows = []
    for row in summary.rows:
        row_fields: dict[str, Any] = {"matrix": summary.matrix, "cell": row.id, "state": row.state, "n": row.n}
        row_fields |= {key: row.cell[key] for key in CELL_KEYS} | {"fault": row.flat_cell.get("fault")}
        for name, estimate in row.metrics.items():
            row_fields |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
            row_fields |= {f"{name}_unit": estimate.unit, f"{name}_kind": estimate.kind}
        rows.append(row_fields | {"rehearsal": summary.rehearsal})
    # Most of the hundreds of columns have no value. For speed, such a column is not looked up row by row.
    keys = {key for row in rows for key in row}
    return pl.DataFrame({key: [row.get(key) for row in rows] if key in keys else [None] * len(rows) for key in schema}, schema)


def make_runs_frame(summary: Summary) -> pl.DataFrame:
    """A table with one row per repeat of each cell, which is the latest attempt of the repeat. Every metric of a run has a
    column, in the unit that the summary frame names."""
    text, count = pl.String, pl.Int64
    schema: dict[str, Any] = {"matrix": text, "cell": text, "run": text, "repeat": count, "attempt": count, "state": text}
    schema |= {"why": text} | _make_key_schema() | {metric.name: pl.Float64 for metric in load_metrics() if metric.of_run}
    table_rows = [
        {"matrix": summary.matrix, "cell": row.id, "run": run.run_id, "repeat": run.repeat, "attempt": run.attempt}
        | {"state": run.state, "why": run.why, "fault": row.flat_cell.get("fault"), **run.metrics}
        | {key: row.cell[key] for key in CELL_KEYS}
        for row in summary.rows
        for run in row.runs
    ]
    return pl.DataFrame([[row.get(key) for key in schema] for row in table_rows], schema, orient="row")


def _make_key_schema() -> dict[str, Any]:
    """The columns of the keys of a cell, with their types."""
    number_keys = {"gpus", "nnodes", "seq_len", "steps", "epochs", "warmup_steps", "seed"}
    type_by_key = {key: pl.Int64 if key in number_keys or key.endswith(("_size", "_steps")) else pl.String for key in CELL_KEYS}
    return {**type_by_key, "fault": pl.String}  # of a fault on purpose, in words


def make_steps_frame(loaded: LoadedMatrix) -> pl.DataFrame:
    """A table with one row per step record of all runs, including earlier attempts. The first columns are the cell, the run
    id and whether the run is a rehearsal.

    Records of warm-up steps are included; the column `warmup` marks them.
    """
    return _concatenate_runs(loaded, lambda run: run.steps)


def make_samples_frame(loaded: LoadedMatrix) -> pl.DataFrame:
    """A table with one row per host sample of all runs, including earlier attempts. The first columns are as in
    `steps`."""
    return _concatenate_runs(loaded, lambda run: run.samples.hosts)


def _concatenate_runs(loaded: LoadedMatrix, get_frame: Callable[[LoadedRun], pl.DataFrame]) -> pl.DataFrame:
    id_schema = {"cell": pl.String, "run": pl.String, "rehearsal": pl.Boolean}
    cell_runs = [(cell.id, run) for cell in loaded.cells for run in (*cell.runs, *cell.earlier_attempts)]
    run_by_ids = {(cell_id, run.run_id, run.is_rehearsal): run for cell_id, run in cell_runs}
    if not run_by_ids:
        return pl.DataFrame(schema=id_schema)
    frames = [get_frame(run) for run in run_by_ids.values()]
    id_rows = pl.DataFrame(list(run_by_ids), schema=id_schema, orient="row")
    run_indexes = np.repeat(np.arange(len(frames)), [run_frame.height for run_frame in frames])
    return pl.concat([id_rows[run_indexes], pl.concat(frames, rechunk=True)], how="horizontal")
