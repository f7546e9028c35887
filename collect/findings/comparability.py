"""Which cells may be compared: cells that do the same work by other means, on GPUs that were neither shared nor throttled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import polars as pl

from collect.loading.load import LoadedCell
from collect.loading.loaded_run import LoadedRun
from collect.metric import Compared
from collect.sources.samples import within
from collect.sources.steps import window
from shardlab.cell import Cell, Role, keys_of
from shardlab.nvml import POWER_CAP

LEAST_SHARE = 0.05  # of a GPU's samples: a slowdown of a moment says nothing about a run
# Keys that may differ between cells that do the same work by other means. Options of the workload are compared by themselves.
_MEANS = keys_of(Role.STRATEGY, Role.EXECUTION, Role.RANKS, Role.PASSES, Role.NODES, Role.INSTRUMENTS, Role.BOOKKEEPING)
_LENGTH = keys_of(Role.LENGTH, Role.DATA)


def same_work(one: Cell, other: Cell) -> bool:
    """Whether two cells train the same model on the same batches with the same instruments: all that differs is how ranks share
    the work."""
    means = _MEANS - {"instruments"}  # else each of a matrix that makes cells with and without them would be paired twice
    return _without(one, means) == _without(other, means) and _options_agree(one, other)


def work(cell: Mapping[str, Any], options: AbstractSet[str]) -> dict[str, Any]:
    """What the plain form of a cell says of its work, without the means by which ranks share it; of its options, these.

    Equal for cells that train the same model on the same batches, and stand for such where they are tiny twins.
    """
    plain = {key: value for key, value in cell.items() if key not in _MEANS}
    plain["options"] = {key: value for key, value in cell["options"].items() if key in options}
    plain["rehearses"] = work(cell["rehearses"], options) if cell.get("rehearses") else None
    return plain


def different_computation(cells: Iterable[Cell]) -> str | None:
    """The remark on a ratio between these cells if their precisions differ; None if all have the same precision."""
    precisions = list(dict.fromkeys(cell.precision for cell in cells))
    return f"different computation: precision {' and '.join(precisions)}" if len(precisions) > 1 else None


def differ_only_in_launcher(one: Cell, other: Cell) -> bool:
    """Whether the launcher, and no other key, differs."""
    return one.launcher != other.launcher and _without(one, {"launcher"}) == _without(other, {"launcher"})


def baseline_of(cell: LoadedCell, cells: Sequence[LoadedCell], strategy: str) -> LoadedCell | None:
    """The completed cell of the baseline strategy that this one's throughput stands against, or None.

    It has the same workload, launcher, precision, sequence length and optimizer, and the same global batch or the same batch
    per rank; of several, one with the same instruments, of those one on the fewest ranks, of those one with the same global
    batch.
    """
    candidates: list[tuple[bool, int, bool, LoadedCell]] = []
    for other in cells:
        if other.cell.strategy != strategy or not other.completed:
            continue
        alike = _without(cell.cell, _MEANS | _LENGTH) == _without(other.cell, _MEANS | _LENGTH)
        how = Compared(cell.cell, 1, other.cell, 1).scaling
        if alike and how and _options_agree(cell.cell, other.cell):
            other_instruments = other.cell.instruments != cell.cell.instruments
            candidates.append((other_instruments, other.cell.gpus, how != "strong", other))
    return min(candidates, key=lambda entry: entry[:3])[3] if candidates else None


def instruments_differ(cells: Iterable[Mapping[str, Any]]) -> bool:
    """Whether not all of these cells, in their plain form, have the same instruments."""
    return len({repr(cell["instruments"]) for cell in cells}) > 1


def without_instruments(cell: Mapping[str, Any]) -> bytes:
    """Equal for cells that differ in nothing but instruments, and in what they stand for in nothing else."""
    told = {key: value for key, value in cell.items() if key not in ("instruments", "rehearses")}
    if cell.get("rehearses"):
        told["rehearses"] = {key: value for key, value in cell["rehearses"].items() if key != "instruments"}
    return msgspec.json.encode(told, order="deterministic")


def families(cells: Iterable[LoadedCell]) -> list[list[LoadedCell]]:
    """The cells by what they have to share before anything here can find two of them alike: among the thousands of a sweep
    few do, and only those are worth holding against each other."""
    cells_of: dict[bytes, list[LoadedCell]] = {}
    for cell in cells:
        key = msgspec.json.encode(_without(cell.cell, _MEANS | _LENGTH | {"launcher"}), order="deterministic")
        cells_of.setdefault(key, []).append(cell)
    return list(cells_of.values())


def _without(cell: Cell, keys: AbstractSet[str]) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(cell).items() if key not in keys}


def _options_agree(one: Cell, other: Cell) -> bool:
    """Whether the options that both have are equal; the others belong to a strategy."""
    return all(one.options[key] == other.options[key] for key in one.options.keys() & other.options.keys())


def gpu_trouble(run: LoadedRun) -> str:
    """A text that names the GPUs of the run that were shared or throttled while steps were timed, in 5 % of the samples or
    more, and those that were lost or had errors; '' if there are none.

    A GPU at its power limit does not count as throttled: many GPUs reach the limit at full load. '' also if telemetry does not
    record processes and clocks, or if the result does not name the run's GPUs.
    """
    if run.result is None or run.run is None or not run.result.gpus or (span := window(run.timed)) is None:
        return ""
    seen = within(run.samples.gpus.filter(pl.col("uuid").is_in(run.result.gpus)), span)
    own = -(-run.run.cell.gpus // len(run.result.gpus))  # ranks of this run on each GPU; each rank is one process
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
    """Clauses about the GPUs that were lost, whose driver reported an error, or whose memory had one that was not corrected."""
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
    """The GPUs with at least LEAST_SHARE of their samples in `rows`."""
    samples = dict(seen["uuid"].value_counts().iter_rows())
    return ", ".join(
        sorted(uuid for uuid, count in rows["uuid"].value_counts().iter_rows() if count >= LEAST_SHARE * samples[uuid])
    )
