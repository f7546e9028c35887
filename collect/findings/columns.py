"""Makes the columns of the summary table, which are the same on the terminal and on the page.

Keys whose value is the same in all rows are no columns; they are listed above the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from collect.findings.row import CellRow
from collect.findings.statistics import Estimate
from collect.metric import MetricColumn, is_workspace_metric, load_metrics
from shardlab.terminal import notation
from shardlab.terminal.table import CellText, Column, Table

_ALWAYS_SHOWN_KEYS = ("strategy", "gpus")
_USUAL_KEYS = (
    "workload",
    "gpu_type",
    "environment",
    "launcher",
    "global_batch_size",
    "precision",
    "seq_len",
    "optimizer.name",
    "steps",
    "epochs",
)
# Of the columns that a narrow terminal leaves out, these metrics leave last, and before them the columns that most often say
# the same in all rows.
_LONGEST_SHOWN_METRICS = ("throughput_per_s", "peak_memory_bytes", "step_time_ms", "speedup")
_USUAL_PRIORITY = len(_LONGEST_SHOWN_METRICS)
_WORKSPACE_METRIC_PRIORITY = 1  # of metrics that the workspace defines: who wrote one wants to see it
_USER_KEYS = ("set.", "env.")  # the beginnings of keys that a user names
_SIZE_KEYS = ("gpus", "global_batch_size", "batch")  # batch: the constant batch size of a line of cells
# The states of runs that are shown in colour, the most serious first: a row has the style of its first state.
STYLE_BY_STATE = {"failed": "red", "unknown": "red", "node_fail": "red", "hung": "red", "oom": "yellow", "timeout": "yellow"}
_HEADING_BY_KEY = {
    "gpus": "Ranks",
    "nnodes": "Nodes",
    "gpu_type": "GPU type",
    "environment": "Environment",
    "global_batch_size": "Batch",
    "micro_batch_size": "Micro-batch",
    "gradient_accumulation_steps": "Accumulation",
    "seq_len": "Sequence length",
    "optimizer.name": "Optimizer",
    "tp": "TP",
    "pp": "PP",
    "dp": "DP",
}


class CellTables(msgspec.Struct, frozen=True):
    """The summary table and the further tables of cells."""

    common_values: list[tuple[str, str]]
    """(heading, value) of the keys whose value is the same in all rows."""
    summary_table: Table[CellRow]
    """The summary table."""
    further_tables: list[Table[CellRow]]
    """The tables of the metrics that the summary table does not show, one table for each subject, such as memory. The first
    column names the rows; every other column and every row has a value."""


def make_cell_tables(all_rows: Sequence[CellRow], shown_rows: Sequence[CellRow] | None = None) -> CellTables:
    """Make the tables of the rows `shown_rows`, or of the rows `all_rows` if `shown_rows` is None.

    all_rows: all rows of the summary. They determine which keys identify a row, and which values all rows share, even if only
    some rows are shown."""
    rows = all_rows if shown_rows is None else shown_rows
    cells = [row.flat_cell for row in all_rows]
    keys = find_distinguishing_keys(cells)
    keys += [key for key in ("global_batch_size",) if key not in keys and _count_values(cells, [key]) > 1]  # after the ranks
    # A cell with a fault on purpose must be told from an ordinary cell even if all cells of the matrix have the fault.
    keys += ["fault"] if "fault" not in keys and any("fault" in cell for cell in cells) else []
    common_values = [
        (make_heading(key), format_value(cells[0].get(key)))
        for key in _USUAL_KEYS
        if cells and _count_values(cells, [key]) == 1
    ]
    cells = [row.flat_cell for row in rows]
    columns = [
        *(_make_key_column(key, is_number=_has_only_numbers(cells, key)) for key in keys),
        Column(
            "State",
            _format_states,
            name="state",
            is_number=False,
            state=find_notable_state,
            priority=_USUAL_PRIORITY if all([*row.states] == ["completed"] for row in rows) else 0,
        ),
        *([_make_same_work_column(rows)] if any(row.same_work for row in rows) else []),
        Column("n", lambda row: row.n, name="n", is_number=True, link=lambda row: row.id, priority=_USUAL_PRIORITY),
        *_make_metric_columns(rows, "summary"),
    ]
    label_by_cell = map_cells_to_labels(rows)
    cell_column: Column[CellRow] = Column("Cell", lambda row: label_by_cell[row.id], is_number=False, link=lambda row: row.id)
    metric_tables = [_make_table(rows, table_name, title, note, cell_column) for table_name, title, note in _FURTHER_TABLES]
    row_styles = [STYLE_BY_STATE.get(find_notable_state(row), "") for row in rows]
    return CellTables(
        [(key_text, value) for key_text, value in common_values if value],
        Table("Cells", columns, rows, "summary", styles=row_styles),
        [table for table in metric_tables if table.rows],
    )


def _make_key_column(key: str, *, is_number: bool) -> Column[CellRow]:
    def get_text(row: CellRow) -> str:
        return format_value(row.flat_cell.get(key))

    priority = 0 if key in ("strategy", "gpus") else 1  # throughput stays longer than other keys
    return Column(make_heading(key), get_text, name=key, is_number=is_number, link=lambda row: row.id, priority=priority)


def _format_states(row: CellRow) -> CellText:
    return CellText(row.state, "(expected)" if row.expected and list(row.states) != ["completed"] else "")


def find_notable_state(row: CellRow) -> str:
    """The state that decides the colour of a row.

    It is the first state of `STYLE_BY_STATE` that any run of the cell has, else the first state of the runs.
    """
    return next((state for state in STYLE_BY_STATE if state in row.states), next(iter(row.states), "unknown"))


def _make_table(rows: Sequence[CellRow], name: str, title: str, note: str, cell_column: Column[CellRow]) -> Table[CellRow]:
    metric_columns = _make_metric_columns(rows, name)
    rows_with_values = [row for row in rows if any(column.text(row).value for column in metric_columns)]
    row_styles = [STYLE_BY_STATE.get(find_notable_state(row), "") for row in rows_with_values]
    return Table(title, [cell_column, *metric_columns], rows_with_values, name, note, styles=row_styles)


def make_row_labels(rows: Sequence[CellRow]) -> list[str]:
    """A short and unique name for each row, such as `ddp ×2, fork`: its strategy, its ranks, and its unusual values.

    A value is unusual if the rows differ in its key and most rows have another value. A fault on purpose is always named, and
    a value of a user's own key.
    """
    return make_cell_labels([row.flat_cell for row in rows])


def make_cell_labels(flat_cells: Sequence[dict[str, Any]]) -> list[str]:
    """The same as `make_row_labels`, for cells with flat keys (`optimizer.name`) in place of rows."""
    other_keys = [key for key in find_distinguishing_keys(flat_cells) if key not in (*_ALWAYS_SHOWN_KEYS, "fault", "imported")]
    usual_text_by_key = _find_usual_values(flat_cells, other_keys)
    labels = []
    for cell in flat_cells:
        # an imported cell lacks most keys
        label_keys = [key for key in other_keys if key in cell or not (cell.get("imported") or key.startswith(_USER_KEYS))]
        unusual_texts = [label_value(key, cell.get(key)) for key in label_keys if repr(cell.get(key)) != usual_text_by_key[key]]
        fault_words = [cell["fault"]] if "fault" in cell else ["imported"] if cell.get("imported") else []
        labels.append(", ".join([f"{cell['strategy']} ×{cell['gpus']}", *unusual_texts, *fault_words]))
    return labels


def name_row_variants(rows: Sequence[CellRow], ignored_key: str) -> list[str]:
    """A name for each row that tells it apart from rows with the same value of the key `ignored_key`, such as `×2, batch 16`.

    Ranks and batch sizes are in every name if the rows differ in them, because they are the sizes that a reader compares.
    Another value is in the name only if it is unusual (`make_row_labels`).
    """
    cells = [row.flat_cell for row in rows]
    differing_keys = [key for key in find_distinguishing_keys(cells) if key != ignored_key and _count_values(cells, [key]) > 1]
    usual_text_by_key = _find_usual_values(cells, differing_keys)
    variants = []
    for cell in cells:
        shown_keys = [key for key in differing_keys if key in _SIZE_KEYS or repr(cell.get(key)) != usual_text_by_key[key]]
        variants.append(
            ", ".join(f"×{cell[key]}" if key == "gpus" else label_value(key, cell.get(key)) for key in shown_keys) or "usual"
        )
    return variants


def _find_usual_values(flat_cells: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[str, str]:
    """The most frequent value of each key, as text; "" if only the user knows what is usual, such as a script's default."""
    counter_by_key = {key: Counter(repr(cell.get(key)) for cell in flat_cells) for key in keys}
    return {key: "" if key.startswith(_USER_KEYS) else counter.most_common(1)[0][0] for key, counter in counter_by_key.items()}


def map_cells_to_labels(rows: Sequence[CellRow]) -> dict[str, str]:
    """The label of each row: {id of the row's cell: label}."""
    return dict(zip((row.id for row in rows), make_row_labels(rows), strict=True))


def find_distinguishing_keys(flat_cells: Sequence[dict[str, Any]]) -> list[str]:
    """The cell keys that identify the rows: strategy and ranks, then other keys if needed, the usual ones first."""
    return find_fewest_keys(flat_cells, _ALWAYS_SHOWN_KEYS, (*_USUAL_KEYS, "fault"))


def find_fewest_keys(cells: Sequence[Mapping[str, Any]], always_keys: Sequence[str], usual_keys: Sequence[str]) -> list[str]:
    """Find as few keys as are needed to distinguish the cells.

    always_keys: keys that are always in the result, as its first keys. usual_keys: keys that are tried next, before all other
    keys."""
    keys: list[str] = []
    group_of_cells = [0] * len(cells)  # for each cell a number; cells with equal values of all `keys` have equal numbers
    for key in (*always_keys, *usual_keys, *sorted(set().union(*cells) - {*always_keys, *usual_keys})):
        values = [repr(cell.get(key)) for cell in cells]
        if key not in always_keys and len({*values}) < 2:
            continue  # all cells have the same value of this key, so it distinguishes no cells
        group_numbers: dict[tuple[int, str], int] = {}
        finer_groups = [group_numbers.setdefault(pair, len(group_numbers)) for pair in zip(group_of_cells, values, strict=True)]
        if key in always_keys or len(group_numbers) > len({*group_of_cells}):
            keys.append(key)
            group_of_cells = finer_groups
    return keys


def label_value(key: str, key_value: Any) -> str:
    """A value in words, for a label. A text is clear without its key; a number or a boolean gets the name of its key."""
    return str(key_value) if isinstance(key_value, str) else f"{make_heading(key).lower()} {format_value(key_value) or 'none'}"


def _count_values(flat_cells: Sequence[dict[str, Any]], keys: Sequence[str]) -> int:
    return len({repr([cell.get(key) for key in keys]) for cell in flat_cells})


def make_heading(key: str) -> str:
    """The column heading for a key of a cell: `options.image_size` becomes `Image size`."""
    if key in _HEADING_BY_KEY:
        return _HEADING_BY_KEY[key]
    group, _, name = key.rpartition(".")
    words = {"instruments": f"{name} instrument", "options": name, "": name}.get(group, f"{group} {name}").replace("_", " ")
    return words[:1].upper() + words[1:]


def format_value(value: Any) -> str:
    """A value of a cell as text; '' for None."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {format_value(part)}" for key, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _has_only_numbers(flat_cells: Sequence[dict[str, Any]], key: str) -> bool:
    return all(isinstance(cell.get(key), int | float) and not isinstance(cell.get(key), bool) for cell in flat_cells)


def _make_same_work_column(rows: Sequence[CellRow]) -> Column[CellRow]:
    def get_verdict(row: CellRow) -> str:
        return row.same_work.verdict if row.same_work else ""

    priority = _USUAL_PRIORITY if len({get_verdict(row) for row in rows}) == 1 else 0
    return Column("Same work", get_verdict, name="same_work", is_number=False, link=lambda row: row.id, priority=priority)


def _make_metric_columns(rows: Sequence[CellRow], table_name: str) -> list[Column[CellRow]]:
    """The columns for the metrics of one table, without columns that have no value. table_name: name of the table
    (`MetricColumn.table`)."""
    table_metrics = [
        (metric.column, metric) for metric in load_metrics() if metric.column and metric.column.table == table_name
    ]
    table_metrics.sort(key=lambda pair: pair[0].place)
    return [
        _make_column(metric.name, column, estimates, _WORKSPACE_METRIC_PRIORITY if is_workspace_metric(metric.name) else place)
        for place, (column, metric) in enumerate(table_metrics, _USUAL_PRIORITY + 1)
        if (estimates := [row.metrics[metric.name] for row in rows if metric.name in row.metrics])
    ]


def _make_column(metric_name: str, metric_column: MetricColumn, estimates: Sequence[Estimate], place: int) -> Column[CellRow]:
    """The column of a metric. estimates: the values of the metric in all rows that have one. place: its priority on a narrow
    terminal, unless it is one of _FIRST_METRICS."""
    units, kinds = {estimate.unit for estimate in estimates}, {estimate.kind for estimate in estimates}
    unit, scale, digits = units.pop() if len(units) == 1 else "", 1.0, metric_column.digits
    if unit == "bytes":
        unit, scale = notation.choose_unit([estimate.value for estimate in estimates])
        digits = 3
    shows_kind = bool(metric_column.headings) and len(kinds) > 1
    heading = metric_column.heading if shows_kind else metric_column.headings.get("".join(kinds), metric_column.heading)

    def format_metric(row: CellRow) -> CellText:
        estimate = row.metrics.get(metric_name)
        if estimate is None:
            return CellText("")
        half = (estimate.high - estimate.low) / 2 / scale if estimate.low is not None and estimate.high is not None else None
        spread = f"± {notation.format_spread(half)}" if half and metric_column.has_interval else ""
        unit_or_kind = estimate.kind if shows_kind else "" if unit else estimate.unit
        return CellText(notation.format_number(estimate.value / scale, digits), f"{spread} {unit_or_kind}".strip())

    priority = _LONGEST_SHOWN_METRICS.index(metric_name) if metric_name in _LONGEST_SHOWN_METRICS else place
    return Column(heading, format_metric, unit, name=metric_name, is_number=True, link=lambda row: row.id, priority=priority)


_MEMORY_NOTE = (
    "The largest size of each category during the observed step. Categories reach it at different moments, "
    "so the sizes need not add up to the peak."
)
_SENT_NOTE = (
    "Per step: counted from the collectives that ran in the same-work proof; computed with the strategy's "
    "own formula; and as in textbooks. All timed steps: everything that the hosts' network interfaces sent in this "
    "time, other traffic included."
)
_FURTHER_TABLES = (  # name, title and note of each table besides the summary
    ("times", "Times and energy", ""),
    ("memory", "Memory, by what it holds", _MEMORY_NOTE),
    ("sent", "Bytes sent by all ranks together", _SENT_NOTE),
)
