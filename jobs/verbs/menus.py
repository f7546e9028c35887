"""Prints the strategies, workloads, launchers and matrices: a table with one line for each name that a user may choose."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jobs import launcher
from jobs.plugins.own_plugins import OwnPlugins, find_plugin_set
from jobs.verb import JobsVerb
from shardlab.matrix import matrix
from shardlab.plugins.plugin_kind import STRATEGIES, WORKLOADS
from shardlab.terminal import console
from shardlab.terminal.console import Output, Parser
from shardlab.verb import Invocation
from trainers import menu
from trainers.strategy import Strategy
from trainers.workload import Workload


class MatricesVerb(JobsVerb):
    """List the matrices that ship with shardlab."""

    name = "matrices"
    example = "jobs matrices"

    def run(self, invocation: Invocation) -> int:
        out = invocation.out
        matrix_entries: list[dict[str, Any]] = []
        for name, path in matrix.find_shipped_matrices().items():
            loaded_matrix = matrix.load_matrix(path)
            matrix_entries.append(
                {"name": name, "summary": loaded_matrix.file.title, "cells": len(loaded_matrix.points), "path": str(path)}
            )
        table_rows = [[entry["name"], entry["summary"], str(entry["cells"])] for entry in matrix_entries]
        out.print_table("matrices", ["name", "what it compares", "cells"], table_rows)
        out.print_document(matrix_entries)
        return 0


class StrategiesVerb(JobsVerb):
    """List the strategies, also those of the workspace, and their options."""

    name = "strategies"
    example = "jobs strategies --json"

    def add_options(self, parser: Parser) -> None:
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        out = invocation.out
        own_strategies = find_plugin_set(invocation.workspace, STRATEGIES, menu.load_strategies())
        entries = sorted(OwnPlugins(strategies=own_strategies).make_strategy_menu().values(), key=_is_shipped)
        table_rows = [[entry.name, entry.summary, ", ".join(entry.precisions), _describe_origin(entry)] for entry in entries]
        out.print_table("strategies", ["name", "what it does", "precisions", "from"], table_rows, priorities={"precisions": 1})
        _print_options(out, entries)
        _print_faults(out, own_strategies.fault_by_name)
        out.print_document(_make_document(entries, "name", "summary", "file", "code", "precisions", "options"))
        return int(bool(own_strategies.fault_by_name))


class WorkloadsVerb(JobsVerb):
    """List the workloads, also those of the workspace, and their options."""

    name = "workloads"
    example = "jobs workloads"

    def add_options(self, parser: Parser) -> None:
        console.add_trust_option(parser)

    def run(self, invocation: Invocation) -> int:
        out = invocation.out
        own_workloads = find_plugin_set(invocation.workspace, WORKLOADS, menu.load_workloads())
        entries = sorted(OwnPlugins(workloads=own_workloads).make_workload_menu().values(), key=_is_shipped)
        table_rows = [
            [
                workload.name,
                workload.summary,
                f"{workload.parameters:,}",
                workload.unit,
                _format_mflop(workload.flops_per_unit),
                _describe_origin(workload),
            ]
            for workload in entries
        ]
        out.print_table(
            "workloads",
            ["name", "what it is", "parameters", "unit", "MFLOP per unit", "from"],
            table_rows,
            priorities={"MFLOP per unit": 1},
        )
        _print_options(out, entries)
        _print_faults(out, own_workloads.fault_by_name)
        document_keys = ("parameters", "unit", "flops_per_unit", "flops_source", "seq_len", "optimizer", "options")
        out.print_document(_make_document(entries, "name", "summary", "file", "code", *document_keys))
        return int(bool(own_workloads.fault_by_name))


class LaunchersVerb(JobsVerb):
    """List the launchers, which start the ranks of a run."""

    name = "launchers"
    example = "jobs launchers"

    def run(self, invocation: Invocation) -> int:
        out = invocation.out
        entries = list(launcher.load_launchers().values())
        table_rows = [
            [entry.name, entry.summary, "yes" if entry.several_nodes else "no", "no" if entry.on_gpus else "yes"]
            for entry in entries
        ]
        out.print_table("launchers", ["name", "what it starts", "several nodes", "rehearsal"], table_rows)
        out.print_document(
            [
                {
                    "name": entry.name,
                    "summary": entry.summary,
                    "several_nodes": entry.several_nodes,
                    "rehearsal": not entry.on_gpus,
                    "needs": entry.needed_programs,
                }
                for entry in entries
            ]
        )
        return 0


def _make_document(menu_entries: Sequence[Strategy | Workload], *field_names: str) -> list[dict[str, Any]]:
    """The values of these fields of the entries of a menu, for --json."""
    return [{name: msgspec.to_builtins(getattr(entry, name)) for name in field_names} for entry in menu_entries]


def _is_shipped(menu_entry: Strategy | Workload) -> bool:
    return menu_entry.file is None


def _describe_origin(menu_entry: Strategy | Workload) -> str:
    return menu_entry.file or "ships"


def _print_faults(out: Output, faults: Mapping[str, str]) -> None:
    for fault in dict.fromkeys(faults.values()):
        out.print_remark(fault, style="red")


def _format_mflop(flops: float | None) -> str:
    return "unknown" if flops is None else f"{flops / 1e6:,.1f}"


def _print_options(out: Output, entries: Sequence[Strategy | Workload]) -> None:
    """Print each option once, with each of its default values and the strategies or workloads that have this default."""
    names_by_default: dict[tuple[str, str], dict[str, list[str]]] = {}
    for entry in entries:
        for option in entry.options:
            names_by_value = names_by_default.setdefault((option.name, f"{option.summary} ({option.allowed})"), {})
            names_by_value.setdefault(_format_yaml(option.default), []).append(entry.name)
    table_rows = [
        [
            name if is_first_row else "",
            default,
            summary if is_first_row else "",
            _shorten_names(names, [entry.name for entry in entries]),
        ]
        for (name, summary), names_by_value in names_by_default.items()
        for is_first_row, (default, names) in zip([True, *[False] * len(names_by_value)], names_by_value.items())
    ]
    out.print_table("options", ["option", "default", "what it is", "available for"], table_rows, priorities={"default": 1})


def _shorten_names(names: Sequence[str], all_names: Sequence[str]) -> str:
    """The names as text. If `names` has all names of the menu that begin with a word, a pattern such as `fsdp*` replaces them.

    all_names: all names on the menu.
    """
    shortened_names: list[str] = []
    for name in names:
        name_beginnings = [match[0] for pattern in ("[a-z]+", "[a-z]+[0-9](?=-|$)") if (match := re.match(pattern, name))]
        names_by_beginning = {
            beginning: [menu_name for menu_name in all_names if menu_name.startswith(beginning)]
            for beginning in name_beginnings
        }
        complete_beginnings = [
            beginning for beginning, variants in names_by_beginning.items() if len(variants) > 1 and set(variants) <= set(names)
        ]
        shortened_names.append(f"{complete_beginnings[0]}*" if complete_beginnings else name)
    return ", ".join(dict.fromkeys(shortened_names))


def _format_yaml(value: bool | int | float | str | None) -> str:
    """A value in the spelling of a matrix file (YAML): null, true, false, or the value itself."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
