"""Reads a matrix file and expands its axes, zips, exclusions and inclusions into the combinations that will run.

`axes`, `exclude` and `include` mean the same as in a GitHub Actions matrix. All values of the axes are combined. A combination
that matches an entry of `exclude` is left out, and the reason is kept. An entry of `include` adds its keys to every combination
whose values on the axes the entry would not change. If there is no such combination, the entry becomes a new combination.

An entry with `when` becomes no combination. It adds its keys to every combination for which its condition is true; to new
combinations of `include` it adds those keys that they do not give themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shardlab.errors import InputError, UnknownName
from shardlab.files import document, validation
from shardlab.files.document import Document, KeyPath, Problem
from shardlab.matrix import claim_check, command, model_file, overrides, search_check
from shardlab.matrix.batch_search import PLACEHOLDER_SIZE, SearchRequest
from shardlab.matrix.cell import Draft, Instruments, Optimizer, Schedule
from shardlab.matrix.cell_names import PLAIN_NAMES, is_cell_name
from shardlab.matrix.citation import Citation
from shardlab.matrix.command import CommandWorkload, StrategyLabel
from shardlab.matrix.expansion import ExcludedPoint
from shardlab.matrix.expression import Expression, ExpressionError
from shardlab.matrix.model_file import ModelByConfiguration, ModelFile
from shardlab.matrix.retry import Retry
from shardlab.matrix.study import Assumed, Claim, Deviation, Note, PrintedTable, Reported, Setting, Traces
from shardlab.record_types import Sha256, limit_text

MAX_CELLS = 100_000
PlacedValues = dict[str, tuple[Any, KeyPath]]  # cell key -> (value of the key, path of this value in the matrix file)
RunCount = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class Repeats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of runs of each cell, if the cells that claims name need more runs than the other cells."""

    claims: RunCount
    """The number of runs of each cell that occurs in the test of a claim."""
    others: RunCount = 1
    """The number of runs of each other cell."""


class MatrixFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of matrix.yaml."""

    schema: Literal[1]
    """The version of the format."""
    name: Annotated[
        str,
        limit_text(
            r"^[a-z0-9][a-z0-9._-]{0,40}\Z",
            "up to 41 small letters, digits and the signs . _ -, beginning with a letter or digit",
        ),
    ]
    """The name of the matrix, as in `--matrix`."""
    title: str = ""
    """One line that says what the matrix compares."""
    source: str | None = None
    """The study that the matrix repeats; null: none."""
    text_sha256: Sha256 | None = None
    """The SHA-256 digest of the text of the study, in which the quotes of claims were looked up; null: not looked up."""
    citation: Citation | None = None
    """How to cite the study: the report has it as BibTeX; null: not known."""
    defaults: dict[str, Any] = {}
    """Keys with their values, for all cells for which no other section gives another value."""
    axes: dict[str, list[Any]] = {}
    """Each key with the list of its values; all combinations of the values are cells."""
    zip: list[dict[str, list[Any]]] = []
    """Groups of keys whose lists have the same length and are taken value by value, not crossed with each other."""
    exclude: list[dict[str, Any]] = []
    """Combinations that are left out: keys and values that they have, or a condition in `when`, and the reason in `why`."""
    include: list[dict[str, Any]] = []
    """Each entry adds its keys to the combinations whose axes it does not change; if there are none, it is a new one. An entry
    with `when` adds its keys to all cells for which its condition is true; to cells of other entries, only what they lack."""
    repeats: RunCount | Repeats = 1
    """The number of runs of each cell; of a cell whose batch size is searched: the number of searches."""
    retry: Retry = Retry()
    """How often a run is started again automatically, for each state in which it may end (docs/how-to/retry-by-itself.md)."""
    search: SearchRequest | None = None
    """How the batch size of each cell is searched (docs/how-to/search-a-batch-size.md); null: it is not searched."""
    settings: list[Setting] = []
    """Hardware and software of the study."""
    baseline: str = "single"
    """The strategy to which speed-up and efficiency are relative."""
    traces: Traces = "exact"
    """exact: traces are analysed to the nanosecond. like-hta: the study analysed its traces with HolisticTraceAnalysis (HTA),
    so the figures that HTA computes from our traces are compared with those of the study."""
    assumed: list[Assumed] = []
    """Values that the study does not state and that had to be chosen."""
    reported: list[Reported] = []
    """Numbers of the study, which the report shows beside the measured numbers."""
    tables: list[PrintedTable] = []
    """Tables of the study that are mostly text; the report shows measured values beside them."""
    claims: list[Claim] = []
    """Claims of the study, which `collect verdicts` judges."""
    notes: list[Note] = []
    """Places where the study contradicts itself or leaves a question open."""
    deviations: list[Deviation] = []
    """Differences from the matrix of the study, which `jobs plan --adapt` writes here (docs/how-to/fit-a-matrix.md), and which
    --set adds."""

    @property
    def claim_tests(self) -> list[str]:
        """The tests of all claims in this matrix file."""
        return [tested_claim.test for tested_claim in self.claims]


class Point(msgspec.Struct, frozen=True):
    """One combination of a matrix, which becomes a cell."""

    keys: dict[str, Any]
    """Cell key -> its value."""
    origin: dict[str, KeyPath]
    """Cell key -> the path of its value in the matrix file."""

    def make_draft(self) -> Draft:
        """The keys of this combination as a Draft. Raises msgspec.ValidationError if a required key is missing."""
        return msgspec.convert(_nest_dotted_keys(self.keys), Draft)


class Matrix(msgspec.Struct, frozen=True):
    """A matrix file that was read, checked and expanded."""

    file: MatrixFile
    document: Document
    """The content of the file, with the place of each value."""
    path: str
    """The path of the file."""
    points: list[Point]
    """The combinations, in the order of the axes."""
    excluded: list[ExcludedPoint]
    """The combinations that the file excludes."""
    models: dict[str, ModelFile] = {}
    """The models that the file describes by their configuration, by the names that replace them in `file` and `points`."""
    command_by_name: dict[str, CommandWorkload] = {}
    """The commands that the file gives as workloads, by the names that replace them."""
    strategy_labels: set[str] = set()
    """The strategies that are labels of commands."""

    @property
    def name(self) -> str:
        """The name of the matrix in its file."""
        return self.file.name

    def problem(self, point: Point, key: str, sentence: str) -> Problem:
        """A problem at the place of `key` of the combination `point` in the file; if `key` is missing, at its strategy."""
        return self.document.problem(find_key_path(point, key) or find_key_path(point, "strategy"), sentence)

    @property
    def varying_keys(self) -> set[str]:
        """The keys with a list of values in `axes` or `zip`."""
        return set(self.file.axes) | {key for zip_group in self.file.zip for key in zip_group}

    def entry_adds_to(self, entry_index: int, point: Point) -> bool:
        """Whether a combination has a value from entry `entry_index` of `include`."""
        return any(key_path[:2] == ("include", entry_index) for key_path in point.origin.values())


def find_shipped_matrices() -> dict[str, Path]:
    """The paths of the matrix files that are shipped with shardlab, by the names of the matrices."""
    folder = resources.files("matrices")
    matrix_paths = (Path(str(folder_entry)) for folder_entry in folder.iterdir() if folder_entry.name.endswith(".yaml"))
    return {path.stem: path for path in sorted(matrix_paths)}


def find_matrix_file(name_or_path: str) -> Path:
    """The path of a matrix file. name_or_path: a path if it contains a slash or ends with .yaml or .yml; else the name of a
    shipped matrix."""
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    shipped_files = find_shipped_matrices()
    if name_or_path not in shipped_files:
        raise UnknownName("matrix", name_or_path, shipped_files)
    return shipped_files[name_or_path]


def load_matrix(path: Path, settings: Sequence[str] = ()) -> Matrix:
    """Read, check and expand a matrix file. Raises an InputError that lists every problem with its place in the file.

    settings: the values of --set, which override those in `defaults`."""
    matrix_document = document.load_document(path)
    overrides.override_defaults(matrix_document, settings)
    matrix = expand_matrix(matrix_document, path.parent)
    for (_, key), option in matrix_document.option_by_path.items():
        if not any(point.origin.get(str(key)) == ("defaults", key) for point in matrix.points):
            raise InputError(
                f"{option}: changes no cell, because `axes`, `zip`, `include` or `search` gives {key} for each cell. Allowed: "
                "another key, or --where to select cells."
            )
    return matrix


def expand_matrix(document: Document, folder: Path) -> Matrix:
    """Check and expand a matrix file that was read. folder: contains the models that the file names. Raises InputError."""
    matrix_file = validation.convert_document(document, MatrixFile)
    problems: list[Problem] = []
    _check_keys(document, matrix_file, problems)
    _check_study(document, matrix_file, problems)
    problems += search_check.find_search_problems(document)
    section_by_name = {name: getattr(matrix_file, name) for name in ("defaults", "axes", "zip", "include", "exclude")}
    model_by_name = {} if problems else model_file.replace_models(document, section_by_name, folder, problems)
    command_by_name = {} if problems else command.replace_commands(document, section_by_name, folder, problems)
    labels = set[str]() if problems else command.replace_labels(section_by_name)
    if problems:
        raise document.errors(problems)
    remaining_points, excluded_points = _expand_axes(document, matrix_file)
    if not remaining_points:
        raise document.error(("axes",), "no cell is left: all combinations are excluded, or the file lists none.")
    return Matrix(
        matrix_file, document, document.file, remaining_points, excluded_points, model_by_name, command_by_name, labels
    )


def key_type(key: str) -> Any:
    """The type that the value of a cell key must have; None if the key does not exist. The key may be dotted (optimizer.lr)."""
    key_head, _, key_tail = key.partition(".")
    if key == "workload":
        return str | ModelByConfiguration  # a name, or a configuration, which `expand_matrix` replaces by a name
    if key == "strategy":
        return str | StrategyLabel
    type_by_field = {field.name: field.type for field in msgspec.structs.fields(Draft)}
    if not key_tail:
        return type_by_field.get(key_head)
    if key_head == "options":
        return bool | int | float | str | None
    if key_head in ("set", "env"):
        return bool | int | float | str
    for mapping_key, mapping_type in (("optimizer", Optimizer), ("schedule", Schedule), ("instruments", Instruments)):
        if key_head == mapping_key:
            return {field.name: field.type for field in msgspec.structs.fields(mapping_type)}.get(key_tail)
    return None


def find_key_path(point: Point, key: str) -> KeyPath:
    """The path in the matrix file of the value that `point` has for `key`; empty if the file has no such value.

    The file may contain the value of a dotted key (`optimizer.lr`) under this key, or in the mapping `optimizer`.
    """
    key_head, _, key_tail = key.partition(".")
    if key in point.origin:
        return point.origin[key]
    return (*point.origin[key_head], key_tail) if key_tail and key_head in point.origin else point.origin.get(key_head, ())


def _check_keys(doc: Document, matrix_file: MatrixFile, problems: list[Problem]) -> None:
    for key, value in matrix_file.defaults.items():
        _check_value(doc, key, value, ("defaults", key), problems)
    axis_groups: list[tuple[KeyPath, dict[str, list[Any]]]] = [(("axes",), matrix_file.axes)]
    axis_groups += [(("zip", index), group) for index, group in enumerate(matrix_file.zip)]
    path_by_key: dict[str, KeyPath] = {}
    for path, group in axis_groups:
        for key, values in group.items():
            if key in path_by_key:
                problems.append(doc.problem((*path, key), f"already has a list at {document.format_path(path_by_key[key])}."))
            path_by_key[key] = (*path, key)
            if not values:
                problems.append(doc.problem((*path, key), "found an empty list. Allowed: one value or more."))
            for index, value in enumerate(values):
                _check_value(doc, key, value, (*path, key, index), problems)
        if path[0] == "zip" and len({len(values) for values in group.values()}) > 1:
            list_lengths = ", ".join(f"{key}: {len(values)}" for key, values in group.items())
            problems.append(doc.problem(path, f"the lists of one zip must have the same length, found {list_lengths}."))
    for section_name, entries in (("exclude", matrix_file.exclude), ("include", matrix_file.include)):
        for index, entry in enumerate(entries):
            _check_entry(doc, section_name, index, entry, problems)


def _check_entry(document: Document, section: str, entry_index: int, entry: dict[str, Any], problems: list[Problem]) -> None:
    path: KeyPath = (section, entry_index)
    if section == "exclude" and not isinstance(entry.get("why"), str):
        problems.append(
            document.problem(path, "the key 'why' is missing: say in a sentence why this cell cannot or need not run.")
        )
    for key, value in entry.items():
        if key == "why":
            continue
        if key == "when":
            try:
                expression = Expression(value if isinstance(value, str) else "")
                unknown_keys = sorted(name for name in expression.names if key_type(name) is None)
                if unknown_keys or expression.calls:
                    allowed = ", ".join(field.name for field in msgspec.structs.fields(Draft))
                    raise ExpressionError(f"unknown name {(unknown_keys or sorted(expression.calls))[0]!r}. Allowed: {allowed}")
            except ExpressionError as error:
                problems.append(document.problem((*path, key), f"{error}."))
        else:
            _check_value(document, key, value, (*path, key), problems)
    if not set(entry) - {"why", *(["when"] if section == "include" else [])}:
        problems.append(
            document.problem(path, "an entry without any cell key. Allowed: one cell key or more; in exclude, `when` alone.")
        )


def _check_value(document: Document, key: str, value: Any, key_path: KeyPath, problems: list[Problem]) -> None:
    value_type = key_type(key)
    if key == "workload" and isinstance(value, dict) and "command" in value:
        value_type = CommandWorkload
    key_head, _, own_name = key.partition(".")
    explain_wrong_name = {"set": command.explain_wrong_setting, "env": command.explain_wrong_variable}.get(key_head)
    if explain_wrong_name is not None and own_name and (fault := explain_wrong_name(own_name)) is not None:
        problems.append(document.problem(key_path, f"found {own_name!r}. {fault}", at_key=isinstance(key_path[-1], str)))
    if value_type is None:
        draft_keys = [field.name for field in msgspec.structs.fields(Draft)]
        sentence = str(UnknownName("cell key", key, draft_keys)) + " Options of a strategy or workload belong under `options`."
        problems.append(document.problem(key_path if isinstance(key_path[-1], str) else key_path[:-1], sentence, at_key=True))
    else:
        validation.check_value(document, value, value_type, key_path, problems)


def _check_study(document: Document, file: MatrixFile, problems: list[Problem]) -> None:
    """Check that the entries about the study (assumed, settings, reported, claims) use only keys and metrics that exist.

    problems: a problem is appended for each wrong key, value or metric.
    """
    for index, assumed in enumerate(file.assumed):
        if key_type(assumed.key) is None:
            draft_keys = [field.name for field in msgspec.structs.fields(Draft)]
            problems.append(document.problem(("assumed", index, "key"), str(UnknownName("cell key", assumed.key, draft_keys))))
            continue
        for value in assumed.value if isinstance(assumed.value, list) else [assumed.value]:  # a list: each item is a value
            _check_value(document, assumed.key, value, ("assumed", index, "value"), problems)
    sections: tuple[tuple[str, Sequence[Setting | Reported]], ...] = (("settings", file.settings), ("reported", file.reported))
    for section, entries in sections:
        for index, entry in enumerate(entries):
            for selector_name, cell in (
                ("cell", entry.cell),
                ("against", entry.against if isinstance(entry, Reported) else {}),
            ):
                for key in cell:
                    if not is_cell_name(key):
                        problems.append(
                            document.problem((section, index, selector_name, key), _explain_unknown(key), at_key=True)
                        )
    problems += claim_check.find_table_problems(document, file.tables)
    problems += claim_check.find_long_quotes(document, file.claims)
    problems += claim_check.find_claim_problems(document, file.claim_tests, [entry.metric for entry in file.reported])


def _explain_unknown(key: str) -> str:
    return str(UnknownName("name of a resolved cell", key, PLAIN_NAMES))


def _expand_axes(document: Document, matrix_file: MatrixFile) -> tuple[list[Point], list[ExcludedPoint]]:
    default_values: PlacedValues = {k: (value, ("defaults", k)) for k, value in matrix_file.defaults.items()}
    combination_count = 1
    for values in itertools.chain(matrix_file.axes.values(), (next(iter(group.values()), []) for group in matrix_file.zip)):
        combination_count *= len(values)
    if combination_count > MAX_CELLS:
        raise document.error(("axes",), f"found {combination_count} combinations. Allowed: {MAX_CELLS} or fewer.")
    has_new_points = any("when" not in entry for entry in matrix_file.include)
    axis_points = list(_cross_axes(matrix_file)) if matrix_file.axes or matrix_file.zip else [{}] if not has_new_points else []
    remaining_points: list[PlacedValues] = []
    excluded_points: list[ExcludedPoint] = []
    for axis_point in axis_points:
        point = _merge_layers(default_values, axis_point)
        exclusion_reason = explain_exclusion(document, matrix_file, _strip_paths(point))
        if exclusion_reason is None:
            remaining_points.append(axis_point)
        else:
            excluded_points.append(ExcludedPoint(_strip_paths(point), exclusion_reason))
    merged_points = _include_entries(document, matrix_file, remaining_points, default_values)
    if matrix_file.search is not None:
        for point in merged_points:
            pass_count = point["microbatches"][0] if "microbatches" in point else 1
            point[matrix_file.search.key] = (PLACEHOLDER_SIZE * (pass_count or 1), ("search",))
    return [Point(_strip_paths(p), {k: value_path for k, (_, value_path) in p.items()}) for p in merged_points], excluded_points


def _include_entries(
    document: Document, file: MatrixFile, axis_points: Sequence[PlacedValues], default_values: PlacedValues
) -> list[PlacedValues]:
    """All combinations with all their keys: those of the axes, and then the new combinations of `include`."""
    varying_keys = set(file.axes) | {key for group in file.zip for key in group}
    added_entries: list[PlacedValues] = [
        {key: (value, ("include", index, key)) for key, value in entry.items() if key not in ("when", "why")}
        for index, entry in enumerate(file.include)
    ]

    def select_points(index: int, points: Sequence[PlacedValues]) -> list[int]:
        try:
            return [
                n
                for n, point in enumerate(points)
                if _entry_applies(point, added_entries[index], varying_keys, file.include[index].get("when"), default_values)
            ]
        except ExpressionError as error:
            raise document.error(("include", index, "when"), f"{error}.") from None

    added_values: list[PlacedValues] = [{} for _ in axis_points]
    matching_points = [select_points(index, axis_points) for index in range(len(added_entries))]
    for entry, point_indexes in zip(added_entries, matching_points, strict=True):
        for n in point_indexes:
            added_values[n].update({key: value for key, value in entry.items() if key not in varying_keys})
    is_new = [not point_indexes and "when" not in file.include[index] for index, point_indexes in enumerate(matching_points)]
    new_points = [entry for entry, is_new_point in zip(added_entries, is_new, strict=True) if is_new_point]
    added_to_new: list[PlacedValues] = [{} for _ in new_points]
    for index, entry in enumerate(added_entries):
        if "when" in file.include[index]:
            point_indexes = select_points(index, new_points)
            for n in point_indexes:
                added_to_new[n].update({key: value for key, value in entry.items() if not _has_key(new_points[n], key)})
            if not point_indexes and not matching_points[index]:
                raise document.error(("include", index, "when"), "is true for no combination of this matrix.")
    points = [_merge_layers(default_values, point, added) for point, added in zip(axis_points, added_values, strict=True)]
    return points + [_merge_layers(default_values, added, point) for point, added in zip(new_points, added_to_new, strict=True)]


def _has_key(point: PlacedValues, key: str) -> bool:
    """Whether a combination gives a value for a key, or for a dotted key in its mapping."""
    key_head, _, key_tail = key.partition(".")
    return key in point or bool(key_tail and key_head in point and key_tail in (point[key_head][0] or {}))


def _cross_axes(matrix_file: MatrixFile) -> Iterator[PlacedValues]:
    choice_lists: list[list[PlacedValues]] = [
        [{key: (value, ("axes", key, i))} for i, value in enumerate(values)] for key, values in matrix_file.axes.items()
    ]
    for zip_index, group in enumerate(matrix_file.zip):
        zip_rows = zip(*([(key, i, value) for i, value in enumerate(values)] for key, values in group.items()), strict=True)
        choice_lists.append([{key: (value, ("zip", zip_index, key, i)) for key, i, value in zip_row} for zip_row in zip_rows])
    for combination in itertools.product(*choice_lists):
        yield {key: value for part in combination for key, value in part.items()}


def _merge_layers(*layers: PlacedValues) -> PlacedValues:
    """Merge several sets of keys with values into one set. If several sets have a key, the value in the last set is used.

    `gpu_batch_size` and `global_batch_size` replace each other, and so do `steps` and `epochs`.
    """
    merged_values: PlacedValues = {}
    for key_layer in layers:
        for key, other_key in overrides.REPLACING_KEYS:
            if (key in key_layer) != (other_key in key_layer):
                merged_values.pop(other_key if key in key_layer else key, None)
        merged_values.update(key_layer)
    return merged_values


def _entry_applies(
    point_values: PlacedValues, added_keys: PlacedValues, varying_keys: set[str], condition: str | None, defaults: PlacedValues
) -> bool:
    if any(
        key in varying_keys & point_values.keys() and point_values[key][0] != value for key, (value, _) in added_keys.items()
    ):
        return False
    return condition is None or bool(_condition_holds(condition, _strip_paths(_merge_layers(defaults, point_values))))


def explain_exclusion(document: Document, matrix_file: MatrixFile, value_by_key: dict[str, Any]) -> str | None:
    """Why a matrix file excludes the combination `value_by_key`; None if it does not. document: the matrix file. matrix_file:
    its content."""
    for entry_index, entry in enumerate(matrix_file.exclude):
        required_values = {k: v for k, v in entry.items() if k not in ("why", "when")}
        if any(value_by_key.get(key) != value for key, value in required_values.items()):
            continue
        try:
            if "when" not in entry or _condition_holds(entry["when"], value_by_key):
                return str(entry["why"])
        except ExpressionError as error:
            raise document.error(("exclude", entry_index, "when"), f"{error}.") from None
    return None


def _condition_holds(expression_text: str, keys: dict[str, Any]) -> bool:
    expression, nested_keys = Expression(expression_text), _nest_dotted_keys(keys)
    fields = msgspec.structs.fields(Draft)
    value_by_name = {field.name: None if field.default is msgspec.NODEFAULT else field.default for field in fields} | keys
    for key_head, key_tail in (name.split(".") for name in expression.names if "." in name):
        value_by_name[f"{key_head}.{key_tail}"] = (nested_keys.get(key_head) or {}).get(key_tail)
    return bool(expression.evaluate(value_by_name))


def _strip_paths(point: PlacedValues) -> dict[str, Any]:
    return {key: value for key, (value, _) in point.items()}


def _nest_dotted_keys(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of a cell, in which each dotted key, such as optimizer.lr, has become a member of the mapping `optimizer`."""
    nested_keys = {key: dict(value) if isinstance(value, dict) else value for key, value in keys.items() if "." not in key}
    for key, value in keys.items():
        key_head, _, key_tail = key.partition(".")
        if key_tail:
            nested_keys[key_head] = {**(nested_keys.get(key_head) or {}), key_tail: value}
    return nested_keys
