"""`shardlab.plan`: the plan of a matrix in Python, as `jobs plan` prints it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from jobs.verbs.plan import PlanVerb
from shardlab.terminal import console
from shardlab.terminal.console import Parser
from shardlab.terminal.recorded_output import RecordedOutput
from shardlab.verb import Invocation

PREDICTED_RANGES = ("memory_bytes", "step_s", "time_s", "gpu_hours", "energy_kwh", "cost")


class PlannedMatrix:
    """The plan of a matrix on a cluster. A notebook shows it as a terminal shows the output of `jobs plan`."""

    def __init__(self, output: RecordedOutput) -> None:
        self.document: dict[str, Any] = output.document
        """The document of `jobs plan --json`."""
        self._html = output.html

    def cells(self) -> pl.DataFrame:
        """A data frame with one row per cell: its id, repeats, keys and predictions. What is not known is null.

        A predicted range has three columns, such as `memory_bytes`, `memory_bytes_low` and `memory_bytes_high`.
        """
        return pl.DataFrame([_flatten_entry(entry) for entry in self.document["cells"]], infer_schema_length=None)

    def _repr_html_(self) -> str:
        return self._html


def plan_in_python(
    matrix: str | Path,
    cluster: str | Path | None = None,
    *,
    workspace: str | Path = ".",
    where: str | None = None,
    repeats: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> PlannedMatrix:
    """Plan a matrix, without a file written and without a login. Raises shardlab.errors.InputError if an argument is wrong.

    matrix: the name of a shipped matrix, or the path of a matrix file (a path contains / or ends in .yaml). cluster: the path
    of a cluster file; None: cluster.yaml of the workspace, else this machine. workspace: the folder with runs/, whose recorded
    times are used. where: only cells for which this expression is true. repeats: the number of runs of each cell; None: as in
    the matrix. settings: values of keys in place of those in `defaults` of the matrix, as --set.
    """
    values_by_option = {"matrix": matrix, "cluster": cluster, "workspace": workspace, "where": where, "repeats": repeats}
    words = [f"--{option}={value}" for option, value in values_by_option.items() if value is not None]
    words += [f"--set={key}={json.dumps(value)}" for key, value in (settings or {}).items()]
    parser = Parser(prog="shardlab.plan", parents=[console.common_options()])
    PlanVerb().add_options(parser)
    arguments: argparse.Namespace = parser.parse_args(words)
    invocation = Invocation(arguments)
    invocation.out = output = RecordedOutput()
    PlanVerb().run(invocation)
    return PlannedMatrix(output)


def _flatten_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `cells` of the document as a row, without lists and other nested values."""
    keys = {key: value for key, value in entry["cell"].items() if not isinstance(value, (dict, list))}
    predicted = entry["predicted"]
    ranges: dict[str, Any] = {}
    for name in PREDICTED_RANGES:
        predicted_range = predicted.get(name) or {}
        ranges |= {
            f"{name}{suffix}": predicted_range.get(end) for suffix, end in (("", "likely"), ("_low", "low"), ("_high", "high"))
        }
    row = {"cell": entry["id"], "repeats": entry["repeats"], "rehearsal": entry["rehearsal"]}
    return row | keys | ranges | {name: predicted.get(name) for name in ("fits", "bottleneck", "how")}
