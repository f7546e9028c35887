"""What `jobs plan` prints about models that do not ship with shardlab: facts that were derived, and facts that are unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobs.own_workloads import OwnWorkloads
from shardlab.cell import Cell
from shardlab.own_workload import OwnWorkload


def used(own: OwnWorkloads, cells: Sequence[Cell]) -> list[OwnWorkload]:
    """The workloads of these cells that do not ship with shardlab, sorted by name."""
    found = {cell.workload: known for cell in cells if (known := own.of(cell)) is not None}
    return [found[name] for name in sorted(found)]


def sentences(known: OwnWorkload) -> list[str]:
    """Sentences about a model: first its parameters, blocks and FLOPs; then each fact that could not be derived, and which
    strategies are not possible for that reason."""
    kind = f" ({known.block})" if known.block else ""
    blocks = f"{known.block_count} blocks{kind}" if known.block_count else "no blocks"
    unit = known.unit.removesuffix("s")
    length = "" if known.seq_len is None else f", in sequences of {known.seq_len}"
    flops = "unknown FLOPs" if known.flops_per_unit is None else f"{known.flops_per_unit / 1e6:,.1f} MFLOP per {unit}{length}"
    degrees = f"; tp: {', '.join(map(str, (1, *known.tensor_degrees)))}" if known.tensor_degrees else ""
    derived = f"{known.name}: {known.summary}: {known.parameters:,} parameters, {blocks}, {flops}{degrees}."
    lacking = [f"{known.name}: {remark}." for remark in known.remarks]
    helps = [f"{known.name}: a model by code can define what is not known here (docs/own-models.md)."]
    return [derived, *lacking, *(helps if lacking else [])]


def document(known: OwnWorkload) -> dict[str, Any]:
    """The same facts about a model as a dictionary, for --json."""
    return {
        "name": known.name,
        "summary": known.summary,
        "code": known.code,
        "parameters": known.parameters,
        "block": known.block or None,
        "blocks": known.block_count,
        "unit": known.unit,
        "flops_per_unit": known.flops_per_unit,
        "flops_source": known.flops_source,
        "seq_len": known.seq_len,
        "tensor_degrees": known.tensor_degrees,
        "most_stages": known.most_stages,
        "not_derived": known.remarks,
    }
