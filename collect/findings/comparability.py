"""Decides which cells may be compared, those that do the same work in different ways, and which cell is a cell's baseline.

It also finds runs whose GPUs were shared or throttled, because their cells are not compared. Here the keys of cells decide.
Whether a strategy really did the same work is proven when it runs (trainers/proof/proof.py); cells of two matrices are compared
in collect/comparison/.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import polars as pl

from collect.loading.loaded_run import LoadedRun
from collect.metric import MeanPair
from collect.reading.load import LoadedCell, LoadedMatrix
from collect.sources.samples import select_in_window, select_real_gpus
from collect.sources.steps import find_timed_window
from shardlab.errors import UnknownName
from shardlab.hardware.nvml import POWER_CAP
from shardlab.matrix import faults
from shardlab.matrix.cell import STRATEGY_OPTIONS, AnyCell, Role, find_role_keys
from shardlab.matrix.gradient_sync import describe_sync_difference

MIN_TROUBLE_SHARE = (
    0.05  # a GPU is reported if at least this share of its samples shows trouble: shorter trouble hardly matters
)
# Keys that may differ between cells that do the same work. Options of the workload are compared separately.
_MAY_DIFFER_KEYS = find_role_keys(
    Role.STRATEGY, Role.EXECUTION, Role.RANKS, Role.PASSES, Role.NODES, Role.INSTRUMENTS, Role.BOOKKEEPING
)
_LENGTH_KEYS = find_role_keys(Role.LENGTH, Role.DATA)


def is_same_work_expected(cell: AnyCell, other: AnyCell) -> bool:
    """Whether two cells train the same model on the same batches with the same instruments.

    They may differ only in how the ranks share the work.
    """
    # Instruments must be equal: in a matrix that runs each cell with and without instruments, a cell would otherwise do the
    # same work as two other cells.
    ignored_keys = _MAY_DIFFER_KEYS - {"instruments"}
    return _drop_keys(cell, ignored_keys) == _drop_keys(other, ignored_keys) and _have_equal_options(cell, other)


def describe_work(cell: Mapping[str, Any], option_names: AbstractSet[str]) -> dict[str, Any]:
    """The keys of a cell that describe its work, without the keys that describe how the ranks share the work.

    cell: in its plain form (dicts and lists). option_names: the names of the options to include.

    The result is equal for cells that train the same model on the same batches. If the cells are tiny twins, the large cells
    that the tiny twins represent must also be equal.
    """
    description = {key: value for key, value in cell.items() if key not in _MAY_DIFFER_KEYS}
    description["options"] = {key: value for key, value in cell["options"].items() if key in option_names}
    description["rehearses"] = describe_work(cell["rehearses"], option_names) if cell.get("rehearses") else None
    # a cell with a fault on purpose is only compared with its like
    if fault_text := faults.describe_faults(cell["instruments"]):
        description["fault"] = fault_text
    return description


def describe_precision_difference(cells: Iterable[AnyCell]) -> str | None:
    """A remark about the ratio of metrics of these cells if the cells differ in precision; None if all have the same
    precision."""
    precisions = list(dict.fromkeys(cell.precision or "not known" for cell in cells))
    return f"different computation: precision {' and '.join(precisions)}" if len(precisions) > 1 else None


def describe_sync_of_cells(cells: Iterable[LoadedCell]) -> str | None:
    """A remark about the numbers of these cells if their ranks exchange gradients in different passes of a step, according to
    their results; None if not."""
    return describe_sync_difference(
        (cell.cell.strategy, run.result.knobs.get("effective", {}).get("sync"))
        for cell in cells
        for run in cell.completed_runs
        if run.result and (cell.cell.gradient_accumulation_steps or 1) > 1
    )


def differ_only_in_launcher(cell: AnyCell, other: AnyCell) -> bool:
    """Whether two cells differ in the launcher and in no other key."""
    return cell.launcher != other.launcher and _drop_keys(cell, {"launcher"}) == _drop_keys(other, {"launcher"})


def choose_baseline_strategy(strategy: str | None, loaded: LoadedMatrix) -> str:
    """The strategy that speed-ups are relative to: `strategy`, or the baseline of the matrix if `strategy` is None.

    Raises UnknownName if no cell of the matrix uses the strategy `strategy`.
    """
    strategies = {cell.cell.strategy for cell in loaded.cells}
    if strategy is not None and strategy not in strategies:
        raise UnknownName("baseline strategy", strategy, strategies)
    return strategy or loaded.expansion.baseline


def find_baseline(cell: LoadedCell, cells: Sequence[LoadedCell], strategy: str) -> LoadedCell | None:
    """The completed cell of the baseline strategy with which `cell` is compared, or None if there is no such cell.

    The baseline cell has the same workload, launcher, precision, sequence length, optimizer and faults on purpose as `cell`,
    and the same global batch size or the same batch size per rank. If there are several such cells, a cell with the same
    instruments is preferred, then a cell with the same `sync`, then the cell with the fewest ranks, then a cell with the same
    global batch size, and then `cell` itself.
    """
    candidates: list[tuple[bool, bool, int, bool, bool, LoadedCell]] = []
    for other in cells:
        if other.cell.strategy != strategy or not other.completed_runs:
            continue
        is_alike = _drop_keys(cell.cell, _MAY_DIFFER_KEYS | _LENGTH_KEYS) == _drop_keys(
            other.cell, _MAY_DIFFER_KEYS | _LENGTH_KEYS
        )
        scaling = MeanPair(cell.cell, 1, other.cell, 1).scaling
        if is_alike and scaling and _have_equal_options(cell.cell, other.cell) and _have_same_faults(cell.cell, other.cell):
            has_other_instruments = other.cell.instruments != cell.cell.instruments
            has_other_sync = other.cell.sync != cell.cell.sync
            ranking = (has_other_instruments, has_other_sync, other.cell.gpus, scaling != "strong", other is not cell)
            candidates.append((*ranking, other))
    return min(candidates, key=lambda candidate: candidate[:5])[5] if candidates else None


def have_different_instruments(cells: Iterable[Mapping[str, Any]]) -> bool:
    """Whether these cells have different instruments. cells: in their plain form (dicts and lists)."""
    return len({repr(cell["instruments"]) for cell in cells}) > 1


def make_key_without_instruments(cell: Mapping[str, Any]) -> bytes:
    """A key that is equal for cells that differ only in their instruments. cell: in its plain form (dicts and lists).

    The key is also equal if the cells are tiny twins, and the large cells that they represent differ only in their instruments.
    """
    remaining_keys = {key: value for key, value in cell.items() if key not in ("instruments", "rehearses")}
    if cell.get("rehearses"):
        remaining_keys["rehearses"] = {key: value for key, value in cell["rehearses"].items() if key != "instruments"}
    return msgspec.json.encode(remaining_keys, order="deterministic")


def make_key_without_faults(cell: Mapping[str, Any]) -> bytes:
    """A key that is equal for cells that differ only in their faults on purpose, and in keys that cannot change what is
    measured. cell: in its plain form."""
    rest = {key: value for key, value in cell.items() if key not in find_role_keys(Role.BOOKKEEPING)}
    rest["instruments"] = {key: value for key, value in cell["instruments"].items() if key not in ("straggler", "lost_worker")}
    rehearsed_key = make_key_without_faults(cell["rehearses"]).decode() if cell.get("rehearses") else None
    return msgspec.json.encode([rest, rehearsed_key], order="deterministic")


def group_families(cells: Iterable[LoadedCell]) -> list[list[LoadedCell]]:
    """Group the cells by the keys that must be equal for any comparison in this module.

    Only cells of the same group need to be compared with each other, which saves time in a sweep with thousands of cells.
    """
    cells_by_key: dict[bytes, list[LoadedCell]] = {}
    for cell in cells:
        key = msgspec.json.encode(_drop_keys(cell.cell, _MAY_DIFFER_KEYS | _LENGTH_KEYS | {"launcher"}), order="deterministic")
        cells_by_key.setdefault(key, []).append(cell)
    return list(cells_by_key.values())


def _drop_keys(cell: AnyCell, keys: AbstractSet[str]) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(cell).items() if key not in keys}


def _have_same_faults(cell: AnyCell, other: AnyCell) -> bool:
    """Whether two cells have the same faults on purpose."""
    instruments, other_instruments = cell.instruments, other.instruments
    return (instruments.straggler, instruments.lost_worker) == (other_instruments.straggler, other_instruments.lost_worker)


def _have_equal_options(cell: AnyCell, other: AnyCell) -> bool:
    """Whether the options that both cells have are equal. Options that only one cell has belong to its strategy."""
    shared_options = (cell.options.keys() & other.options.keys()) - STRATEGY_OPTIONS.keys()
    return all(cell.options[key] == other.options[key] for key in shared_options)


def describe_gpu_trouble(run: LoadedRun) -> str:
    """A text that names the GPUs of a run that had trouble while steps were timed; '' if no GPU had trouble.

    A GPU had trouble if it was shared or throttled in at least 5 % of its samples, was lost, or had errors. A GPU at its power
    limit does not count as throttled, because many GPUs reach the limit at full load. The text is also '' if telemetry does not
    record processes and clocks, or if the result of the run does not name its GPUs.
    """
    timed_window = find_timed_window(run.timed_steps)
    if run.result is None or run.run is None or not run.result.gpus or timed_window is None:
        return ""
    gpu_samples = select_in_window(
        select_real_gpus(run.samples.gpus).filter(pl.col("uuid").is_in(run.result.gpus)), timed_window
    )
    ranks_per_gpu = -(-run.run.cell.gpus // len(run.result.gpus))  # ranks of this run on each GPU; a rank is one process
    clauses = []
    if shared_gpus := _list_affected_gpus(gpu_samples.filter(pl.col("processes") > ranks_per_gpu), gpu_samples):
        clauses.append(f"other processes computed on {shared_gpus}")
    throttled_samples = gpu_samples.explode("throttled").drop_nulls("throttled").filter(pl.col("throttled") != POWER_CAP)
    for reason in sorted(throttled_samples["throttled"].unique()):
        if throttled_gpus := _list_affected_gpus(throttled_samples.filter(pl.col("throttled") == reason), gpu_samples):
            clauses.append(f"{throttled_gpus} had lowered clocks ({reason})")
    clauses += _describe_gpu_errors(gpu_samples)
    return "; ".join(clauses)


def _describe_gpu_errors(gpu_samples: pl.DataFrame) -> list[str]:
    """Clauses about GPUs that were lost, whose driver reported an error, or that had memory errors that were not corrected."""
    clauses = []
    if lost_gpus := sorted(gpu_samples.filter("lost")["uuid"].unique()):
        clauses.append(f"{', '.join(lost_gpus)} was lost")
    xid_errors = gpu_samples.explode("xids").drop_nulls("xids").select("uuid", "xids").unique().sort("uuid", "xids")
    clauses += [f"the driver reported error {xid} (XID) of {uuid}" for uuid, xid in xid_errors.iter_rows()]
    error_growth = pl.max("ecc_uncorrected") - pl.min("ecc_uncorrected")
    ecc_growth = gpu_samples.drop_nulls("ecc_uncorrected").group_by("uuid").agg(growth=error_growth)
    if broken_gpus := sorted(ecc_growth.filter(pl.col("growth") > 0)["uuid"]):
        clauses.append(f"{', '.join(broken_gpus)} had memory errors that ECC did not correct")
    return clauses


def _list_affected_gpus(trouble_samples: pl.DataFrame, all_samples: pl.DataFrame) -> str:
    """The UUIDs of the GPUs that have at least LEAST_TROUBLE_SHARE of their samples in `trouble_samples`.

    trouble_samples: the samples with a certain trouble. all_samples: all samples.
    """
    sample_count_by_uuid = dict(all_samples["uuid"].value_counts().iter_rows())
    trouble_counts = trouble_samples["uuid"].value_counts().iter_rows()
    return ", ".join(sorted(uuid for uuid, count in trouble_counts if count >= MIN_TROUBLE_SHARE * sample_count_by_uuid[uuid]))
