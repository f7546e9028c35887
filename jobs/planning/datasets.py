"""Checks, before anything is queued, that the data sets of the cells are in the place from which their runs will read them.

    python -m jobs.planning.datasets --json --workspace DIR

`jobs plan` runs this command on the controller of a remote cluster. The command reads a DataSetQuestion from standard input and
prints a MissingData, both as JSON.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from jobs import on_controller
from jobs.rendering.render import RenderContext
from shardlab.errors import InputError, ShardlabError
from shardlab.files import json_file
from shardlab.matrix.cell import AnyCell
from shardlab.remote import remote_workspace
from shardlab.terminal import console
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace
from trainers.data import data_sets


class MissingData(msgspec.Struct, frozen=True):
    """Which data sets are missing."""

    missing: list[str] = []
    """A sentence for each missing data set."""
    unknown: str = ""
    """Why it is not known which data sets are missing, or ''."""


class DataSetQuestion(msgspec.Struct, frozen=True):
    """The question that is sent to the controller of a cluster: which data sets of these cells are missing?"""

    shared: str | None
    """`storage.shared` of the cluster file."""
    data_path: str | None
    """`data.path` of the cluster file."""
    options: list[dict[str, Any]]
    """The options of each cell."""


def find_missing_data(cells: Sequence[AnyCell], render_context: RenderContext, workspace: Workspace) -> MissingData:
    """Find out which data sets of these cells are missing.

    If the runs start on this machine, its disk is checked directly. If the runs start on a cluster, the controller of the
    cluster is asked, because the files of this machine say nothing about the nodes of the cluster.
    """
    cluster, options_of_cells = render_context.cluster, [cell.options for cell in cells]
    if cluster.data.stage == "node" and (
        refusals := [why for options_of_cell in options_of_cells if (why := data_sets.refuse_copy(options_of_cell))]
    ):
        return MissingData(list(dict.fromkeys(refusals)))
    data_set_names = _join_data_set_names(options_of_cells)
    if not data_set_names:
        return MissingData()
    data_set_question = DataSetQuestion(cluster.storage.shared, cluster.data.path, options_of_cells)
    if render_context.scheduler == "local":
        return MissingData(_describe_absent_data_sets(options_of_cells, workspace.find_data_folder(cluster.data.path)))
    if on_controller.starts_runs_here(cluster):
        return answer_question(data_set_question, workspace)
    try:
        remote_machine = remote_workspace.read_remote_workspace(workspace)
        if remote_machine is None or remote_machine.cluster != cluster.name:
            remote_machine = remote_workspace.find_remote_workspace(workspace, cluster)
        workspace_trust.must_be_allowed(workspace, f"log in to {remote_machine.host}")
        return remote_machine.ask_command(
            "jobs.planning.datasets", [], MissingData, input_bytes=msgspec.json.encode(data_set_question)
        )
    except ShardlabError as error:
        why = str(error).rstrip(".")
        return MissingData(
            unknown=f"cannot check from here whether the cluster {cluster.name} has the data sets {data_set_names}: {why}."
        )


def answer_question(question: DataSetQuestion, workspace: Workspace) -> MissingData:
    """Answer the question on the cluster's controller. The controller can read the storage that all nodes share, but not the
    disks inside the nodes."""
    data_path, shared_folder = workspace.find_data_folder(question.data_path), question.shared
    if shared_folder is not None and data_path.resolve().is_relative_to(Path(shared_folder).resolve()):
        return MissingData(_describe_absent_data_sets(question.options, data_path))
    data_set_names = _join_data_set_names(question.options)
    return MissingData(
        unknown=f"cannot check from here whether every node has the data sets {data_set_names}: {data_path} is not on "
        "storage that all nodes share. `provision` checks each node for the data sets in data.sets of the cluster file."
    )


def must_have_data(missing_data: MissingData) -> None:
    """Raises an InputError that lists every missing data set, if a data set is missing."""
    if missing_data.missing:
        raise InputError("\n".join([*missing_data.missing, "With --scale tiny every cell reads synthetic data."]))


def _describe_absent_data_sets(options_of_cells: Sequence[dict[str, Any]], data_path: Path) -> list[str]:
    """A sentence for each data set that cells with these options read and that is not on the disk of this machine."""
    cell_count_by_data_set = Counter(
        data_set
        for options_of_cell in options_of_cells
        if (data_set := data_sets.find_data_path(options_of_cell, data_path)) is not None
    )
    absent_counts = [(data_set, count) for data_set, count in cell_count_by_data_set.items() if not data_set.path.exists()]
    return [
        f"{count} of {len(options_of_cells)} cell(s) read {data_set.name}: {data_set.missing_path_error}"
        for data_set, count in absent_counts
    ]


def _join_data_set_names(options_of_cells: Sequence[dict[str, Any]]) -> str:
    """The names of the data sets that cells with these options read from files, separated by commas."""
    return ", ".join(
        sorted(
            {
                data_set_path.name
                for options_of_cell in options_of_cells
                if (data_set_path := data_sets.find_data_path(options_of_cell, Path())) is not None
            }
        )
    )


def main() -> int:
    """Read a question of another machine from standard input, and print the answer; return the exit code."""
    arguments = console.Parser(prog="python -m jobs.planning.datasets", parents=[console.common_options()]).parse_args()
    question_json = sys.stdin.buffer.read()
    question = json_file.decode_standard_input(question_json, DataSetQuestion, "a question from this version of shardlab")
    missing_data = answer_question(question, Workspace.find(getattr(arguments, "workspace", None)))
    console.Output.from_arguments(arguments).print_document(missing_data)
    return 0


if __name__ == "__main__":
    sys.exit(console.run_command(main))
