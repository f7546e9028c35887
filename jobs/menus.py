"""The menus: what a matrix may name, with one line each."""

from __future__ import annotations

from typing import Any

import msgspec

from shardlab import matrix
from shardlab.console import Output
from shardlab.registry import Option
from trainers import menu


def strategies(out: Output) -> None:
    found = list(menu.strategies().values())
    rows = [[s.name, s.summary, ", ".join(s.precisions), _options(s.options)] for s in found]
    out.table("strategies", ["name", "what it does", "precisions", "options (default)"], rows)
    out.document(
        [
            {"name": s.name, "summary": s.summary, "precisions": s.precisions, "options": msgspec.to_builtins(s.options)}
            for s in found
        ]
    )


def workloads(out: Output) -> None:
    found = list(menu.workloads().values())
    rows = [
        [w.name, w.summary, f"{w.parameters:,}", w.unit, f"{w.flops_per_unit / 1e6:,.1f}", _options(w.options)] for w in found
    ]
    columns = ["name", "what it is", "parameters", "unit", "MFLOP a unit", "options (default)"]
    out.table("workloads", columns, rows)
    out.document(
        [
            {
                "name": w.name,
                "summary": w.summary,
                "parameters": w.parameters,
                "unit": w.unit,
                "flops_per_unit": w.flops_per_unit,
                "flops_source": w.flops_source,
                "seq_len": w.seq_len,
                "optimizer": msgspec.to_builtins(w.optimizer),
                "options": msgspec.to_builtins(w.options),
            }
            for w in found
        ]
    )


def matrices(out: Output) -> None:
    entries: list[dict[str, Any]] = []
    for name, path in matrix.shipped().items():
        loaded = matrix.load(path)
        entries.append({"name": name, "summary": loaded.file.title, "cells": len(loaded.points), "path": str(path)})
    rows = [[e["name"], e["summary"], str(e["cells"])] for e in entries]
    out.table("matrices", ["name", "what it compares", "cells"], rows)
    out.document(entries)


def _options(options: tuple[Option, ...]) -> str:
    return "\n".join(f"{o.name} ({o.default}): {o.summary}" for o in options) or "none"
