"""The columns of the summary table, the same for terminal and page. Values that all rows share are listed above the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from collect import notation
from collect.row import Row
from collect.statistics import Estimate

_ALWAYS = ("strategy", "gpus")
_USUAL = ("workload", "launcher", "global_batch_size", "precision", "seq_len", "optimizer.name", "steps", "epochs")
_HEADINGS = {
    "gpus": "Ranks",
    "nnodes": "Nodes",
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
    """A cell of the table: the value and, where it is known, half the width of its 95 % interval."""

    value: str
    spread: str = ""
    unit: str = ""  # only where the rows of a column differ in it

    def __str__(self) -> str:
        value = f"{self.value} ± {self.spread}" if self.spread else self.value
        return f"{value} {self.unit}" if self.unit else value


class Column(msgspec.Struct, frozen=True):
    """name: the metric's or cell key's; cells: one per row, empty where nothing is known."""

    name: str
    heading: str
    unit: str
    is_number: bool
    cells: list[Text]

    @property
    def headed(self) -> str:
        """The heading with its unit, in one line."""
        return f"{self.heading} ({self.unit})" if self.unit else self.heading


_Build = Callable[[Sequence[Row]], Column]


class Further(msgspec.Struct, frozen=True):
    """A table besides the summary. columns: the first names the rows; every other column has a value in at least one row.

    rows: the indexes of the rows in which any column has a value. name: can be used as a file name.
    """

    name: str
    title: str
    note: str
    columns: list[Column]
    rows: list[int]


class Table(msgspec.Struct, frozen=True):
    """common: (name, value) of what all rows share. further: tables of the other metrics, one for each subject."""

    common: list[tuple[str, str]]
    columns: list[Column]
    further: list[Further]


def table(every: Sequence[Row], shown: Sequence[Row] | None = None) -> Table:
    """The rows as text: `shown`, or all. Which keys identify a row and which all rows share is decided on all rows."""
    rows = every if shown is None else shown
    cells = [row.flat for row in every]
    keys = distinguishing(cells)
    keys += [key for key in ("global_batch_size",) if key not in keys and _kinds(cells, [key]) > 1]  # it follows the ranks
    common = [(heading(key), plain(cells[0].get(key))) for key in _USUAL if cells and _kinds(cells, [key]) == 1]
    cells = [row.flat for row in rows]
    identity = [
        Column(key, heading(key), "", _is_count(cells, key), [Text(plain(cell.get(key))) for cell in cells]) for key in keys
    ]
    state = Column("state", "State", "", False, [Text(row.state) for row in rows])
    proof = Column("same_work", "Same work", "", False, [Text(row.same_work.verdict if row.same_work else "") for row in rows])
    n = Column("n", "n", "", True, [Text(str(row.n)) for row in rows])
    proofs = _known([proof])
    measured = _known(build(rows) for build in _MEASURED)
    names = Column("label", "Cell", "", False, [Text(label) for label in labels(rows)])
    return Table(
        [(what, value) for what, value in common if value],
        [*identity, state, *proofs, n, *measured],
        [found for name, title, note, builds in _FURTHER if (found := _further(rows, name, title, note, builds, names)).rows],
    )


def _further(rows: Sequence[Row], name: str, title: str, note: str, builds: Sequence[_Build], names: Column) -> Further:
    known = _known(build(rows) for build in builds)
    saying = [place for place in range(len(rows)) if any(column.cells[place].value for column in known)]
    return Further(name, title, note, [names, *known], saying)


def _known(columns: Iterable[Column]) -> list[Column]:
    """The columns that say anything."""
    return [column for column in columns if any(cell.value for cell in column.cells)]


def labels(rows: Sequence[Row]) -> list[str]:
    """A short and unique name for each row, such as `ddp ×2, fork`: its strategy, its ranks, and what is unusual about it.

    Of the other keys in which rows differ, a value is named only if most rows have another value.
    """
    cells = [row.flat for row in rows]
    others = [key for key in distinguishing(cells) if key not in _ALWAYS]
    usual = {key: Counter(repr(cell.get(key)) for cell in cells).most_common(1)[0][0] for key in others}
    found = []
    for cell in cells:
        unusual = [_named(key, cell.get(key)) for key in others if repr(cell.get(key)) != usual[key]]
        found.append(", ".join([f"{cell['strategy']} ×{cell['gpus']}", *unusual]))
    return found


def label_of(rows: Sequence[Row]) -> dict[str, str]:
    """The label of each row, by its id."""
    return dict(zip((row.id for row in rows), labels(rows), strict=True))


def distinguishing(cells: Sequence[dict[str, Any]]) -> list[str]:
    """The cell keys that identify the rows: strategy and ranks, then other keys if needed, the usual ones first."""
    return telling(cells, _ALWAYS, _USUAL)


def telling(cells: Sequence[Mapping[str, Any]], always: Sequence[str], usual: Sequence[str]) -> list[str]:
    """As few keys as identify the cells: first the keys `always`, then other keys if needed, those of `usual` first."""
    keys: list[str] = []
    kinds = [0] * len(cells)  # of the cells as far as the keys tell them apart
    for key in (*always, *usual, *sorted(set().union(*cells) - {*always, *usual})):
        values = [repr(cell.get(key)) for cell in cells]
        if key not in always and len({*values}) < 2:
            continue  # as of most keys
        seen: dict[tuple[int, str], int] = {}
        finer = [seen.setdefault(pair, len(seen)) for pair in zip(kinds, values, strict=True)]
        if key in always or len(seen) > len({*kinds}):
            keys.append(key)
            kinds = finer
    return keys


def _named(key: str, value: Any) -> str:
    """A value that speaks for itself stands alone; a number or a truth value needs the name of its key."""
    return str(value) if isinstance(value, str) else f"{heading(key).lower()} {plain(value) or 'none'}"


def _kinds(cells: Sequence[dict[str, Any]], keys: Sequence[str]) -> int:
    return len({repr([cell.get(key) for key in keys]) for cell in cells})


def heading(key: str) -> str:
    """A cell key as a person reads it: `options.image_size` is `Image size`."""
    if key in _HEADINGS:
        return _HEADINGS[key]
    group, _, name = key.rpartition(".")
    words = {"instruments": f"{name} instrument", "options": name, "": name}.get(group, f"{group} {name}").replace("_", " ")
    return words[:1].upper() + words[1:]


def plain(value: Any) -> str:
    """A value of a cell as text, nothing for none."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {plain(one)}" for key, one in value.items() if one is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_count(cells: Sequence[dict[str, Any]], key: str) -> bool:
    return all(isinstance(cell.get(key), int | float) and not isinstance(cell.get(key), bool) for cell in cells)


def _estimates(rows: Sequence[Row], name: str) -> list[Estimate | None]:
    return [row.metrics.get(name) for row in rows]


def _column(name: str, heading: str, unit: str, found: Sequence[Estimate | None], scale: float = 1, digits: int = 4) -> Column:
    cells = []
    for estimate in found:
        if estimate is None:
            cells.append(Text(""))
            continue
        half = (estimate.high - estimate.low) / 2 / scale if estimate.low is not None and estimate.high is not None else None
        spread = notation.spread(half) if half and name == "throughput_per_s" else ""
        cells.append(Text(notation.number(estimate.value / scale, digits), spread, "" if unit else estimate.unit))
    return Column(name, heading, unit, True, cells)


def _of(name: str, heading: str, digits: int = 4) -> _Build:
    def build(rows: Sequence[Row]) -> Column:
        found = _estimates(rows, name)
        units = {estimate.unit for estimate in found if estimate}
        return _column(name, heading, units.pop() if len(units) == 1 else "", found, digits=digits)

    return build


def _of_bytes(name: str, heading: str) -> _Build:
    def build(rows: Sequence[Row]) -> Column:
        found = _estimates(rows, name)
        unit, scale = notation.bytes_unit([estimate.value for estimate in found if estimate])
        return _column(name, heading, unit, found, scale, 3)

    return build


def _of_kind(build: _Build, words: dict[str, str]) -> _Build:
    """Say in the heading which kind the numbers are of, or beside each where they differ."""

    def built(rows: Sequence[Row]) -> Column:
        column = build(rows)
        found = _estimates(rows, column.name)
        kinds = {estimate.kind for estimate in found if estimate}
        if len(kinds) == 1:
            return msgspec.structs.replace(column, heading=words.get(kinds.pop(), column.heading))
        cells = [Text(cell.value, unit=estimate.kind) if estimate else cell for cell, estimate in zip(column.cells, found)]
        return msgspec.structs.replace(column, cells=cells)

    return built


_MEMORY = {"allocated on the GPU": "Peak GPU memory", "resident set of the process": "Peak RSS"}
_MEASURED = (
    _of("throughput_per_s", "Throughput"),
    _of("step_time_ms", "Step, median"),
    _of_kind(_of("speed_up", "Speed-up", 3), {"strong": "Speed-up, strong", "weak": "Speed-up, weak"}),
    _of("scaling_efficiency_pct", "Efficiency", 3),
    _of_kind(_of_bytes("peak_memory_bytes", "Peak memory"), _MEMORY),
    _of("cpu_pct", "CPU", 3),
    _of("gpu_pct", "GPU", 3),
    _of("mfu_pct", "MFU", 3),
    _of("final_loss", "Final loss"),
    _of("final_accuracy_pct", "Accuracy", 3),
)
_TIMES = (
    _of("train_time_s", "Training"),
    _of("epoch_time_s", "Epoch, mean"),
    _of("epoch_time_median_s", "Epoch, median"),
    _of("bubble_pct", "Bubble", 3),
    _of("bubble_theory_pct", "Bubble, theory", 3),
    _of("staleness_mean", "Staleness, mean", 3),
    _of("staleness_max", "Staleness, max", 3),
    _of("energy_j", "Energy"),
    _of("energy_per_unit_j", "Energy per unit", 3),
)
_CATEGORIES = (
    _of_bytes("memory_parameter_bytes", "Parameters"),
    _of_bytes("memory_gathered_bytes", "Gathered"),
    _of_bytes("memory_gradient_bytes", "Gradients"),
    _of_bytes("memory_optimizer_state_bytes", "Optimizer"),
    _of_bytes("memory_master_parameter_bytes", "Master copy"),
    _of_bytes("memory_activation_bytes", "Activations"),
    _of_bytes("memory_buffer_bytes", "Buffers"),
    _of_bytes("memory_temporary_bytes", "Temporary"),
    _of("memory_over_estimate", "Peak / estimate", 3),
    _of_bytes("reserved_memory_bytes", "Reserved"),
    _of("gpu_memory_pct", "GPU memory", 3),
)
_SENT = (
    _of_bytes("sent_counted_bytes", "Per step, counted"),
    _of_bytes("sent_theory_bytes", "Per step, theory"),
    _of_bytes("sent_textbook_bytes", "Per step, textbook"),
    _of_bytes("network_bytes", "All timed steps, network"),
    _of_bytes("loopback_bytes", "All timed steps, loopback"),
)
_OF_MEMORY = (
    "The largest size of each category during the observed step. Categories reach it at different moments, so the sizes need "
    "not add up to the peak."
)
_OF_SENT = (
    "Per step: counted from the collectives that ran in the same-work proof; computed with the strategy's own formula; and as "
    "in textbooks. All timed steps: everything that the hosts' network interfaces sent in this time, other traffic included."
)
_FURTHER = (
    ("times", "Times and energy", "", _TIMES),
    ("memory", "Memory, by what it holds", _OF_MEMORY, _CATEGORIES),
    ("sent", "Bytes sent by all ranks together", _OF_SENT, _SENT),
)
