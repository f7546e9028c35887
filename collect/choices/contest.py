"""Groups cells into contests: the cells of a contest do the same work on the same numbers of ranks and nodes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from collect.choices.standing import Standing
from collect.findings import comparability
from collect.findings.columns import distinguishing, telling
from collect.findings.row import CellRow, flat

Outcome = Literal[
    "measured",
    "does not fit",
    "over the limit",
    "other work",
    "gpu trouble",
    "looked into",
    "not ranked",
    "failed",
    "not measured",
]
RESULTS = ("measured", "does not fit", "over the limit")  # outcomes from which a reader learns something about a strategy
UNRANKED = ("other work", "gpu trouble", "looked into", "not ranked")  # outcomes of cells that were measured but not ranked
# The reason that is given for a measured cell that is not ranked because a cell with fewer instruments is ranked instead.
PLAINER = "the same cell was also measured with fewer instruments, and that measurement is ranked"
_GOING = {"planned", "pending", "running", "unknown"}
_USUAL = (
    "options.data",
    "precision",
    "seq_len",
    "steps",
    "epochs",
    "launcher",
    "optimizer.name",
)  # families of a workload are named by the cell keys in which they differ; these keys are tried first


class Contender(msgspec.Struct, omit_defaults=True):
    """A cell of a contest."""

    cell: str  # the id of the cell
    name: str  # the strategy of the cell, and the values that distinguish the cell from other cells of this strategy
    outcome: Outcome  # whether the cell was measured, and if not (or if it is not ranked), why
    partly: str = ""  # the states of the cell's repeats, if the repeats did not all end in the same state
    why: str = ""  # the reason in a sentence, if the cell was measured but is not ranked


class Contest(msgspec.Struct):
    """Cells that do the same work on the same number of ranks and nodes, with the same global batch size."""

    ranks: int  # number of ranks
    nodes: int  # number of nodes; for a tiny twin: the number of nodes of the cell that the tiny twin represents
    batch: int  # the global batch size
    contenders: list[Contender]  # ordered by name
    standings: list[Standing]  # one for each criterion (a metric) for which two or more cells have a value

    @property
    def open(self) -> bool:
        """Whether a reader can choose between cells: whether two or more contenders have an outcome in RESULTS."""
        return sum(contender.outcome in RESULTS for contender in self.contenders) > 1

    def named(self, outcome: Outcome) -> list[str]:
        """The names of the contenders with this outcome."""
        return [contender.name for contender in self.contenders if contender.outcome == outcome]


class Ground(NamedTuple):
    """Cells (as rows of the summary) of one workload that differ only in ranks, batch size, and how the ranks share the
    work."""

    workload: str
    about: str  # in words, the values that distinguish this ground from other grounds of the workload
    contests: dict[tuple[int, int, int], list[CellRow]]  # (ranks, nodes, global batch size) -> rows that may be compared


def grounds(rows: Sequence[CellRow]) -> list[Ground]:
    """Group rows of the summary into grounds. Each row is in exactly one ground. The order of `rows` does not matter."""
    options = _shared_options(rows)
    by_work: dict[bytes, list[CellRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.id):
        work = comparability.work(row.cell, options[row.cell["workload"]])
        for one in (work, work["rehearses"] or {}):
            one.pop("global_batch_size", None)
        by_work[msgspec.json.encode(work, order="deterministic")].append(row)
    shown: dict[str, dict[bytes, dict[str, Any]]] = defaultdict(dict)
    for key, members in by_work.items():
        shown[members[0].cell["workload"]][key] = _shown(members[0], options)
    found = []
    for workload, families in sorted(shown.items()):
        distinguishing_keys = telling(list(families.values()), (), _USUAL)
        for key, cell in sorted(families.items(), key=lambda family: ("fault" in family[1], family[0])):  # ordinary cells first
            about = ", ".join(filter(None, (_said(one, cell.get(one)) for one in distinguishing_keys)))
            contests: dict[tuple[int, int, int], list[CellRow]] = defaultdict(list)
            for row in by_work[key]:
                contests[row.cell["gpus"], _represented_cell(row)["nnodes"], row.cell["global_batch_size"]].append(row)
            found.append(Ground(workload, about, dict(sorted(contests.items()))))
    return found


def contenders(rows: Sequence[CellRow]) -> list[Contender]:
    """The rows of one contest as contenders, ordered by their names."""
    found = []
    plainest = _plainest(rows)
    for name, row in _names(rows):
        partly = row.state if len(row.states) > 1 and row.n else ""
        why = row.same_work.why if row.same_work else "no same-work proof was made"
        outcome = _outcome(row)
        if outcome == "measured" and row.id not in plainest:
            outcome, why = "looked into", PLAINER
        if outcome == "gpu trouble":
            why = row.gpu_trouble
        found.append(Contender(row.id, name, outcome, partly, why if outcome in UNRANKED else ""))
    return sorted(found, key=lambda contender: (natural(contender.name), contender.cell))


def _plainest(rows: Sequence[CellRow]) -> set[str]:
    """The ids of the measured cells with the fewest instruments.

    If several measured cells differ only in their instruments, only the cell with the fewest instruments is ranked.
    """
    alike: dict[bytes, list[CellRow]] = defaultdict(list)
    for row in rows:
        if row.n:
            alike[comparability.without_instruments(row.cell)].append(row)
    return {min(twins, key=lambda row: (_instruments(row), row.id)).id for twins in alike.values()}


def _instruments(row: CellRow) -> int:
    asked = row.cell["instruments"]
    return sum([asked["memory"] != "peak", *(asked[name] is not None for name in ("profile", "validation", "checkpoints"))])


def _outcome(row: CellRow) -> Outcome:
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
    return "not measured" if row.states.keys() <= _GOING else "failed"


def _names(rows: Sequence[CellRow]) -> list[tuple[str, CellRow]]:
    """Name each row of a contest. Returns (name, row) for each row.

    The name is the strategy of the cell and, if several rows have this strategy, the values in which these rows differ.
    """
    by_strategy: dict[str, list[CellRow]] = defaultdict(list)
    for row in rows:
        by_strategy[row.cell["strategy"]].append(row)
    found = []
    for strategy, members in by_strategy.items():
        cells = [row.flat for row in members]
        keys = [key for key in distinguishing(cells) if key not in ("strategy", "gpus")] if len(cells) > 1 else []
        for row, cell in zip(members, cells):
            found.append((", ".join(filter(None, [strategy, *(_named(key, cell) for key in keys)])), row))
    return found


def _named(key: str, cell: dict[str, Any]) -> str:
    """A key of a cell and its value in words. In a pipeline, accumulation steps are called micro-batches."""
    if key == "gradient_accumulation_steps" and cell["pp"] > 1:
        return f"{cell[key]} micro-batches"
    return _said(key, cell.get(key))


def natural(name: str) -> list[str | int]:
    """A sort key that puts names in natural order: numbers inside names are compared by value, so that 2 comes before 10."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", name))]


def _shared_options(rows: Sequence[CellRow]) -> dict[str, set[str]]:
    """For each workload, the names of the options that all its cells have: {workload: names}.

    An option that only some cells have belongs to a strategy.
    """
    found: dict[str, set[str]] = {}
    for row in rows:
        have = set(row.cell["options"])
        found[row.cell["workload"]] = found.get(row.cell["workload"], have) & have
    return found


def _represented_cell(row: CellRow) -> dict[str, Any]:
    """The cell of a row. For a tiny twin, it is the large cell that the tiny twin represents."""
    cell: dict[str, Any] = row.cell.get("rehearses") or row.cell
    return cell


def _shown(row: CellRow, options: dict[str, set[str]]) -> dict[str, Any]:
    """The values by which a row may be named: {dotted key: value}, for keys whose values are equal in all rows of the row's
    ground.

    options: the result of `_shared_options`. For a tiny twin, the values are those of the large cell that the tiny twin
    represents; the values of the tiny twin itself follow, with the prefix `rehearses.` before their keys.
    """
    found: dict[str, Any] = {}
    for whose, cell in (("", _represented_cell(row)), ("rehearses.", row.cell)):
        work = comparability.work(cell, options[row.cell["workload"]] & cell["options"].keys()) | {"rehearses": None}
        work.pop("global_batch_size")
        found |= {whose + key: value for key, value in flat(work).items()}
    return found | {"launcher": row.cell["launcher"]}


def _said(key: str, value: Any) -> str:
    """A key and its value in words: `precision bf16`, `optimizer adamw`, `optimizer.lr 0.001`, `instruments.memory categories`.

    The prefix `options.` is left out. Returns '' if the value is not set.
    """
    key = key.removeprefix("rehearses.")
    name = key.removeprefix("options.").removesuffix(".name").replace("_", " ")
    if value is None or value is False or (key.startswith("instruments.") and value == "none"):
        return ""
    if key == "fault":  # the value says that it is a fault
        return str(value)
    if isinstance(value, dict):
        inner = ", ".join(f"{one.replace('_', ' ')} {of}" for one, of in value.items() if of is not None)
        return f"{name} ({inner})"
    return name if value is True else f"{name} {value}"
