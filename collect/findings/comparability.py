"""Decides which cells may be compared: cells that do the same work in different ways.

It also finds runs whose GPUs were shared or throttled, because their cells are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import polars as pl

from collect.loading.loaded_run import LoadedRun
from collect.metric import Compared
from collect.reading.load import Loaded, LoadedCell
from collect.sources.samples import measured, within
from collect.sources.steps import window
from shardlab.errors import UnknownName
from shardlab.hardware.nvml import POWER_CAP
from shardlab.matrix import faults
from shardlab.matrix.cell import Cell, Role, keys_of

LEAST_SHARE = 0.05  # a GPU is reported if at least this share of its samples shows trouble: shorter trouble hardly matters
# Keys that may differ between cells that do the same work. Options of the workload are compared separately.
_MEANS = keys_of(Role.STRATEGY, Role.EXECUTION, Role.RANKS, Role.PASSES, Role.NODES, Role.INSTRUMENTS, Role.BOOKKEEPING)
_LENGTH = keys_of(Role.LENGTH, Role.DATA)


def same_work(one: Cell, other: Cell) -> bool:
    """Whether two cells train the same model on the same batches with the same instruments.

    They may differ only in how the ranks share the work.
    """
    # Instruments must be equal: in a matrix that runs each cell with and without instruments, a cell would otherwise do the
    # same work as two other cells.
    means = _MEANS - {"instruments"}
    return _without(one, means) == _without(other, means) and _options_agree(one, other)


def work(cell: Mapping[str, Any], options: AbstractSet[str]) -> dict[str, Any]:
    """The keys of a cell that describe its work, without the keys that describe how the ranks share the work.

    cell: in its plain form (dicts and lists). options: the names of the options to include.

    The result is equal for cells that train the same model on the same batches. If the cells are tiny twins, the large cells
    that the tiny twins represent must also be equal.
    """
    plain = {key: value for key, value in cell.items() if key not in _MEANS}
    plain["options"] = {key: value for key, value in cell["options"].items() if key in options}
    plain["rehearses"] = work(cell["rehearses"], options) if cell.get("rehearses") else None
    if faulty := faults.said(cell["instruments"]):  # a cell with a fault on purpose is only compared with its like
        plain["fault"] = faulty
    return plain


def different_computation(cells: Iterable[Cell]) -> str | None:
    """A remark about the ratio of metrics of these cells if the cells differ in precision; None if all have the same
    precision."""
    precisions = list(dict.fromkeys(cell.precision for cell in cells))
    return f"different computation: precision {' and '.join(precisions)}" if len(precisions) > 1 else None


def differ_only_in_launcher(one: Cell, other: Cell) -> bool:
    """Whether two cells differ in the launcher and in no other key."""
    return one.launcher != other.launcher and _without(one, {"launcher"}) == _without(other, {"launcher"})


def baseline_strategy(asked: str | None, loaded: Loaded) -> str:
    """The strategy that speed-ups are relative to: `asked`, or the baseline of the matrix if `asked` is None.

    Raises UnknownName if no cell of the matrix uses the strategy `asked`.
    """
    strategies = {cell.cell.strategy for cell in loaded.cells}
    if asked is not None and asked not in strategies:
        raise UnknownName("baseline strategy", asked, strategies)
    return asked or loaded.expansion.baseline


def baseline_of(cell: LoadedCell, cells: Sequence[LoadedCell], strategy: str) -> LoadedCell | None:
    """The completed cell of the baseline strategy with which `cell` is compared, or None if there is no such cell.

    The baseline cell has the same workload, launcher, precision, sequence length, optimizer and faults on purpose as `cell`,
    and the same global batch size or the same batch size per rank. If there are several such cells, a cell with the same
    instruments is preferred, then the cell with the fewest ranks, then a cell with the same global batch size, and then `cell`
    itself.
    """
    candidates: list[tuple[bool, int, bool, bool, LoadedCell]] = []
    for other in cells:
        if other.cell.strategy != strategy or not other.completed:
            continue
        alike = _without(cell.cell, _MEANS | _LENGTH) == _without(other.cell, _MEANS | _LENGTH)
        how = Compared(cell.cell, 1, other.cell, 1).scaling
        if alike and how and _options_agree(cell.cell, other.cell) and _same_faults(cell.cell, other.cell):
            other_instruments = other.cell.instruments != cell.cell.instruments
            candidates.append((other_instruments, other.cell.gpus, how != "strong", other is not cell, other))
    return min(candidates, key=lambda entry: entry[:4])[4] if candidates else None


def instruments_differ(cells: Iterable[Mapping[str, Any]]) -> bool:
    """Whether these cells have different instruments. cells: in their plain form (dicts and lists)."""
    return len({repr(cell["instruments"]) for cell in cells}) > 1


def without_instruments(cell: Mapping[str, Any]) -> bytes:
    """A key that is equal for cells that differ only in their instruments. cell: in its plain form (dicts and lists).

    The key is also equal if the cells are tiny twins, and the large cells that they represent differ only in their instruments.
    """
    others = {key: value for key, value in cell.items() if key not in ("instruments", "rehearses")}
    if cell.get("rehearses"):
        others["rehearses"] = {key: value for key, value in cell["rehearses"].items() if key != "instruments"}
    return msgspec.json.encode(others, order="deterministic")


def without_faults(cell: Mapping[str, Any]) -> bytes:
    """A key that is equal for cells that differ only in their faults on purpose, and in keys that cannot change what is
    measured. cell: in its plain form."""
    kept = {key: value for key, value in cell.items() if key not in keys_of(Role.BOOKKEEPING)}
    kept["instruments"] = {key: value for key, value in cell["instruments"].items() if key not in ("straggler", "lost_worker")}
    inner = without_faults(cell["rehearses"]).decode() if cell.get("rehearses") else None
    return msgspec.json.encode([kept, inner], order="deterministic")


def families(cells: Iterable[LoadedCell]) -> list[list[LoadedCell]]:
    """Group the cells by the keys that must be equal for any comparison in this module.

    Only cells of the same group need to be compared with each other, which saves time in a sweep with thousands of cells.
    """
    cells_of: dict[bytes, list[LoadedCell]] = {}
    for cell in cells:
        key = msgspec.json.encode(_without(cell.cell, _MEANS | _LENGTH | {"launcher"}), order="deterministic")
        cells_of.setdefault(key, []).append(cell)
    return list(cells_of.values())


def _without(cell: Cell, keys: AbstractSet[str]) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(cell).items() if key not in keys}


def _same_faults(one: Cell, other: Cell) -> bool:
    """Whether two cells have the same faults on purpose."""
    ours, theirs = one.instruments, other.instruments
    return (ours.straggler, ours.lost_worker) == (theirs.straggler, theirs.lost_worker)


def _options_agree(one: Cell, other: Cell) -> bool:
    """Whether the options that both cells have are equal. Options that only one cell has belong to its strategy."""
    return all(one.options[key] == other.options[key] for key in one.options.keys() & other.options.keys())


def gpu_trouble(run: LoadedRun) -> str:
    """A text that names the GPUs of a run that had trouble while steps were timed; '' if no GPU had trouble.

    A GPU had trouble if it was shared or throttled in at least 5 % of its samples, was lost, or had errors. A GPU at its power
    limit does not count as throttled, because many GPUs reach the limit at full load. The text is also '' if telemetry does not
    record processes and clocks, or if the result of the run does not name its GPUs.
    """
    if run.result is None or run.run is None or not run.result.gpus or (span := window(run.timed)) is None:
        return ""
    seen = within(measured(run.samples.gpus).filter(pl.col("uuid").is_in(run.result.gpus)), span)
    own = -(-run.run.cell.gpus // len(run.result.gpus))  # number of ranks of this run on each GPU; each rank is one process
    clauses = []
    if shared := _named(seen.filter(pl.col("processes") > own), seen):
        clauses.append(f"other processes computed on {shared}")
    slowed = seen.explode("throttled").drop_nulls("throttled").filter(pl.col("throttled") != POWER_CAP)
    for reason in sorted(slowed["throttled"].unique()):
        if named := _named(slowed.filter(pl.col("throttled") == reason), seen):
            clauses.append(f"{named} had lowered clocks ({reason})")
    clauses += _errors(seen)
    return "; ".join(clauses)


def _errors(seen: pl.DataFrame) -> list[str]:
    """Clauses about GPUs that were lost, whose driver reported an error, or that had memory errors that were not corrected."""
    clauses = []
    if lost := sorted(seen.filter("lost")["uuid"].unique()):
        clauses.append(f"{', '.join(lost)} was lost")
    reported = seen.explode("xids").drop_nulls("xids").select("uuid", "xids").unique().sort("uuid", "xids")
    clauses += [f"the driver reported error {xid} (XID) of {uuid}" for uuid, xid in reported.iter_rows()]
    ecc = seen.drop_nulls("ecc_uncorrected").group_by("uuid").agg(grown=pl.max("ecc_uncorrected") - pl.min("ecc_uncorrected"))
    if broken := sorted(ecc.filter(pl.col("grown") > 0)["uuid"]):
        clauses.append(f"{', '.join(broken)} had memory errors that ECC did not correct")
    return clauses


def _named(rows: pl.DataFrame, seen: pl.DataFrame) -> str:
    """The UUIDs of the GPUs that have at least LEAST_SHARE of their samples in `rows`.

    rows: the samples with a certain trouble. seen: all samples.
    """
    samples = dict(seen["uuid"].value_counts().iter_rows())
    return ", ".join(
        sorted(uuid for uuid, count in rows["uuid"].value_counts().iter_rows() if count >= LEAST_SHARE * samples[uuid])
    )
