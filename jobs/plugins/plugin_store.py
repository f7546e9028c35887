"""The folder WORKSPACE/.shardlab/own: what the plug-in files of a workspace define, and frozen copies of these files.

A description is cached by the digest of the file that it describes. A copy is made at submission, as DIGEST/FILE: code in the
folder of a run may have come from another machine, so a new attempt uses the copy that was made here.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from shardlab.errors import InputError, ShardlabError
from shardlab.files import files, json_file, plugin_source, source_digest
from shardlab.files.plugin_source import PluginSource
from shardlab.matrix import model_file
from shardlab.plugins import plugin_process
from shardlab.plugins.plugin_kind import WORKLOADS, OwnStrategy, OwnWorkload, PluginDescription, PluginKind
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

ANSWER_S = 600  # the most seconds for an answer; importing torch from a cold network disk takes minutes
OUTDATED_S = 24 * 3600  # a temporary folder that is older than this number of seconds is no longer in use

Description = TypeVar("Description", OwnWorkload, OwnStrategy)


def find_store(workspace: Workspace) -> Path:
    """The folder of the workspace that contains descriptions and frozen copies."""
    return workspace_trust.find_copies_folder(workspace, workspace_trust.ANSWERS_FOLDER)


def describe_plugins(
    workspace: Workspace,
    kind: PluginKind[PluginDescription[Description]],
    source: PluginSource,
    seq_len: int | None = None,
    python: str | None = None,
) -> list[Description]:
    """The plug-ins that a file defines, from the cache or from a new process.

    seq_len: the sequence length, for a model that is described by its configuration. python: the interpreter that executes
    the file; None: that of this process. Raises InputError, which names the fault of the file.
    """
    packages_digest = source_digest.digest_installed_packages()
    digest_text = "".join((source.digest, source_digest.digest_source(), packages_digest, str(seq_len or ""), python or ""))
    file_prefix = source.name if kind.folder == WORKLOADS.folder else f"{kind.folder}.{source.name}"
    description_path = find_store(workspace) / f"{file_prefix}-{hashlib.sha256(digest_text.encode()).hexdigest()[:16]}.json"
    description = json_file.read_json_if_valid(description_path, kind.answer_type)
    if description is None:
        description = _ask_process(kind, source, seq_len, python)
        if description.fault:
            raise InputError(description.fault)
        workspace_trust.begin_workspace(workspace)
        files.make_folder(description_path.parent)
        # remove descriptions of earlier versions of the file
        for outdated_path in description_path.parent.glob(f"{file_prefix}-{'?' * 16}.json"):
            outdated_path.unlink(missing_ok=True)
        files.write_json(description_path, description, sync=False)
    return description.plugins


def _ask_process(
    plugin_kind: PluginKind[PluginDescription[Description]], source: PluginSource, seq_len: int | None, interpreter: str | None
) -> PluginDescription[Description]:
    """Ask a separate process, which executes the code of a file, what the file defines. Raises InputError if it fails."""
    with tempfile.TemporaryDirectory(prefix="shardlab-own-") as code_folder:
        plugin_path = source.file
        # use the normalized text that runs get, not the text of the user's file
        if plugin_path.suffix == model_file.CONFIGURATION_SUFFIX:
            plugin_path = Path(code_folder) / WORKLOADS.folder / plugin_path.name
            plugin_source.write_plugin(plugin_path.parent, source)
        length_options: list[str] = [] if seq_len is None else ["--seq-len", str(seq_len)]
        command_words = ["trainers", "describe", str(plugin_path), *length_options]
        description = plugin_process.ask_process(command_words, source.file, plugin_kind.answer_type, ANSWER_S, interpreter)
    if any(plugin.code != source.digest for plugin in description.plugins):
        raise InputError(f"{source.file}: changed while it was read; run the command again.")
    return description


def freeze_sources(workspace: Workspace, sources: Iterable[PluginSource]) -> None:
    """Copy the plug-in files into the store, unless the store has an undamaged copy already. Raises WorkspaceError."""
    with files.as_workspace_error("clean up"):
        for temporary_folder in find_store(workspace).glob(".*.tmp"):  # left by a command that was killed
            if time.time() - temporary_folder.stat().st_mtime > OUTDATED_S:
                shutil.rmtree(temporary_folder, ignore_errors=True)
    for plugin in sources:
        is_intact = partial(_has_copy, plugin)
        if not is_intact(final_folder := find_store(workspace) / plugin.digest):
            with open_new_copy(final_folder, is_intact, f"{final_folder}: differs from {plugin.file}") as new_folder:
                plugin_source.write_plugin(new_folder, plugin)


def read_copy(folder: Path, file_name: str, code_digest: str) -> PluginSource | None:
    """Read the copy of a plug-in from a folder; None if the files of the copy are missing or do not have the digest
    `code_digest`.

    file_name: the path of the plug-in file that was copied; only the last part of the path is used.
    """
    try:
        copied_source = plugin_source.read_plugin(folder / Path(file_name).name)
    except ShardlabError:
        return None
    return copied_source if copied_source.digest == code_digest else None


def _has_copy(source: PluginSource, folder: Path) -> bool:
    return read_copy(folder, source.file.name, source.digest) is not None


@contextlib.contextmanager
def open_new_copy(final_folder: Path, is_intact: Callable[[Path], bool], fault_text: str) -> Iterator[Path]:
    """An empty folder, which becomes the frozen copy `final_folder` at the end of the `with` block.

    is_intact: whether a folder has the content of the copy. fault_text: what is wrong if the new folder does not have it.
    Raises InputError with it, and WorkspaceError.
    """
    new_folder = final_folder.with_name(f".{final_folder.name}.{secrets.token_hex(4)}.tmp")
    with files.as_workspace_error("write"):
        try:
            new_folder.mkdir(parents=True)
            yield new_folder
            if not is_intact(new_folder):
                raise InputError(f"{fault_text}; run the command again.")
            if final_folder.exists():  # the existing copy is damaged, or another person may have made it
                final_folder.rename(damaged_folder := new_folder.with_suffix(".damaged"))
                shutil.rmtree(damaged_folder)
            new_folder.rename(final_folder)
            files.sync_folder(final_folder.parent)
        finally:
            shutil.rmtree(new_folder, ignore_errors=True)
