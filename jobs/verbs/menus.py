"""Prints the strategies, workloads, launchers and matrices: a table with one line for each name that a user may choose."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jobs import launcher
from jobs.invocation import Invocation
from jobs.plugins import own_strategies, own_workloads
from shardlab.matrix import matrix
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace
from trainers import menu
from trainers.strategy import Strategy
from trainers.workload import Workload


def strategies(out: Output, workspace: Workspace) -> int:
    """Print all strategies, also the workspace's own strategies, and their options.

    Returns the exit code, which is 1 if a file in
    the workspace's folder of strategies defines no strategy; the reason is printed.
    """
    own = own_strategies.find(workspace)
    entries = [*own.menu({}).values(), *menu.strategies().values()]
    rows = [[s.name, s.summary, ", ".join(s.precisions), s.file or "ships"] for s in entries]
    out.table("strategies", ["name", "what it does", "precisions", "from"], rows)
    _options(out, entries)
    _faults(out, own.faults)
    out.document(
        [
            {
                "name": s.name,
                "summary": s.summary,
                "file": s.file,
                "code": s.code,
                "precisions": s.precisions,
                "options": msgspec.to_builtins(s.options),
            }
            for s in entries
        ]
    )
    return int(bool(own.faults))


def workloads(out: Output, workspace: Workspace) -> int:
    """Print all workloads, also the workspace's own workloads, and their options.

    Returns the exit code, which is 1 if a file in
    the workspace's folder of workloads defines no workload; the reason is printed.
    """
    own = own_workloads.find(workspace)
    entries = [*own.menu().values(), *menu.workloads().values()]
    rows = [[w.name, w.summary, f"{w.parameters:,}", w.unit, _mflop(w.flops_per_unit), w.file or "ships"] for w in entries]
    out.table("workloads", ["name", "what it is", "parameters", "unit", "MFLOP per unit", "from"], rows)
    _options(out, entries)
    _faults(out, own.faults)
    out.document(
        [
            {
                "name": w.name,
                "summary": w.summary,
                "file": w.file,
                "code": w.code,
                "parameters": w.parameters,
                "unit": w.unit,
                "flops_per_unit": w.flops_per_unit,
                "flops_source": w.flops_source,
                "seq_len": w.seq_len,
                "optimizer": msgspec.to_builtins(w.optimizer),
                "options": msgspec.to_builtins(w.options),
            }
            for w in entries
        ]
    )
    return int(bool(own.faults))


def _faults(out: Output, faults: Mapping[str, str]) -> None:
    for fault in dict.fromkeys(faults.values()):
        out.remark(fault, style="red")


def _mflop(flops: float | None) -> str:
    return "unknown" if flops is None else f"{flops / 1e6:,.1f}"


def launchers(out: Output) -> None:
    """Print the launchers."""
    entries = list(launcher.launchers().values())
    rows = [
        [entry.name, entry.summary, "yes" if entry.several_nodes else "no", "no" if entry.on_gpus else "yes"]
        for entry in entries
    ]
    out.table("launchers", ["name", "what it starts", "several nodes", "rehearsal"], rows)
    out.document(
        [
            {
                "name": entry.name,
                "summary": entry.summary,
                "several_nodes": entry.several_nodes,
                "rehearsal": not entry.on_gpus,
                "needs": entry.needs,
            }
            for entry in entries
        ]
    )


def matrices(out: Output) -> None:
    """Print the matrices that ship with shardlab."""
    entries: list[dict[str, Any]] = []
    for name, path in matrix.shipped().items():
        loaded = matrix.load(path)
        entries.append({"name": name, "summary": loaded.file.title, "cells": len(loaded.points), "path": str(path)})
    rows = [[e["name"], e["summary"], str(e["cells"])] for e in entries]
    out.table("matrices", ["name", "what it compares", "cells"], rows)
    out.document(entries)


def _options(out: Output, entries: Sequence[Strategy | Workload]) -> None:
    """Print each option once, with each of its default values and the strategies or workloads that have this default."""
    having: dict[tuple[str, str], dict[str, list[str]]] = {}
    for entry in entries:
        for option in entry.options:
            defaults = having.setdefault((option.name, f"{option.summary} ({option.allowed})"), {})
            defaults.setdefault(_word(option.default), []).append(entry.name)
    rows = [
        [name if first else "", default, summary if first else "", _shorter(names, [entry.name for entry in entries])]
        for (name, summary), defaults in having.items()
        for first, (default, names) in zip([True, *[False] * len(defaults)], defaults.items())
    ]
    out.table("options", ["option", "default", "what it is", "available for"], rows)


def _shorter(names: Sequence[str], every: Sequence[str]) -> str:
    """The names as text. If `names` has all names of the menu that begin with a word, a pattern such as `fsdp*` replaces them.

    every: all names on the menu.
    """
    shown: list[str] = []
    for name in names:
        families = [found[0] for pattern in ("[a-z]+", "[a-z]+[0-9](?=-|$)") if (found := re.match(pattern, name))]
        members = {family: [other for other in every if other.startswith(family)] for family in families}
        whole = [family for family, those in members.items() if len(those) > 1 and set(those) <= set(names)]
        shown.append(f"{whole[0]}*" if whole else name)
    return ", ".join(dict.fromkeys(shown))


def _word(value: bool | int | float | str | None) -> str:
    """A value in the spelling of a matrix file (YAML): null, true, false, or the value itself."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def verb(show: Callable[[Output], None]) -> Callable[[Invocation], int]:
    """The function of a verb of `jobs` that prints a menu and returns the exit code 0. show: prints the menu."""

    def run(invocation: Invocation) -> int:
        show(invocation.out)
        return 0

    return run


def own_verb(show: Callable[..., int]) -> Callable[[Invocation], int]:
    """The function of a verb of `jobs` that prints a menu with the plug-ins of the workspace. show: prints the menu and returns
    the exit code."""
    return lambda invocation: show(invocation.out, invocation.workspace)
