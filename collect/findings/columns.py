"""Makes the columns of the summary table, which are the same on the terminal and on the page.

Keys whose value is the same in all rows are no columns; they are listed above the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from collect.findings.row import CellRow
from collect.findings.statistics import Estimate
from collect.metric import MetricColumn, all_metrics
from shardlab.terminal import notation

_ALWAYS = ("strategy", "gpus")
_USUAL = ("workload", "gpu_type", "launcher", "global_batch_size", "precision", "seq_len", "optimizer.name", "steps", "epochs")
_SIZES = ("gpus", "global_batch_size", "batch")  # batch: the constant batch size of a line of cells
_HEADINGS = {
    "gpus": "Ranks",
    "nnodes": "Nodes",
    "gpu_type": "GPU type",
    "global_batch_size": "Batch",
    "micro_batch_size": "Micro-batch",
    "gradient_accumulation_steps": "Accumulation",
    "seq_len": "Sequence length",
    "optimizer.name": "Optimizer",
    "tp": "TP",
    "pp": "PP",
    "dp": "DP",
}


class Text(msgspec.Struct, frozen=True):
    """The text of one entry of the table."""

    value: str
    spread: str = ""
    """Half the width of the 95 % interval, if it is known."""
    unit: str = ""
    """The unit or kind of the value, only given if the rows of the column have different units or kinds."""

    def __str__(self) -> str:
        value = f"{self.value} ± {self.spread}" if self.spread else self.value
        return f"{value} {self.unit}" if self.unit else value


class Column(msgspec.Struct, frozen=True):
    """A column of a table of cells."""

    name: str
    """The name of the metric, or the key of the cell."""
    heading: str
    unit: str
    is_number: bool
    cells: list[Text]
    """The text of each row; its value is '' if the value of the row is not known."""

    @property
    def heading_with_unit(self) -> str:
        """The heading of the column with its unit, in one line."""
        return f"{self.heading} ({self.unit})" if self.unit else self.heading


class OtherTable(msgspec.Struct, frozen=True):
    """A table besides the summary table. It shows the metrics of one subject, such as memory."""

    name: str
    """Name of the table, which can be used as a file name."""
    title: str
    note: str
    columns: list[Column]
    """The first column names the rows; every other column has a value in at least one row."""
    rows: list[int]
    """Indexes of the rows in which any column has a value."""


class Table(msgspec.Struct, frozen=True):
    """The summary table and the further tables, with all values as text."""

    common: list[tuple[str, str]]
    """(heading, value) of the keys whose value is the same in all rows."""
    columns: list[Column]
    further: list[OtherTable]
    """The tables of the metrics that the summary table does not show, one table for each subject."""


def make_table(all_rows: Sequence[CellRow], shown_rows: Sequence[CellRow] | None = None) -> Table:
    """Make the tables of the rows `shown_rows`, or of the rows `all_rows` if `shown_rows` is None.

    all_rows: all rows of the summary. They determine which keys identify a row, and which values all rows share, even if only
    some rows are shown."""
    rows = all_rows if shown_rows is None else shown_rows
    cells = [row.flat for row in all_rows]
    keys = find_distinguishing_keys(cells)
    keys += [key for key in ("global_batch_size",) if key not in keys and _count_kinds(cells, [key]) > 1]  # after the ranks
    # A cell with a fault on purpose must be told from an ordinary cell even if all cells of the matrix have the fault.
    keys += ["fault"] if "fault" not in keys and any("fault" in cell for cell in cells) else []
    common = [(key_heading(key), plain_text(cells[0].get(key))) for key in _USUAL if cells and _count_kinds(cells, [key]) == 1]
    cells = [row.flat for row in rows]
    identity = [
        Column(key, key_heading(key), "", _has_only_numbers(cells, key), [Text(plain_text(cell.get(key))) for cell in cells])
        for key in keys
    ]
    state = Column("state", "State", "", False, [Text(row.state) for row in rows])
    proof = Column("same_work", "Same work", "", False, [Text(row.same_work.verdict if row.same_work else "") for row in rows])
    n = Column("n", "n", "", True, [Text(str(row.n)) for row in rows])
    proofs = _columns_with_values([proof])
    names = Column("label", "Cell", "", False, [Text(label) for label in row_labels(rows)])
    return Table(
        [(key_text, value) for key_text, value in common if value],
        [*identity, state, *proofs, n, *_metric_columns(rows, "summary")],
        [table for name, title, note in _OTHER_TABLES if (table := _other_table(rows, name, title, note, names)).rows],
    )


def _other_table(rows: Sequence[CellRow], name: str, title: str, note: str, names: Column) -> OtherTable:
    metric_columns = _metric_columns(rows, name)
    row_indexes = [index for index in range(len(rows)) if any(column.cells[index].value for column in metric_columns)]
    return OtherTable(name, title, note, [names, *metric_columns], row_indexes)


def _columns_with_values(columns: Iterable[Column]) -> list[Column]:
    """The columns that have a value in at least one row."""
    return [column for column in columns if any(cell.value for cell in column.cells)]


def row_labels(rows: Sequence[CellRow]) -> list[str]:
    """A short and unique name for each row, such as `ddp ×2, fork`: its strategy, its ranks, and its unusual values.

    A value is unusual if the rows differ in its key and most rows have another value. A fault on purpose is always named.
    """
    return cell_labels([row.flat for row in rows])


def cell_labels(cells: Sequence[dict[str, Any]]) -> list[str]:
    """The same as `row_labels`, for cells with flat keys (`optimizer.name`) in place of rows."""
    other_keys = [key for key in find_distinguishing_keys(cells) if key not in (*_ALWAYS, "fault")]
    usual_values = {key: Counter(repr(cell.get(key)) for cell in cells).most_common(1)[0][0] for key in other_keys}
    names = []
    for cell in cells:
        unusual_texts = [value_label(key, cell.get(key)) for key in other_keys if repr(cell.get(key)) != usual_values[key]]
        fault = [cell["fault"]] if "fault" in cell else []
        names.append(", ".join([f"{cell['strategy']} ×{cell['gpus']}", *unusual_texts, *fault]))
    return names


def row_variants(rows: Sequence[CellRow], ignored_key: str) -> list[str]:
    """A name for each row that tells it apart from rows with the same value of the key `ignored_key`, such as `×2, batch 16`.

    Ranks and batch sizes are in every name if the rows differ in them, because they are the sizes that a reader compares.
    Another value is in the name only if it is unusual (`row_labels`).
    """
    cells = [row.flat for row in rows]
    keys = [key for key in find_distinguishing_keys(cells) if key != ignored_key and _count_kinds(cells, [key]) > 1]
    usual_values = {key: Counter(repr(cell.get(key)) for cell in cells).most_common(1)[0][0] for key in keys}
    names = []
    for cell in cells:
        shown_keys = [key for key in keys if key in _SIZES or repr(cell.get(key)) != usual_values[key]]
        names.append(
            ", ".join(f"×{cell[key]}" if key == "gpus" else value_label(key, cell.get(key)) for key in shown_keys) or "usual"
        )
    return names


def labels_by_cell(rows: Sequence[CellRow]) -> dict[str, str]:
    """The label of each row: {id of the row's cell: label}."""
    return dict(zip((row.id for row in rows), row_labels(rows), strict=True))


def find_distinguishing_keys(cells: Sequence[dict[str, Any]]) -> list[str]:
    """The cell keys that identify the rows: strategy and ranks, then other keys if needed, the usual ones first."""
    return find_telling_keys(cells, _ALWAYS, (*_USUAL, "fault"))


def find_telling_keys(cells: Sequence[Mapping[str, Any]], always_keys: Sequence[str], usual_keys: Sequence[str]) -> list[str]:
    """Find as few keys as are needed to distinguish the cells.

    always_keys: keys that are always in the result, as its first keys. usual_keys: keys that are tried next, before all other
    keys."""
    keys: list[str] = []
    groups = [0] * len(cells)  # for each cell a number; cells with equal values of all `keys` have equal numbers
    for key in (*always_keys, *usual_keys, *sorted(set().union(*cells) - {*always_keys, *usual_keys})):
        values = [repr(cell.get(key)) for cell in cells]
        if key not in always_keys and len({*values}) < 2:
            continue  # all cells have the same value of this key, so it distinguishes no cells
        group_numbers: dict[tuple[int, str], int] = {}
        finer_groups = [group_numbers.setdefault(pair, len(group_numbers)) for pair in zip(groups, values, strict=True)]
        if key in always_keys or len(group_numbers) > len({*groups}):
            keys.append(key)
            groups = finer_groups
    return keys


def value_label(key: str, value: Any) -> str:
    """A value in words, for a label. A text is clear without its key; a number or a boolean gets the name of its key."""
    return str(value) if isinstance(value, str) else f"{key_heading(key).lower()} {plain_text(value) or 'none'}"


def _count_kinds(cells: Sequence[dict[str, Any]], keys: Sequence[str]) -> int:
    return len({repr([cell.get(key) for key in keys]) for cell in cells})


def key_heading(key: str) -> str:
    """The column heading for a key of a cell: `options.image_size` becomes `Image size`."""
    if key in _HEADINGS:
        return _HEADINGS[key]
    group, _, name = key.rpartition(".")
    words = {"instruments": f"{name} instrument", "options": name, "": name}.get(group, f"{group} {name}").replace("_", " ")
    return words[:1].upper() + words[1:]


def plain_text(value: Any) -> str:
    """A value of a cell as text; '' for None."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {plain_text(part)}" for key, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(plain_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _has_only_numbers(cells: Sequence[dict[str, Any]], key: str) -> bool:
    return all(isinstance(cell.get(key), int | float) and not isinstance(cell.get(key), bool) for cell in cells)


def _metric_columns(rows: Sequence[CellRow], table: str) -> list[Column]:
    """The columns for the metrics of one table, without columns that have no value. table: name of the table
    (`MetricColumn.table`)."""
    table_metrics = [(metric.column, metric) for metric in all_metrics() if metric.column and metric.column.table == table]
    table_metrics.sort(key=lambda pair: pair[0].place)
    return _columns_with_values(
        _metric_column(metric.name, column, [row.metrics.get(metric.name) for row in rows]) for column, metric in table_metrics
    )


def _metric_column(name: str, column: MetricColumn, estimates: Sequence[Estimate | None]) -> Column:
    known_estimates = [estimate for estimate in estimates if estimate]
    units, kinds = {estimate.unit for estimate in known_estimates}, {estimate.kind for estimate in known_estimates}
    unit, scale, digits = units.pop() if len(units) == 1 else "", 1.0, column.digits
    if unit == "bytes":
        unit, scale = notation.bytes_unit([estimate.value for estimate in known_estimates])
        digits = 3
    shows_kind = bool(column.headings) and len(kinds) > 1
    column_heading = column.heading if shows_kind else column.headings.get("".join(kinds), column.heading)
    cells = []
    for estimate in estimates:
        if estimate is None:
            cells.append(Text(""))
            continue
        half = (estimate.high - estimate.low) / 2 / scale if estimate.low is not None and estimate.high is not None else None
        spread_text = notation.format_spread(half) if half and column.has_interval else ""
        unit_or_kind = estimate.kind if shows_kind else "" if unit else estimate.unit
        cells.append(Text(notation.format_number(estimate.value / scale, digits), spread_text, unit_or_kind))
    return Column(name, column_heading, unit, True, cells)


_MEMORY_NOTE = (
    "The largest size of each category during the observed step. Categories reach it at different moments, so the sizes need "
    "not add up to the peak."
)
_SENT_NOTE = (
    "Per step: counted from the collectives that ran in the same-work proof; computed with the strategy's own formula; and as "
    "in textbooks. All timed steps: everything that the hosts' network interfaces sent in this time, other traffic included."
)
_OTHER_TABLES = (  # name, title and note of each table besides the summary
    ("times", "Times and energy", ""),
    ("memory", "Memory, by what it holds", _MEMORY_NOTE),
    ("sent", "Bytes sent by all ranks together", _SENT_NOTE),
)
