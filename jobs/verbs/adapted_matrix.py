"""`jobs plan --adapt` and `jobs submit --adapt`: write the nearest matrix that fits the cluster, and go on with this matrix."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import yaml

from jobs.adaptation.adapt import Adaptation, adapt_matrix
from jobs.planning import plan
from jobs.planning.resolve import Capacity, find_misfits, resolve_cells
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.files.document import parse
from shardlab.matrix import matrix
from shardlab.matrix.matrix import Matrix
from shardlab.matrix.study import Deviation
from shardlab.terminal.console import Parser
from shardlab.verb import Invocation
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

FOLDER = "adapted"  # the folder of a workspace that contains one folder for each adapted matrix
WIDTH = 130  # columns of the file
# text that is written without quotes, unless PyYAML itself adds them
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*( [A-Za-z0-9_./()-]+)*")


def add_adapt(parser: Parser) -> None:
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
    requested_matrix = matrix.load_matrix(matrix.find_matrix_file(arguments.matrix))
    machine = plan.find_capacity(invocation.cluster, in_allocation=getattr(arguments, "in_allocation", False))
    plugins = plan.find_own_plugins(invocation.workspace, requested_matrix, invocation.cluster)
    try:
        adaptation = adapt_matrix(requested_matrix, machine, plugins, invocation.cluster.name)
        if adaptation is None:
            fit_text = f"all cells fit the cluster {invocation.cluster.name} (memory is not looked at)"
            out.print_line(f"{requested_matrix.name}: {fit_text}; nothing was changed.")
        else:
            arguments.matrix = str(write_adapted_matrix(requested_matrix, adaptation, machine, plugins, invocation.workspace))
            out.print_line(f"{requested_matrix.name}: adapted to the cluster {invocation.cluster.name}: {arguments.matrix}")
            for change in adaptation.changes:
                out.print_line(f"  {describe_change(change)}")
    finally:
        plugins.close()
    arguments.adapt = False


def describe_change(change: Deviation) -> str:
    """A change as a line of text."""
    count = "" if change.cells is None else f" ({change.cells} cell{'' if change.cells == 1 else 's'})"
    if change.key.startswith("claims."):
        return f"{change.key}: {change.why}"
    if isinstance(change.study, dict):
        study = ", ".join(f"{key} {value}" for key, value in change.study.items())
        outcome = "left out" if change.here is None else "changed"
        return f"{change.key}: {study}: {outcome}{count}: {change.why}"
    return f"{change.key}: {change.here} instead of {change.study}{count}: {change.why}"


def write_adapted_matrix(
    requested: Matrix, adaptation: Adaptation, machine: Capacity, plugins: OwnPlugins, workspace: Workspace
) -> Path:
    """Write an adapted matrix, and the models that it names, into the workspace. Returns the path of the matrix file.

    The path is adapted/NAME-DIGEST/NAME.yaml, so that equal matrices have one file. The text is parsed again before it is
    written. Raises InputError if the text does not give the expected cells, or if a file with this path has another content.
    """
    name = str(adaptation.content["name"])
    content = format_matrix_file(requested, adaptation.content)
    matrix_folder = workspace.path / FOLDER / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    file = matrix_folder / f"{name}.yaml"
    _check_adapted_matrix(requested, content, adaptation, machine, plugins, file)
    workspace_trust.begin_workspace(workspace)
    models = {model.path: model.origin for model in requested.models.values() if model.path is not None}
    contents = {file: content} | {matrix_folder / path: files.read(Path(origin)) for path, origin in models.items()}
    for target, new_content in contents.items():
        if target.exists() and files.read(target) != new_content:
            raise InputError(f"{target}: was changed after `--adapt` wrote it. Allowed: --matrix {file}, or another file name.")
        files.make_folder(target.parent)
        files.write_atomic(target, new_content)
    return file


def format_matrix_file(requested_matrix: Matrix, content: dict[str, Any]) -> bytes:
    """The text of an adapted matrix file."""
    head = f"# {requested_matrix.name}, adapted to a cluster by `jobs plan --adapt`. `deviations` lists every change.\n"
    dumped: str = yaml.dump(content, Dumper=_Dumper, default_flow_style=None, sort_keys=False, allow_unicode=True, width=WIDTH)
    return (head + dumped).encode()


class _Dumper(yaml.SafeDumper):
    """Writes YAML that `shardlab.files.document` reads as the same values: without aliases, and with quotes around all text
    that a YAML parser could take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
    is_plain = PLAIN.fullmatch(data) is not None and data.lower() not in ("y", "n", "yes", "no", "on", "off")
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=None if is_plain else '"')


_Dumper.add_representer(str, _represent_text)


def _check_adapted_matrix(
    requested: Matrix, content: bytes, adaptation: Adaptation, machine: Capacity, plugins: OwnPlugins, file: Path
) -> None:
    """Raise InputError if the text of an adapted matrix does not give exactly the expected cells, or if one of its cells does
    not fit."""
    reparsed_matrix = matrix.expand_matrix(parse(content, str(file)), Path(requested.path).parent)
    cells = resolve_cells(reparsed_matrix, cluster=None if machine.here else machine, plugins=plugins)
    if {cell.hash() for cell in cells} != adaptation.expected or find_misfits(reparsed_matrix, cells, machine, cells):
        raise InputError(
            f"{requested.path}: cannot be adapted, because an entry of `include` would change the adapted cells. Allowed: a "
            "matrix whose entries of `include` name other keys than those of `axes` and `zip`, or a matrix adapted by hand."
        )
