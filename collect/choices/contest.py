"""Groups cells into contests: the cells of a contest do the same work on the same numbers of ranks and nodes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from collect.choices.standing import Standing
from collect.findings import comparability
from collect.findings.columns import find_distinguishing_keys, find_fewest_keys, format_value
from collect.findings.row import CellRow, flatten_cell
from shardlab.matrix.cell import STRATEGY_OPTIONS

Outcome = Literal[
    "measured", "does not fit", "over the limit", "other work", "gpu trouble", "looked into", "not ranked", "failed",
    "not measured",
]  # fmt: skip
# From which a reader learns something about a strategy.
INFORMATIVE_OUTCOMES = ("measured", "does not fit", "over the limit")
UNRANKED_OUTCOMES = ("other work", "gpu trouble", "looked into", "not ranked")  # of cells that were measured
# The reason that is given for a measured cell that is not ranked because a cell with fewer instruments is ranked instead.
FEWER_INSTRUMENTS_REASON = "the same cell was also measured with fewer instruments, and that measurement is ranked"
_UNFINISHED_STATES = {"planned", "pending", "running", "unknown"}
# families of a workload are named by the cell keys in which they differ; these keys are tried first
_USUAL_NAMING_KEYS = ("options.data", "precision", "seq_len", "steps", "epochs", "launcher", "optimizer.name")


class Contender(msgspec.Struct, omit_defaults=True):
    """A cell of a contest."""

    cell: str
    """The id of the cell."""
    name: str
    """The strategy of the cell, and the values that distinguish the cell from other cells of this strategy."""
    outcome: Outcome
    """Whether the cell was measured, and if not (or if it is not ranked), why."""
    partly: str = ""
    """The states of the cell's repeats, if the repeats did not all end in the same state."""
    why: str = ""
    """The reason in a sentence, if the cell was measured but is not ranked."""


class Contest(msgspec.Struct):
    """Cells that do the same work on the same number of ranks and nodes, with the same global batch size."""

    ranks: int
    """Number of ranks."""
    nodes: int
    """Number of nodes; for a tiny twin: the number of nodes of the cell that the tiny twin represents."""
    batch: int
    """The global batch size."""
    contenders: list[Contender]
    """Ordered by name."""
    standings: list[Standing]
    """One for each criterion (a metric) for which two or more cells have a value."""

    @property
    def has_choice(self) -> bool:
        """Whether a reader can choose between cells: whether two or more contenders have one of INFORMATIVE_OUTCOMES."""
        return sum(contender.outcome in INFORMATIVE_OUTCOMES for contender in self.contenders) > 1

    def contender_names(self, outcome: Outcome) -> list[str]:
        """The names of the contenders with this outcome."""
        return [contender.name for contender in self.contenders if contender.outcome == outcome]


class ComparableCells(NamedTuple):
    """Cells (as rows of the summary) of one workload that differ only in ranks, batch size, and how the ranks share the
    work."""

    workload: str
    values_text: str
    """In words, the values that distinguish these cells from other cells of the workload."""
    contests: dict[tuple[int, int, int], list[CellRow]]
    """(ranks, nodes, global batch size) -> rows that may be compared."""


def group_comparable_cells(rows: Sequence[CellRow]) -> list[ComparableCells]:
    """Group rows of the summary, in any order. Each row is in one group; imported rows are in none, because their work is not
    known."""
    rows = [row for row in rows if not row.cell.get("imported")]
    options_of_workload = _find_shared_options(rows)
    rows_by_work: dict[bytes, list[CellRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.id):
        work_description = comparability.describe_work(row.cell, options_of_workload[row.cell["workload"]])
        for item in (work_description, work_description["rehearses"] or {}):
            item.pop("global_batch_size", None)
        rows_by_work[msgspec.json.encode(work_description, order="deterministic")].append(row)
    naming_values: dict[str, dict[bytes, dict[str, Any]]] = defaultdict(dict)
    for key, members in rows_by_work.items():
        naming_values[members[0].cell["workload"]][key] = _collect_naming_values(members[0], options_of_workload)
    comparable_groups = []
    for workload, families in sorted(naming_values.items()):
        naming_keys = find_fewest_keys(list(families.values()), (), _USUAL_NAMING_KEYS)
        for key, cell in sorted(families.items(), key=lambda family: ("fault" in family[1], family[0])):  # ordinary cells first
            values_text = ", ".join(filter(None, (_describe_value(item, cell.get(item)) for item in naming_keys)))
            contests: dict[tuple[int, int, int], list[CellRow]] = defaultdict(list)
            for row in rows_by_work[key]:
                contests[row.cell["gpus"], _get_represented_cell(row)["nnodes"], row.cell["global_batch_size"]].append(row)
            comparable_groups.append(ComparableCells(workload, values_text, dict(sorted(contests.items()))))
    return comparable_groups


def list_contenders(rows: Sequence[CellRow]) -> list[Contender]:
    """The rows of one contest as contenders, ordered by their names."""
    contenders = []
    least_instrumented = _find_least_instrumented(rows)
    for name, row in _name_rows(rows):
        partial_states = row.state if len(row.states) > 1 and row.n else ""
        reason = row.same_work.why if row.same_work else "no same-work proof was made"
        outcome = _find_outcome(row)
        if outcome == "measured" and row.id not in least_instrumented:
            outcome, reason = "looked into", FEWER_INSTRUMENTS_REASON
        if outcome == "gpu trouble":
            reason = row.gpu_trouble
        contenders.append(Contender(row.id, name, outcome, partial_states, reason if outcome in UNRANKED_OUTCOMES else ""))
    return sorted(contenders, key=lambda contender: (make_natural_sort_key(contender.name), contender.cell))


def _find_least_instrumented(rows: Sequence[CellRow]) -> set[str]:
    """The ids of the measured cells of which no equal cell has fewer instruments. Only these cells are ranked."""
    rows_by_cell: dict[bytes, list[CellRow]] = defaultdict(list)
    for row in rows:
        if row.n:
            rows_by_cell[comparability.make_key_without_instruments(row.cell)].append(row)
    return {min(equal_rows, key=lambda row: (_count_instruments(row), row.id)).id for equal_rows in rows_by_cell.values()}


def _count_instruments(row: CellRow) -> int:
    instruments = row.cell["instruments"]
    return sum(
        [instruments["memory"] != "peak", *(instruments[name] is not None for name in ("profile", "validation", "checkpoints"))]
    )


def _find_outcome(row: CellRow) -> Outcome:
    if row.n:
        if row.is_ranked:
            return "measured"
        if row.gpu_trouble:
            return "gpu trouble"
        return "other work" if row.same_work and row.same_work.verdict == "other work" else "not ranked"
    if "oom" in row.states:
        return "does not fit"
    if "timeout" in row.states:
        return "over the limit"
    return "not measured" if row.states.keys() <= _UNFINISHED_STATES else "failed"


def _name_rows(rows: Sequence[CellRow]) -> list[tuple[str, CellRow]]:
    """(name, row) for each row of a contest: its strategy and, if several rows have it, the values in which these differ."""
    rows_by_strategy: dict[str, list[CellRow]] = defaultdict(list)
    for row in rows:
        rows_by_strategy[row.cell["strategy"]].append(row)
    named_rows = []
    for strategy, strategy_rows in rows_by_strategy.items():
        cells = [row.flat_cell for row in strategy_rows]
        keys = [key for key in find_distinguishing_keys(cells) if key not in ("strategy", "gpus")] if len(cells) > 1 else []
        for row, cell in zip(strategy_rows, cells):
            named_rows.append((", ".join(filter(None, [strategy, *(_describe_key(key, cell) for key in keys)])), row))
    return named_rows


def _describe_key(key: str, cell: dict[str, Any]) -> str:
    """A key of a cell and its value in words. In a pipeline, accumulation steps are called micro-batches."""
    if key == "gradient_accumulation_steps" and (cell["pp"] or 1) > 1:
        return f"{cell[key]} micro-batches"
    return _describe_value(key, cell.get(key))


def make_natural_sort_key(name: str) -> list[str | int]:
    """A sort key that compares numbers inside names by value, so that 2 comes before 10."""
    return [int(name_part) if index % 2 else name_part for index, name_part in enumerate(re.split(r"(\d+)", name))]


def _find_shared_options(rows: Sequence[CellRow]) -> dict[str, set[str]]:
    """{workload: names of the options that all its cells have}. An option that only some cells have belongs to a strategy."""
    options_by_workload: dict[str, set[str]] = {}
    for row in rows:
        option_names = row.cell["options"].keys() - STRATEGY_OPTIONS.keys()
        options_by_workload[row.cell["workload"]] = options_by_workload.get(row.cell["workload"], option_names) & option_names
    return options_by_workload


def _get_represented_cell(row: CellRow) -> dict[str, Any]:
    """The cell of a row. For a tiny twin, it is the large cell that the tiny twin represents."""
    represented_cell: dict[str, Any] = row.cell.get("rehearses") or row.cell
    return represented_cell


def _collect_naming_values(row: CellRow, options_of_workload: dict[str, set[str]]) -> dict[str, Any]:
    """The values by which a row may be named: {dotted key: value}, for keys whose values are equal in all rows of its group.

    options_of_workload: from `_find_shared_options`. For a tiny twin, the values are those of the large cell that it
    represents; its own values follow, with the prefix `rehearses.` before their keys.
    """
    values: dict[str, Any] = {}
    for key_prefix, cell in (("", _get_represented_cell(row)), ("rehearses.", row.cell)):
        shared_options = options_of_workload[row.cell["workload"]] & cell["options"].keys()
        work_description = comparability.describe_work(cell, shared_options) | {"rehearses": None}
        work_description.pop("global_batch_size")
        values |= {key_prefix + key: value for key, value in flatten_cell(work_description).items()}
    return values | {"launcher": row.cell["launcher"]}


def _describe_value(key: str, value: Any) -> str:
    """A key and its value in words: `precision bf16`, `optimizer adamw`, `optimizer.lr 0.001`, `instruments.memory categories`.

    The prefix `options.` is left out. Returns '' if the value is not set.
    """
    key = key.removeprefix("rehearses.")
    key_words = key.removeprefix("options.").removesuffix(".name").replace("_", " ")
    if value is None or value is False or (key.startswith("instruments.") and value == "none"):
        return ""
    if key == "fault":  # the value says that it is a fault
        return str(value)
    if isinstance(value, dict):
        return f"{key_words} ({format_value(value)})"
    return key_words if value is True else f"{key_words} {value}"
