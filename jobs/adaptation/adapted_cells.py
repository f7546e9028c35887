"""Finds for each cell of a matrix the nearest cell that fits a cluster.

Changes are tried in this order, and the first that fits is used:

1. No change.
2. A GPU type, a launcher and a time limit that the cluster has (`adapted_means`). If such a change is not enough, it is part of
   the changes below.
3. Fewer GPUs. All cells with one number of GPUs and nodes get the same new number, so that strategies stay comparable: the
   largest divisor of the number of GPUs on which one of these cells can run. For each number of GPUs, the number of nodes is
   kept if possible; else its largest divisor that fits is used. A cell of several GPUs never becomes a cell of one GPU, because
   such a cell distributes nothing.
4. Smaller degrees of the parallelism that a strategy combines (dp, tp, pp), if the file gives degrees whose product has to
   match the new number of GPUs. Each new degree divides the old one, and a degree above 1 stays above 1.
5. The cell is left out.

Batch sizes are not changed: a batch for each GPU stays the batch for each GPU, and a global batch stays the global batch. So
memory is not looked at: out of memory is a result of a cell, and another batch would be another question.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from jobs.adaptation import adapted_means
from jobs.adaptation.adapted_means import ReplacedValue
from jobs.planning.resolve import Capacity, find_misfits, resolve_cells
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.errors import InputError
from shardlab.matrix import matrix
from shardlab.matrix.cell import AnyCell
from shardlab.matrix.matrix import Matrix, Point

DEGREES = ("dp", "tp", "pp")


class CellSize(msgspec.Struct, frozen=True):
    """What decides whether cells fit a cluster, as the matrix file gives it."""

    gpus: int
    nnodes: int | None
    """None if the file does not give it."""
    gpu_type: str | None
    launcher: str


class AdaptedCell(msgspec.Struct, frozen=True):
    """What becomes of a cell of a matrix."""

    point: Point
    """The combination of the matrix file, with its new `defaults`."""
    original_cell: AnyCell
    """The cell of the study."""
    new_keys: dict[str, Any] | None
    """The keys of the new cell; None if the cell is left out."""
    new_cell: AnyCell | None
    """The new cell; None if the cell is left out."""
    why: str
    """The reason for another number of GPUs, or why the cell is left out, in a sentence without a full stop; else empty."""
    replaced_values: tuple[ReplacedValue, ...] = ()
    """The other values that changed."""

    @property
    def is_unchanged(self) -> bool:
        """Whether the combination stays what it is in the file. Its cell may have changed with `defaults`."""
        return self.new_keys == self.point.keys

    @property
    def reason(self) -> str:
        """Why the cell changes or is left out; empty if it does not change."""
        return self.why or ", ".join(replaced_value.why for replaced_value in self.replaced_values)


class CellFitter(msgspec.Struct, frozen=True):
    """The matrix, and the machines and plug-ins with which its cells are resolved."""

    matrix: Matrix
    machine: Capacity
    plugins: OwnPlugins

    def try_keys(self, point: Point, keys: dict[str, Any]) -> AnyCell | str:
        """The cell with these keys. If the cell is not possible or does not fit, the reason as text. point: the combination of
        the matrix file that the cell comes from."""
        single_cell_matrix = keep_only_points(self.matrix, [Point(keys, point.origin)])
        try:
            cells = resolve_cells(
                single_cell_matrix, cluster=None if self.machine.is_this_machine else self.machine, plugins=self.plugins
            )
        except InputError as error:
            first_line = str(error).splitlines()[0].removeprefix(f"{self.matrix.document.file}:")
            return re.sub(r"^\d+:\d+: (\S+: )?", "", first_line).rstrip(".")
        found_misfits = find_misfits(single_cell_matrix, cells, self.machine, cells)
        return found_misfits[0].why.rstrip(".") if found_misfits else cells[0]

    def resize_cell(
        self, point: Point, original_cell: AnyCell, gpus: int, nnodes: int | None
    ) -> tuple[dict[str, Any], AnyCell] | str:
        """The keys and the cell of a combination on another number of GPUs and nodes; the reason if no such cell fits."""
        refusal = ""
        for degrees in _list_changed_degrees(point, original_cell, gpus):
            new_keys = {**point.keys, **degrees}
            new_keys |= {"gpus": gpus} if gpus != original_cell.gpus else {}
            new_keys |= {"nnodes": nnodes} if nnodes != point.keys.get("nnodes") else {}
            fitted_cell = self.try_keys(point, new_keys)
            if isinstance(fitted_cell, AnyCell):
                return new_keys, fitted_cell
            refusal = refusal or fitted_cell
        return refusal or "its degrees of parallelism would become 1"


def keep_only_points(requested_matrix: Matrix, points: list[Point]) -> Matrix:
    """The matrix with only these combinations, and without claims, which could name other cells."""
    return msgspec.structs.replace(
        requested_matrix, points=points, file=msgspec.structs.replace(requested_matrix.file, claims=[])
    )


def adapt_cells(
    requested_matrix: Matrix, machine: Capacity, plugins: OwnPlugins, original_matrix: Matrix | None = None
) -> list[AdaptedCell]:
    """What becomes of each cell of a matrix on these machines, in the order of the matrix.

    plugins: the plug-ins of the workspace. original_matrix: the matrix with the `defaults` of the study; None:
    `requested_matrix` has them. Raises InputError if the matrix is not valid on any machine."""
    fitter, original_matrix = CellFitter(requested_matrix, machine, plugins), original_matrix or requested_matrix
    cells = resolve_cells(keep_only_points(original_matrix, original_matrix.points), plugins=plugins)
    replaced_values = [adapted_means.find_replaced_values(point.keys, machine) for point in original_matrix.points]
    # The combinations with all values that the cluster has, apart from numbers of GPUs.
    start_points = [
        Point(point.keys | {key: replaced_value.new_value for key, replaced_value in point_values.items()}, point.origin)
        for point, point_values in zip(requested_matrix.points, replaced_values, strict=True)
    ]
    cells_by_size: dict[CellSize, list[tuple[Point, AnyCell]]] = {}
    for start_point, cell in zip(start_points, cells, strict=True):
        cells_by_size.setdefault(_make_cell_size(start_point, cell), []).append((start_point, cell))
    new_sizes = {size: _find_nearest_size(fitter, size, cells_of_size) for size, cells_of_size in cells_by_size.items()}
    return [
        msgspec.structs.replace(
            _adapt_cell(fitter, point, start_point, cell, new_sizes[_make_cell_size(start_point, cell)]),
            replaced_values=tuple(point_values.values()),
        )
        for point, start_point, cell, point_values in zip(
            requested_matrix.points, start_points, cells, replaced_values, strict=True
        )
    ]


def _adapt_cell(
    fitter: CellFitter, point: Point, start_point: Point, original_cell: AnyCell, new_size: tuple[int, int | None] | None
) -> AdaptedCell:
    """What becomes of one cell. point: its combination. start_point: the same with the values that the cluster has."""
    unresized_cell = fitter.try_keys(start_point, start_point.keys)
    capacity_text = ""
    if isinstance(unresized_cell, AnyCell):
        new_keys, new_cell = start_point.keys, unresized_cell
    elif new_size is None or new_size == (original_cell.gpus, start_point.keys.get("nnodes")):
        # no size fits, or the size is not why the cell does not fit
        return AdaptedCell(point, original_cell, None, None, unresized_cell)
    else:
        fitted_cell = fitter.resize_cell(start_point, original_cell, *new_size)
        capacity_text = f"a run can have {_describe_capacity(fitter.machine, start_point)}"
        if isinstance(fitted_cell, str):
            return AdaptedCell(point, original_cell, None, None, f"{capacity_text}; on {new_size[0]} GPUs: {fitted_cell}")
        new_keys, new_cell = fitted_cell
    if comes_from_axes(start_point) and new_keys != point.keys:
        axis_keys = {key: value for key, value in new_keys.items() if start_point.origin[key][0] != "include"}
        if (exclusion_reason := matrix.explain_exclusion(fitter.matrix.document, fitter.matrix.file, axis_keys)) is not None:
            fit_clause = (
                f"{capacity_text}; on {new_size[0]} GPUs"
                if capacity_text and new_size is not None
                else "with the values that the cluster has"
            )
            return AdaptedCell(point, original_cell, None, None, f"{fit_clause} the matrix excludes it: {exclusion_reason}")
    return AdaptedCell(point, original_cell, new_keys, new_cell, capacity_text)


def _describe_capacity(machine: Capacity, start_point: Point) -> str:
    """The machines that a run of a combination can have, in words."""
    capacity = machine.for_gpu_type(start_point.keys.get("gpu_type")) or machine
    nodes_text = "" if capacity.nodes is None else f"{capacity.nodes} node{'' if capacity.nodes == 1 else 's'}"
    gpus_text = "" if capacity.gpus is None else f"{capacity.gpus} GPU{'' if capacity.gpus == 1 else 's'} on each node"
    return " and ".join(filter(None, (nodes_text, gpus_text)))


def comes_from_axes(point: Point) -> bool:
    """Whether a combination comes from the axes or zips of the file, and not from an entry of `include` of its own."""
    sections = {key_path[0] for key_path in point.origin.values()}
    return bool(sections & {"axes", "zip"}) or "include" not in sections


def _make_cell_size(start_point: Point, cell: AnyCell) -> CellSize:
    point_keys = start_point.keys
    return CellSize(cell.gpus, point_keys.get("nnodes"), point_keys.get("gpu_type"), point_keys.get("launcher", cell.launcher))


def _find_nearest_size(
    fitter: CellFitter, size: CellSize, cells_of_size: list[tuple[Point, AnyCell]]
) -> tuple[int, int | None] | None:
    """The new number of GPUs and nodes for all cells of one size: the first candidate on which at least one of these cells
    fits; None if no cell fits on any candidate."""
    for gpus in _list_divisors(size.gpus):
        for nnodes in [None] if size.nnodes is None else _list_divisors(size.nnodes):
            if any(not isinstance(fitter.resize_cell(point, cell, gpus, nnodes), str) for point, cell in cells_of_size):
                return gpus, nnodes
    return None


def _list_divisors(number: int) -> list[int]:
    """The divisors of a number, the largest first."""
    return [divisor for divisor in range(number, 0, -1) if number % divisor == 0]


def _list_changed_degrees(point: Point, original_cell: AnyCell, new_gpus: int) -> Iterator[dict[str, int]]:
    """Yields the degrees (dp, tp, pp) that must change in the file if the cell has `new_gpus` GPUs, the best choice first: as
    few degrees as possible change, and tp stays as large as possible. A mapping is empty if the file gives no degree that must
    change."""
    if new_gpus == original_cell.gpus:
        yield {}
        return
    old_degrees = {degree_name: getattr(original_cell, degree_name) for degree_name in DEGREES}
    candidate_degrees = [
        {"dp": dp, "tp": tp, "pp": pp}
        for dp in _list_divisors(old_degrees["dp"])
        for tp in _list_divisors(old_degrees["tp"])
        for pp in _list_divisors(old_degrees["pp"])
        if dp * tp * pp == new_gpus
    ]
    candidate_degrees = [
        new_degrees
        for new_degrees in candidate_degrees
        if not any(new_degrees[degree_name] == 1 < old_degrees[degree_name] for degree_name in DEGREES)
    ]
    for new_degrees in sorted(
        candidate_degrees,
        key=lambda new_degrees: (
            sum(new_degrees[degree_name] != old_degrees[degree_name] for degree_name in DEGREES),
            -new_degrees["tp"],
            -new_degrees["pp"],
        ),
    ):
        yield {
            degree_name: new_degrees[degree_name]
            for degree_name in DEGREES
            if point.keys.get(degree_name) not in (None, new_degrees[degree_name])
        }
