"""A matrix file and its expansion: axes, zips, exclusions and inclusions into the points that are to run.

`axes`, `exclude` and `include` mean what they mean in a GitHub Actions matrix: the axes are crossed, what matches an
exclusion is dropped with its reason, and an inclusion adds its keys to every point of which it changes no axis, or
stands as a point of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shardlab import document, shape
from shardlab.cell import Draft, Instruments, Optimizer, Schedule
from shardlab.cell_names import ARGUMENTS, PLAIN, is_name
from shardlab.document import Document, Path_, Problem
from shardlab.errors import UnknownName
from shardlab.expression import Expression, ExpressionError
from shardlab.workspace import Traces

MAX_CELLS = 100_000
Placed = dict[str, tuple[Any, Path_]]  # cell key -> its value and where that stands in the file


class Assumed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that the source does not state and that had to be chosen."""

    key: str
    value: Any
    why: str


class Reported(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of the source, exactly as printed, and where it stands.

    unit: where it stands in the table's head and not beside the number. of: which operator or kernel, where the metric is of
    one. against: the cell that a metric of two cells is against, where that is not the baseline. kind: measured by the
    source; estimated (computed or extrapolated by it); assumed (an example that nobody ran).
    """

    where: str
    metric: str
    printed: str
    cell: dict[str, Any] = {}
    unit: str | None = None
    of: str | None = None
    against: dict[str, Any] = {}
    kind: Literal["measured", "estimated", "assumed"] = "measured"


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sentence of the source as a test on metrics."""

    id: str
    says: str
    test: str
    where: str


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the source contradicts itself or leaves something open."""

    where: str
    says: str


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the source ran on, as far as it says so; what differs here is a likely reason for other numbers.

    cell: the cells that it is of; all without it. gpu: a part of NVML's name, such as H100. link: between GPUs of a node.
    network_mbps: of an interface between nodes. software: versions, or their beginnings, by package.
    """

    where: str
    gpu: str | None = None
    link: Literal["NVLink", "PCIe"] | None = None
    network_mbps: int | None = None
    software: dict[str, str] = {}
    cell: dict[str, Any] = {}


Count = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class Repeats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of runs of a cell, if claims need more of some cells.

    claims: of each cell that the test of a claim names; others: of every other cell.
    """

    claims: Count
    others: Count = 1


class MatrixFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """matrix.yaml as written; cell keys are checked one by one against `Draft`.

    baseline: the strategy that speed-up and efficiency are against. traces: how the source read its traces; `like-hta`
    judges it by what HolisticTraceAnalysis gives for ours.
    """

    schema: Literal[1]
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,40}$")]
    title: str = ""
    source: str | None = None
    defaults: dict[str, Any] = {}
    axes: dict[str, list[Any]] = {}
    zip: list[dict[str, list[Any]]] = []
    exclude: list[dict[str, Any]] = []
    include: list[dict[str, Any]] = []
    repeats: Count | Repeats = 1
    settings: list[Setting] = []
    baseline: str = "single"
    traces: Traces = "exact"
    assumed: list[Assumed] = []
    reported: list[Reported] = []
    claims: list[Claim] = []
    notes: list[Note] = []


class Point(msgspec.Struct, frozen=True):
    """One combination: its keys, and for each key the place in the file that gave it its value."""

    keys: dict[str, Any]
    origin: dict[str, Path_]

    def draft(self) -> Draft:
        """The keys as a typed draft. Raises msgspec.ValidationError for a required key that is missing."""
        return msgspec.convert(_nested(self.keys), Draft)


class Excluded(msgspec.Struct, frozen=True):
    """A combination that the file excludes, and why."""

    keys: dict[str, Any]
    why: str


class Matrix(msgspec.Struct, frozen=True):
    """A checked matrix: its points in the order of its axes, and what it excludes."""

    file: MatrixFile
    document: Document
    path: str
    points: list[Point]
    excluded: list[Excluded]

    @property
    def name(self) -> str:
        return self.file.name

    def problem(self, point: Point, key: str, sentence: str) -> Problem:
        """Place a sentence at the value that gave `point` its `key`, or at its strategy where a default did."""
        return self.document.problem(origin(point, key) or origin(point, "strategy"), sentence)


def shipped() -> dict[str, Path]:
    """Name to file of the matrices that come with the package."""
    folder = resources.files("matrices")
    found = (Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return {path.stem: path for path in sorted(found)}


def find(name: str) -> Path:
    """The file that a name means: a path (anything with a slash or .yaml), or a shipped matrix."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        return Path(name)
    known = shipped()
    if name not in known:
        raise UnknownName("matrix", name, known)
    return known[name]


def load(path: Path) -> Matrix:
    """Read, check and expand a matrix file. Raises InputError that lists every problem with its place."""
    text = document.load(path)
    file = shape.convert(text, MatrixFile)
    problems: list[Problem] = []
    _check_keys(text, file, problems)
    _check_source(text, file, problems)
    if problems:
        raise text.errors(problems)
    points, excluded = _expand(text, file)
    if not points:
        raise text.error(("axes",), "no cell is left: everything is excluded or nothing is listed.")
    return Matrix(file, text, str(path), points, excluded)


def key_type(key: str) -> Any:
    """The type that a cell key takes, dotted keys included; None for a key that no cell has."""
    head, _, tail = key.partition(".")
    fields = {field.name: field.type for field in msgspec.structs.fields(Draft)}
    if not tail:
        return fields.get(head)
    if head == "options":
        return bool | int | float | str | None
    for name, inner in (("optimizer", Optimizer), ("schedule", Schedule), ("instruments", Instruments)):
        if head == name:
            return {field.name: field.type for field in msgspec.structs.fields(inner)}.get(tail)
    return None


def origin(point: Point, key: str) -> Path_:
    """Where the value of `key` stands, also when a dotted key or the whole mapping gave it."""
    head, _, tail = key.partition(".")
    if key in point.origin:
        return point.origin[key]
    return (*point.origin[head], tail) if tail and head in point.origin else point.origin.get(head, ())


def _check_keys(text: Document, file: MatrixFile, problems: list[Problem]) -> None:
    for key, value in file.defaults.items():
        _check_value(text, key, value, ("defaults", key), problems)
    groups: list[tuple[Path_, dict[str, list[Any]]]] = [(("axes",), file.axes)]
    groups += [(("zip", index), group) for index, group in enumerate(file.zip)]
    seen: dict[str, Path_] = {}
    for path, group in groups:
        for key, values in group.items():
            if key in seen:
                problems.append(text.problem((*path, key), f"varies already at {document.dotted(seen[key])}."))
            seen[key] = (*path, key)
            if not values:
                problems.append(text.problem((*path, key), "found an empty list. Allowed: one value or more."))
            for index, value in enumerate(values):
                _check_value(text, key, value, (*path, key, index), problems)
        if path[0] == "zip" and len({len(values) for values in group.values()}) > 1:
            lengths = ", ".join(f"{key}: {len(values)}" for key, values in group.items())
            problems.append(text.problem(path, f"lists that move together must be equally long, found {lengths}."))
    for name, entries in (("exclude", file.exclude), ("include", file.include)):
        for index, entry in enumerate(entries):
            _check_entry(text, name, index, entry, problems)


def _check_entry(text: Document, name: str, index: int, entry: dict[str, Any], problems: list[Problem]) -> None:
    path: Path_ = (name, index)
    if name == "exclude" and not isinstance(entry.get("why"), str):
        problems.append(text.problem(path, "the key 'why' is missing: say in a sentence why this cannot or need not run."))
    for key, value in entry.items():
        if key == "why":
            continue
        if key == "when":
            try:
                expression = Expression(value if isinstance(value, str) else "")
                unknown = sorted(name for name in expression.names if key_type(name) is None)
                if unknown or expression.calls:
                    allowed = ", ".join(field.name for field in msgspec.structs.fields(Draft))
                    raise ExpressionError(f"unknown name {(unknown or sorted(expression.calls))[0]!r}. Allowed: {allowed}")
            except ExpressionError as error:
                problems.append(text.problem((*path, key), f"{error}."))
        else:
            _check_value(text, key, value, (*path, key), problems)
    if not set(entry) - {"why", *(["when"] if name == "include" else [])}:
        problems.append(text.problem(path, "an entry without any cell key."))


def _check_value(text: Document, key: str, value: Any, path: Path_, problems: list[Problem]) -> None:
    wanted = key_type(key)
    if wanted is None:
        names = [field.name for field in msgspec.structs.fields(Draft)]
        sentence = str(UnknownName("cell key", key, names)) + " Options of a strategy or workload stand under `options`."
        problems.append(text.problem(path if isinstance(path[-1], str) else path[:-1], sentence, at_key=True))
    else:
        shape.check(text, value, wanted, path, problems)


def _check_source(text: Document, file: MatrixFile, problems: list[Problem]) -> None:
    """What the file says of its source names keys that cells have."""
    for index, assumed in enumerate(file.assumed):
        if key_type(assumed.key) is None:
            known = [field.name for field in msgspec.structs.fields(Draft)]
            problems.append(text.problem(("assumed", index, "key"), str(UnknownName("cell key", assumed.key, known))))
            continue
        for value in assumed.value if isinstance(assumed.value, list) else [assumed.value]:  # a list: what an axis takes
            _check_value(text, assumed.key, value, ("assumed", index, "value"), problems)
    described: tuple[tuple[str, Sequence[Setting | Reported]], ...] = (("settings", file.settings), ("reported", file.reported))
    for what, entries in described:
        for index, entry in enumerate(entries):
            for of, cell in (("cell", entry.cell), ("against", entry.against if isinstance(entry, Reported) else {})):
                for key in cell:
                    if not is_name(key):
                        problems.append(text.problem((what, index, of, key), _no_name(key), at_key=True))
    for index, claim in enumerate(file.claims):
        try:
            unknown = [
                key
                for _, wanted in Expression(claim.test).filters
                for key in wanted
                if not is_name(key) and key not in ARGUMENTS
            ]
            if unknown:
                raise ExpressionError(_no_name(unknown[0]).rstrip("."))
        except ExpressionError as error:
            problems.append(text.problem(("claims", index, "test"), f"{error}."))


def _no_name(key: str) -> str:
    return str(UnknownName("name of a resolved cell", key, PLAIN))


def _expand(text: Document, file: MatrixFile) -> tuple[list[Point], list[Excluded]]:
    defaults: Placed = {key: (value, ("defaults", key)) for key, value in file.defaults.items()}
    size = 1
    for values in itertools.chain(file.axes.values(), (next(iter(group.values()), []) for group in file.zip)):
        size *= len(values)
    if size > MAX_CELLS:
        raise text.error(("axes",), f"{size} combinations. Allowed: {MAX_CELLS} or fewer.")
    crossed = list(_cross(file)) if file.axes or file.zip else ([{}] if not file.include else [])
    kept: list[Placed] = []
    excluded: list[Excluded] = []
    for axis_point in crossed:
        point = _merge(defaults, axis_point)
        why = _excluded(text, file, _plain(point))
        if why is None:
            kept.append(axis_point)
        else:
            excluded.append(Excluded(_plain(point), why))
    extra: list[Placed] = []
    varying = set(file.axes) | {key for group in file.zip for key in group}
    additions: list[Placed] = [{} for _ in kept]
    for index, entry in enumerate(file.include):
        wanted: Placed = {k: (v, ("include", index, k)) for k, v in entry.items() if k not in ("when", "why")}
        try:
            matching = [n for n, p in enumerate(kept) if _accepts(p, wanted, varying, entry.get("when"), defaults)]
        except ExpressionError as error:
            raise text.error(("include", index, "when"), f"{error}.") from None
        for n in matching:
            additions[n].update({k: v for k, v in wanted.items() if k not in varying})
        if not matching:
            extra.append(wanted)
    merged = [_merge(defaults, point, added) for point, added in zip(kept, additions, strict=True)]
    merged += [_merge(defaults, point) for point in extra]
    return [Point(_plain(p), {key: place for key, (_, place) in p.items()}) for p in merged], excluded


def _cross(file: MatrixFile) -> Iterator[Placed]:
    groups: list[list[Placed]] = [
        [{key: (value, ("axes", key, i))} for i, value in enumerate(values)] for key, values in file.axes.items()
    ]
    for z, group in enumerate(file.zip):
        rows = zip(*([(key, i, value) for i, value in enumerate(values)] for key, values in group.items()), strict=True)
        groups.append([{key: (value, ("zip", z, key, i)) for key, i, value in row} for row in rows])
    for combination in itertools.product(*groups):
        yield {key: value for part in combination for key, value in part.items()}


def _merge(*layers: Placed) -> Placed:
    """Later layers win; `gpu_batch_size` and `global_batch_size`, `steps` and `epochs` replace each other."""
    merged: Placed = {}
    for layer in layers:
        for one, other in (("gpu_batch_size", "global_batch_size"), ("steps", "epochs")):
            if (one in layer) != (other in layer):
                merged.pop(other if one in layer else one, None)
        merged.update(layer)
    return merged


def _accepts(
    point: Placed,
    wanted: Placed,
    varying: set[str],
    when: str | None,
    defaults: Placed,
) -> bool:
    if any(key in varying and point[key][0] != value for key, (value, _) in wanted.items()):
        return False
    return when is None or bool(_holds(when, _plain(_merge(defaults, point))))


def _excluded(text: Document, file: MatrixFile, keys: dict[str, Any]) -> str | None:
    for index, entry in enumerate(file.exclude):
        conditions = {k: v for k, v in entry.items() if k not in ("why", "when")}
        if any(keys.get(key) != value for key, value in conditions.items()):
            continue
        try:
            if "when" not in entry or _holds(entry["when"], keys):
                return str(entry["why"])
        except ExpressionError as error:
            raise text.error(("exclude", index, "when"), f"{error}.") from None
    return None


def _holds(expression: str, keys: dict[str, Any]) -> bool:
    names = {field.name: None for field in msgspec.structs.fields(Draft)} | keys
    return bool(Expression(expression).evaluate(names))


def _plain(point: Placed) -> dict[str, Any]:
    return {key: value for key, (value, _) in point.items()}


def _nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys laid over the mappings that they refine."""
    nested = {key: dict(value) if isinstance(value, dict) else value for key, value in keys.items() if "." not in key}
    for key, value in keys.items():
        head, _, tail = key.partition(".")
        if tail:
            nested[head] = {**(nested.get(head) or {}), tail: value}
    return nested
