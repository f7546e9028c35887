"""Reads the measurements that others published: data/*.yaml, one file for each program, with machines.yaml and models.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

FOLDER = Path(__file__).parent
RESULTS = ("tokens_per_s_gpu", "items_per_s_gpu", "step_s", "memory_gib")


class PublishedMachine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of machines.yaml. The comment of that file explains the fields."""

    gpu: str
    per_node: int
    source: str
    memory_gib: float | None = None
    between_nodes: str | None = None
    cards_per_node: int | None = None
    link: str | None = None


class PublishedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of a program: a shipped workload with its options, or an entry of models.yaml."""

    workload: str | None = None
    options: dict[str, Any] = {}
    configuration: str | None = None


class PublishedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of data/*.yaml."""

    name: str
    source: str
    """The repository with its commit and file, or the paper with its table."""
    machine: str
    columns: list[str]
    """The names of the values of a row: `model`, keys of a cell, and those of RESULTS. A row may have one value more: a mapping
    with further fields of PublishedRow."""
    rows: list[list[Any]]
    model: str | None = None
    cell: dict[str, Any] = {}
    """The keys of the cell that all rows share."""
    differs: list[str] = []
    """In what the planned cells differ from the published runs."""
    note: str = ""
    memory_is: Literal["allocated", "reserved"] = "allocated"
    memory_comparable: bool = True
    """false: the strategy of the planned cell needs another amount of memory than the published run."""
    new: bool = False
    """true: the table was added after the planner was held against the others for the first time."""


class PublishedProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of data/: what one program published."""

    program: str
    """The repository, or the paper."""
    models: dict[str, PublishedModel]
    tables: list[PublishedTable]
    not_planned: dict[str, int] = {}
    """Published configurations that no cell can express: their number, by what is missing."""


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published configuration and what was measured."""

    program: str
    table: PublishedTable
    machine: str
    name: str
    model: PublishedModel
    cell: dict[str, Any]
    tokens_per_s_gpu: float | None = None
    items_per_s_gpu: float | None = None
    step_s: float | None = None
    memory_gib: float | None = None
    options: dict[str, Any] = {}
    """Options of the strategy or the workload, beside those of the model."""
    ran: bool = True
    """false: the run was out of memory."""
    memory_comparable: bool = True
    differs: list[str] = []
    note: str = ""
    used_in: str | None = None
    """The file of the planner that has a constant from this row. Such rows are in no statistic."""

    @property
    def measured_step_s(self) -> float | None:
        """The measured time of an optimizer step in seconds; None if only the memory was published."""
        if self.step_s is not None:
            return self.step_s
        items = self.cell["global_batch_size"] / self.cell["gpus"]
        if self.tokens_per_s_gpu is not None:
            return float(items * self.cell["seq_len"] / self.tokens_per_s_gpu)
        return None if self.items_per_s_gpu is None else float(items / self.items_per_s_gpu)

    @property
    def job(self) -> str:
        """What two rows have in common if they do the same work on the same machine."""
        work = {key: self.cell.get(key) for key in ("gpus", "seq_len", "global_batch_size", "precision", "compile")}
        return msgspec.json.encode([self.program, self.machine, self.model, work], order="deterministic").decode()


def read_machines() -> dict[str, PublishedMachine]:
    """The machines, by name."""
    return msgspec.yaml.decode((FOLDER / "machines.yaml").read_bytes(), type=dict[str, PublishedMachine])


def read_configurations() -> dict[str, dict[str, Any]]:
    """The models by configuration: what transformers reads, by name."""
    return msgspec.yaml.decode((FOLDER / "models.yaml").read_bytes(), type=dict[str, dict[str, Any]])


def read_programs() -> list[PublishedProgram]:
    """The content of data/*.yaml, in the order of the names of the files."""
    return [msgspec.yaml.decode(file.read_bytes(), type=PublishedProgram) for file in sorted((FOLDER / "data").glob("*.yaml"))]


def read_rows() -> list[PublishedRow]:
    """All rows of all programs. Raises ValueError if a row has another number of values than its table has columns."""
    return [
        _read_row(program, table, number, values)
        for program in read_programs()
        for table in program.tables
        for number, values in enumerate(table.rows, 1)
    ]


def _read_row(program: PublishedProgram, table: PublishedTable, number: int, values: list[Any]) -> PublishedRow:
    extra = values[len(table.columns)] if len(values) > len(table.columns) else {}
    if len(values) not in (len(table.columns), len(table.columns) + 1) or not isinstance(extra, dict):
        raise ValueError(f"{table.name}, row {number}: {len(values)} values for {len(table.columns)} columns.")
    by_column = {key: value for key, value in zip(table.columns, values, strict=False) if value is not None}
    model = by_column.pop("model", table.model)
    results = {key: by_column.pop(key) for key in RESULTS if key in by_column}
    fields = {"memory_comparable": table.memory_comparable, "note": table.note, "machine": table.machine, **results, **extra}
    fields["differs"] = [*table.differs, *extra.get("differs", [])]
    shown = " ".join(str(value) for key, value in by_column.items() if key in ("strategy", "tp", "pp", "gpus", "seq_len"))
    return PublishedRow(
        program=program.program,
        table=table,
        name=f"{table.name} {number}: {model} {shown}".rstrip(),
        model=program.models[model or ""],
        cell={**table.cell, **by_column},
        **fields,
    )
