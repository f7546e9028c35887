"""`jobs submit --from FILE`: submits the matrix of an archive (shardlab.workspace.archive) in this workspace."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from pathlib import Path

from jobs.plugins import command_folder, plugin_store
from shardlab.errors import InputError, ShardlabError
from shardlab.files import files, plugin_source
from shardlab.matrix import matrix, overrides
from shardlab.verb import Invocation
from shardlab.workspace import archive, workspace_trust
from shardlab.workspace.workspace import Workspace

ARCHIVED_FOLDER = "archived"  # the folder of a workspace that contains one folder for the matrix of each archive
CODE_FOLDERS = tuple(f"{name}/" for name in plugin_source.CARRIED_FOLDERS)
NOTES_FOLDER = ".shardlab/matrices/"  # the folder of an archive that contains the expansion of the matrix
MATRIX_FOLDER = "matrix/"  # the folder of an archive that contains the matrix file and the model files that the matrix names


def use_archived_matrix(invocation: Invocation) -> None:
    """With --from FILE, write the matrix of the archive into the workspace, and let the arguments name it as --matrix. Values
    that --set gave for the archived runs hold too, unless the arguments set their keys.

    Raises InputError, and writes nothing, if the archive is not valid, if it has no matrix file, or if it contains code and
    --trust is not given.
    """
    arguments = invocation.arguments
    if arguments.archive is not None:
        matrix_path, settings = unpack_matrix(Path(arguments.archive), invocation.workspace, trust=arguments.trust)
        set_keys = {setting.partition("=")[0].strip() for setting in arguments.settings}
        arguments.settings = [setting for setting in settings if setting.partition("=")[0] not in set_keys] + arguments.settings
        arguments.matrix, arguments.archive = str(matrix_path), None


def unpack_matrix(file: Path, workspace: Workspace, *, trust: bool) -> tuple[Path, list[str]]:
    """Write the matrix of an archive and the code that it needs into a workspace. Returns the path of the matrix file, and the
    values of --set with which it was submitted.

    The matrix is written to archived/NAME-DIGEST, so that the same archive gives the same path. trust: whether the user has
    read the code and allows it. Raises InputError as `use_archived_matrix`, and if a file of code in the workspace differs from
    the archive's file of that name.
    """
    with tempfile.TemporaryDirectory(prefix="shardlab-archive-") as archive_folder:
        index = archive.unpack_archive(
            file,
            Path(archive_folder),
            lambda name: name.startswith((MATRIX_FOLDER, NOTES_FOLDER, *CODE_FOLDERS, archive.COMMANDS_FOLDER)),
        )
        if index.matrix_file is None:
            raise InputError(f"{file}: has no matrix file: it was lost before. Allowed: another archive.")
        settings = overrides.list_settings(Workspace(Path(archive_folder)).read_expansion(index.matrix).deviations)
        shutil.rmtree(Path(archive_folder) / NOTES_FOLDER)
        command_lines = _list_command_lines(Path(archive_folder) / index.matrix_file)
        unpacked_files = [path for path in Path(archive_folder).rglob("*") if path.is_file()]
        contents_by_name = {path.relative_to(archive_folder).as_posix(): files.read(path) for path in unpacked_files}
    code_contents = {name: content for name, content in contents_by_name.items() if not name.startswith(MATRIX_FOLDER)}
    if command_lines and not trust:
        raise InputError(
            f"{file}: its matrix runs programs: {'; '.join(command_lines)}. Read it and its files (collect open "
            f"{file.name}), and allow it with --trust."
        )
    if code_contents and not trust:
        raise InputError(
            f"{file}: contains code: {', '.join(sorted(code_contents))}. Read it (collect open {file.name}), and "
            "allow it with --trust."
        )
    packed_commands = {
        name: code_contents.pop(name) for name in list(code_contents) if name.startswith(archive.COMMANDS_FOLDER)
    }
    for name, content in code_contents.items():
        existing_path = workspace.path / name
        if existing_path.exists() and files.read(existing_path) != content:
            raise InputError(
                f"{existing_path}: differs from the file of this name in {file}. Allowed: equal files, or another workspace."
            )
    workspace_trust.begin_workspace(workspace)
    for name, content in packed_commands.items():
        _unpack_command(workspace, file, name, content)
    digest = hashlib.sha256(b"".join(name.encode() + contents_by_name[name] for name in sorted(contents_by_name))).hexdigest()[
        :12
    ]
    matrix_folder = workspace.path / ARCHIVED_FOLDER / f"{index.matrix}-{digest}"
    for name, content in contents_by_name.items():
        if name in packed_commands:
            continue
        target_path = workspace.path / name if name in code_contents else matrix_folder / name.removeprefix(MATRIX_FOLDER)
        files.make_folder(target_path.parent)
        files.write_atomic(target_path, content)
    return matrix_folder / index.matrix_file.removeprefix(MATRIX_FOLDER), settings


def _list_command_lines(matrix_path: Path) -> list[str]:
    """The command lines of a matrix file; empty also if the file is not valid, which is reported when it is used."""
    try:
        commands = matrix.load_matrix(matrix_path).command_by_name
    except ShardlabError:
        return []
    return [f"{name}: {' '.join(map(str, workload.command))}" for name, workload in commands.items()]


def _unpack_command(workspace: Workspace, archive_file: Path, archive_path: str, packed_folder: bytes) -> None:
    """Write the files of a command into the store of the workspace. archive_path: the path of the archive's file that has them.

    Raises InputError if they are damaged.
    """
    from jobs.plugins import send_folder  # not at the top: each start of a command would import tarfile

    digest = archive_path.removeprefix(archive.COMMANDS_FOLDER).removesuffix(".tar.gz")
    if re.fullmatch("[0-9a-f]{16}", digest) is None:
        raise InputError(
            f"{archive_file}: {archive_path}: is not the name of the files of a command. Allowed: the digest of the "
            "files, .tar.gz."
        )
    if not command_folder.has_frozen_copy(plugin_store.find_store(workspace), digest):
        send_folder.unpack_folder(workspace, digest, packed_folder)
