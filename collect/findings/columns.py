"""Makes the columns of the summary table, which are the same on the terminal and on the page.

Keys whose value is the same in all rows are no columns; they are listed above the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from collect import notation
from collect.findings.row import CellRow
from collect.findings.statistics import Estimate
from collect.metric import MetricColumn, menu

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
    spread: str = ""  # half the width of the 95 % interval, if it is known
    unit: str = ""  # the unit or kind of the value, only given if the rows of the column have different units or kinds

    def __str__(self) -> str:
        value = f"{self.value} ± {self.spread}" if self.spread else self.value
        return f"{value} {self.unit}" if self.unit else value


class Column(msgspec.Struct, frozen=True):
    """A column of a table of cells."""

    name: str  # the name of the metric, or the key of the cell
    heading: str
    unit: str
    is_number: bool
    cells: list[Text]  # the text of each row; its value is '' if the value of the row is not known

    @property
    def headed(self) -> str:
        """The heading of the column with its unit, in one line."""
        return f"{self.heading} ({self.unit})" if self.unit else self.heading


class Further(msgspec.Struct, frozen=True):
    """A table besides the summary table. It shows the metrics of one subject, such as memory."""

    name: str  # name of the table, which can be used as a file name
    title: str
    note: str
    columns: list[Column]  # the first column names the rows; every other column has a value in at least one row
    rows: list[int]  # indexes of the rows in which any column has a value


class Table(msgspec.Struct, frozen=True):
    """The summary table and the further tables, with all values as text."""

    common: list[tuple[str, str]]  # (heading, value) of the keys whose value is the same in all rows
    columns: list[Column]
    further: list[Further]  # the tables of the metrics that the summary table does not show, one table for each subject


def table(every: Sequence[CellRow], shown: Sequence[CellRow] | None = None) -> Table:
    """Make the tables of the rows `shown`, or of the rows `every` if `shown` is None.

    every: all rows of the summary. They determine which keys identify a row, and which values all rows share, even if only some
    rows are shown.
    """
    rows = every if shown is None else shown
    cells = [row.flat for row in every]
    keys = distinguishing(cells)
    keys += [key for key in ("global_batch_size",) if key not in keys and _kinds(cells, [key]) > 1]  # column after the ranks
    # A cell with a fault on purpose must be told from an ordinary cell even if all cells of the matrix have the fault.
    keys += ["fault"] if "fault" not in keys and any("fault" in cell for cell in cells) else []
    common = [(heading(key), plain(cells[0].get(key))) for key in _USUAL if cells and _kinds(cells, [key]) == 1]
    cells = [row.flat for row in rows]
    identity = [
        Column(key, heading(key), "", _is_count(cells, key), [Text(plain(cell.get(key))) for cell in cells]) for key in keys
    ]
    state = Column("state", "State", "", False, [Text(row.state) for row in rows])
    proof = Column("same_work", "Same work", "", False, [Text(row.same_work.verdict if row.same_work else "") for row in rows])
    n = Column("n", "n", "", True, [Text(str(row.n)) for row in rows])
    proofs = _known([proof])
    names = Column("label", "Cell", "", False, [Text(label) for label in labels(rows)])
    return Table(
        [(what, value) for what, value in common if value],
        [*identity, state, *proofs, n, *_measured(rows, "summary")],
        [table for name, title, note in _FURTHER if (table := _further(rows, name, title, note, names)).rows],
    )


def _further(rows: Sequence[CellRow], name: str, title: str, note: str, names: Column) -> Further:
    known = _measured(rows, name)
    saying = [place for place in range(len(rows)) if any(column.cells[place].value for column in known)]
    return Further(name, title, note, [names, *known], saying)


def _known(columns: Iterable[Column]) -> list[Column]:
    """The columns that have a value in at least one row."""
    return [column for column in columns if any(cell.value for cell in column.cells)]


def labels(rows: Sequence[CellRow]) -> list[str]:
    """A short and unique name for each row, such as `ddp ×2, fork`: its strategy, its ranks, and its unusual values.

    A value is unusual if the rows differ in its key and most rows have another value. A fault on purpose is always named.
    """
    return labels_of([row.flat for row in rows])


def labels_of(cells: Sequence[dict[str, Any]]) -> list[str]:
    """The same as `labels`, for cells with flat keys (`optimizer.name`) in place of rows."""
    others = [key for key in distinguishing(cells) if key not in (*_ALWAYS, "fault")]
    usual = {key: Counter(repr(cell.get(key)) for cell in cells).most_common(1)[0][0] for key in others}
    names = []
    for cell in cells:
        unusual = [named(key, cell.get(key)) for key in others if repr(cell.get(key)) != usual[key]]
        fault = [cell["fault"]] if "fault" in cell else []
        names.append(", ".join([f"{cell['strategy']} ×{cell['gpus']}", *unusual, *fault]))
    return names


def variants(rows: Sequence[CellRow], but: str) -> list[str]:
    """A name for each row that tells it apart from rows with the same value of the key `but`, such as `×2, batch 16`.

    Ranks and batch sizes are in every name if the rows differ in them, because they are the sizes that a reader compares.
    Another value is in the name only if it is unusual (`labels`).
    """
    cells = [row.flat for row in rows]
    keys = [key for key in distinguishing(cells) if key != but and _kinds(cells, [key]) > 1]
    usual = {key: Counter(repr(cell.get(key)) for cell in cells).most_common(1)[0][0] for key in keys}
    names = []
    for cell in cells:
        told = [key for key in keys if key in _SIZES or repr(cell.get(key)) != usual[key]]
        names.append(", ".join(f"×{cell[key]}" if key == "gpus" else named(key, cell.get(key)) for key in told) or "usual")
    return names


def label_of(rows: Sequence[CellRow]) -> dict[str, str]:
    """The label of each row: {id of the row's cell: label}."""
    return dict(zip((row.id for row in rows), labels(rows), strict=True))


def distinguishing(cells: Sequence[dict[str, Any]]) -> list[str]:
    """The cell keys that identify the rows: strategy and ranks, then other keys if needed, the usual ones first."""
    return telling(cells, _ALWAYS, (*_USUAL, "fault"))


def telling(cells: Sequence[Mapping[str, Any]], always: Sequence[str], usual: Sequence[str]) -> list[str]:
    """Find as few keys as are needed to distinguish the cells.

    always: keys that are always in the result, as its first keys. usual: keys that are tried next, before all other keys.
    """
    keys: list[str] = []
    kinds = [0] * len(cells)  # for each cell a number; cells with equal values of all `keys` have equal numbers
    for key in (*always, *usual, *sorted(set().union(*cells) - {*always, *usual})):
        values = [repr(cell.get(key)) for cell in cells]
        if key not in always and len({*values}) < 2:
            continue  # all cells have the same value of this key, so it distinguishes no cells
        seen: dict[tuple[int, str], int] = {}
        finer = [seen.setdefault(pair, len(seen)) for pair in zip(kinds, values, strict=True)]
        if key in always or len(seen) > len({*kinds}):
            keys.append(key)
            kinds = finer
    return keys


def named(key: str, value: Any) -> str:
    """A value in words, for a label. A text is clear without its key; a number or a boolean gets the name of its key."""
    return str(value) if isinstance(value, str) else f"{heading(key).lower()} {plain(value) or 'none'}"


def _kinds(cells: Sequence[dict[str, Any]], keys: Sequence[str]) -> int:
    return len({repr([cell.get(key) for key in keys]) for cell in cells})


def heading(key: str) -> str:
    """The column heading for a key of a cell: `options.image_size` becomes `Image size`."""
    if key in _HEADINGS:
        return _HEADINGS[key]
    group, _, name = key.rpartition(".")
    words = {"instruments": f"{name} instrument", "options": name, "": name}.get(group, f"{group} {name}").replace("_", " ")
    return words[:1].upper() + words[1:]


def plain(value: Any) -> str:
    """A value of a cell as text; '' for None."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {plain(part)}" for key, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_count(cells: Sequence[dict[str, Any]], key: str) -> bool:
    return all(isinstance(cell.get(key), int | float) and not isinstance(cell.get(key), bool) for cell in cells)


def _measured(rows: Sequence[CellRow], table: str) -> list[Column]:
    """The columns for the metrics of one table, without columns that have no value. table: name of the table
    (`MetricColumn.table`)."""
    shown = [(metric.column, metric) for metric in menu() if metric.column and metric.column.table == table]
    shown.sort(key=lambda pair: pair[0].place)
    return _known(_of_metric(metric.name, column, [row.metrics.get(metric.name) for row in rows]) for column, metric in shown)


def _of_metric(name: str, column: MetricColumn, estimates: Sequence[Estimate | None]) -> Column:
    known = [estimate for estimate in estimates if estimate]
    units, kinds = {estimate.unit for estimate in known}, {estimate.kind for estimate in known}
    unit, scale, digits = units.pop() if len(units) == 1 else "", 1.0, column.digits
    if unit == "bytes":
        unit, scale = notation.bytes_unit([estimate.value for estimate in known])
        digits = 3
    shows_kind = bool(column.headings) and len(kinds) > 1
    heading = column.heading if shows_kind else column.headings.get("".join(kinds), column.heading)
    cells = []
    for estimate in estimates:
        if estimate is None:
            cells.append(Text(""))
            continue
        half = (estimate.high - estimate.low) / 2 / scale if estimate.low is not None and estimate.high is not None else None
        spread = notation.spread(half) if half and column.has_interval else ""
        beside = estimate.kind if shows_kind else "" if unit else estimate.unit
        cells.append(Text(notation.number(estimate.value / scale, digits), spread, beside))
    return Column(name, heading, unit, True, cells)


_OF_MEMORY = (
    "The largest size of each category during the observed step. Categories reach it at different moments, so the sizes need "
    "not add up to the peak."
)
_OF_SENT = (
    "Per step: counted from the collectives that ran in the same-work proof; computed with the strategy's own formula; and as "
    "in textbooks. All timed steps: everything that the hosts' network interfaces sent in this time, other traffic included."
)
_FURTHER = (  # name, title and note of each table besides the summary
    ("times", "Times and energy", ""),
    ("memory", "Memory, by what it holds", _OF_MEMORY),
    ("sent", "Bytes sent by all ranks together", _OF_SENT),
)
