"""`jobs plan --adapt` and `jobs submit --adapt`: write the nearest matrix that fits the cluster, and go on with this matrix."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import yaml

from jobs.adaptation.adapt import AdaptedMatrix, adapt_matrix
from jobs.planning import plan
from jobs.planning.resolve import Capacity, find_misfits, resolve_cells
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.files.document import parse_document
from shardlab.matrix import matrix
from shardlab.matrix.matrix import Matrix
from shardlab.matrix.study import Deviation
from shardlab.terminal.console import Parser
from shardlab.verb import Invocation
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

ADAPTED_FOLDER = "adapted"  # the folder of a workspace that contains one folder for each adapted matrix
MOST_COLUMNS = 130  # columns of the file
# text that is written without quotes, unless PyYAML itself adds them
PLAIN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*( [A-Za-z0-9_./()-]+)*")


def add_adapt_option(parser: Parser) -> None:
    """Add the option --adapt."""
    adapt_help = "use the nearest matrix whose cells all fit the cluster, and write it to a file, with every change"
    parser.add_argument("--adapt", action="store_true", help=adapt_help)


def use_adapted_matrix(invocation: Invocation) -> None:
    """With --adapt, write the adapted matrix into the workspace, and let the arguments name it in place of --adapt.

    All changes are printed. Raises InputError if no cell fits; nothing is written then.
    """
    arguments, out = invocation.arguments, invocation.out
    if not arguments.adapt:
        return
    requested_matrix = matrix.load_matrix(matrix.find_matrix_file(arguments.matrix), arguments.settings)
    capacity = plan.find_cluster_capacity(invocation.cluster, in_allocation=getattr(arguments, "in_allocation", False))
    plugins = plan.find_own_plugins(invocation.workspace, requested_matrix, invocation.cluster)
    try:
        adapted = adapt_matrix(requested_matrix, capacity, plugins, invocation.cluster.name)
        if adapted is None:
            fit_text = f"all cells fit the cluster {invocation.cluster.name} (memory is not looked at)"
            out.print_line(f"{requested_matrix.name}: {fit_text}; nothing was changed.")
        else:
            arguments.settings = []  # the adapted matrix contains them
            arguments.matrix = str(write_adapted_matrix(requested_matrix, adapted, capacity, plugins, invocation.workspace))
            out.print_line(f"{requested_matrix.name}: adapted to the cluster {invocation.cluster.name}: {arguments.matrix}")
            for change in adapted.changes:
                out.print_line(f"  {describe_change(change)}")
    finally:
        plugins.close()
    arguments.adapt = False


def describe_change(change: Deviation) -> str:
    """A change as a line of text."""
    cells_clause = "" if change.cells is None else f" ({change.cells} cell{'' if change.cells == 1 else 's'})"
    if change.key.startswith("claims."):
        return f"{change.key}: {change.why}"
    if isinstance(change.study, dict):
        study_values = ", ".join(f"{key} {value}" for key, value in change.study.items())
        outcome_text = "left out" if change.here is None else "changed"
        return f"{change.key}: {study_values}: {outcome_text}{cells_clause}: {change.why}"
    earlier_clause = "" if change.study is None else f" instead of {change.study}"
    here_text = "left out" if change.here is None else change.here
    return f"{change.key}: {here_text}{earlier_clause}{cells_clause}: {change.why}"


def write_adapted_matrix(
    requested_matrix: Matrix, adapted: AdaptedMatrix, capacity: Capacity, plugins: OwnPlugins, workspace: Workspace
) -> Path:
    """Write an adapted matrix, and the models that it names, into the workspace. Returns the path of the matrix file.

    The path is adapted/NAME-DIGEST/NAME.yaml, so that equal matrices have one file. The text is parsed again before it is
    written. Raises InputError if the text does not give the expected cells, or if a file with this path has another content.
    """
    adapted_name = str(adapted.file_content["name"])
    content = format_matrix_file(requested_matrix, adapted.file_content)
    matrix_folder = workspace.path / ADAPTED_FOLDER / f"{adapted_name}-{hashlib.sha256(content).hexdigest()[:12]}"
    matrix_file = matrix_folder / f"{adapted_name}.yaml"
    _check_adapted_matrix(requested_matrix, content, adapted, capacity, plugins, matrix_file)
    workspace_trust.begin_workspace(workspace)
    model_files = {model.path: model.origin for model in requested_matrix.models.values() if model.path is not None}
    contents_by_path = {matrix_file: content} | {
        matrix_folder / model_path: files.read(Path(origin)) for model_path, origin in model_files.items()
    }
    for target_path, new_content in contents_by_path.items():
        if target_path.exists() and files.read(target_path) != new_content:
            raise InputError(
                f"{target_path}: was changed after `--adapt` wrote it. Allowed: --matrix {matrix_file}, or another file name."
            )
        files.make_folder(target_path.parent)
        files.write_atomic(target_path, new_content)
    return matrix_file


def format_matrix_file(requested_matrix: Matrix, content: dict[str, Any]) -> bytes:
    """The text of an adapted matrix file."""
    head_comment = f"# {requested_matrix.name}, adapted to a cluster by `jobs plan --adapt`. `deviations` lists every change.\n"
    yaml_text: str = yaml.dump(
        content, Dumper=_Dumper, default_flow_style=None, sort_keys=False, allow_unicode=True, width=MOST_COLUMNS
    )
    return (head_comment + yaml_text).encode()


class _Dumper(yaml.SafeDumper):
    """Writes YAML that `shardlab.files.document` reads as the same values: without aliases, and with quotes around all text
    that a YAML parser could take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = PLAIN_TEXT.fullmatch(text) is not None and text.lower() not in ("y", "n", "yes", "no", "on", "off")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


_Dumper.add_representer(str, _represent_text)


def _check_adapted_matrix(
    requested_matrix: Matrix, content: bytes, adapted: AdaptedMatrix, capacity: Capacity, plugins: OwnPlugins, matrix_file: Path
) -> None:
    """Raise InputError if the text of an adapted matrix does not give exactly the expected cells, or if one of its cells does
    not fit."""
    reparsed_matrix = matrix.expand_matrix(parse_document(content, str(matrix_file)), Path(requested_matrix.path).parent)
    cells = resolve_cells(reparsed_matrix, capacity=None if capacity.is_this_machine else capacity, plugins=plugins)
    if {cell.hash() for cell in cells} != adapted.cell_hashes or find_misfits(reparsed_matrix, cells, capacity, cells):
        raise InputError(
            f"{requested_matrix.path}: cannot be adapted, because an entry of `include` would change the adapted "
            "cells. Allowed: a matrix whose entries of `include` name other keys than those of `axes` and `zip`, or a "
            "matrix adapted by hand."
        )
