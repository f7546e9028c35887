"""The files in a workspace about its CloudLab experiment: the manifests, and a note about who created the experiment.

The argument `shardlab_folder` of the functions is the folder .shardlab of the workspace.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shardlab.files import files, json_file

SCHEMA = 1
MANIFEST_FOLDER = "cloudlab"  # the folder in .shardlab with a manifest AGGREGATE.xml of each aggregate, and with lease.json
# A file in .shardlab; it is not in MANIFEST_FOLDER, because that folder is replaced as a whole
NOTE_FILE = "cloudlab-experiment.json"
OLD_SUFFIX = ".old"  # suffix that a file or folder gets when it is no longer used


class ExperimentNote(msgspec.Struct, frozen=True):
    """The content of .shardlab/cloudlab-experiment.json. All times are in ISO 8601 with a time zone.

    If `created_by_us` is true and `uuid` is null, `provision` wrote the note before it asked the portal to create the
    experiment, and may have been killed before it read the answer. The experiment may therefore exist.
    """

    schema: int
    name: str
    created_by_us: bool
    """Whether this workspace asked the portal to create the experiment. If not, `provision down` must not terminate it."""
    project: str | None = None
    profile: str | None = None
    """The profile with its project, as PROJECT/NAME."""
    portal_url: str | None = None
    user: str | None = None
    """The user whose token created the experiment; None: the portal did not name the user."""
    asked_at: str | None = None
    """The time by the portal's clock just before `provision` asked the portal to create the experiment."""
    uuid: str | None = None
    created_at: str | None = None
    """When the portal created the experiment."""
    page: str | None = None
    """The address of the experiment's web page at the portal."""


def find_note_path(shardlab_folder: Path) -> Path:
    """The path of the note about the experiment."""
    return shardlab_folder / NOTE_FILE


def read_note(shardlab_folder: Path) -> ExperimentNote | None:
    """The note, or None if the workspace has no note. Raises InputError for a damaged note."""
    fault_template = "is not a note of this version: {}. Allowed: the file as `provision` wrote it."
    return json_file.read_json(find_note_path(shardlab_folder), ExperimentNote, fault_template)


def write_note(shardlab_folder: Path, note: ExperimentNote) -> ExperimentNote:
    """Store the note in the workspace, and return it. Raises WorkspaceError."""
    files.make_folder(shardlab_folder)
    files.write_json(find_note_path(shardlab_folder), note)
    return note


def list_stored_manifests(shardlab_folder: Path) -> list[Path]:
    """The paths of the stored manifests; empty if no manifest is stored."""
    return sorted((shardlab_folder / MANIFEST_FOLDER).glob("*.xml"))


def store_manifests(shardlab_folder: Path, manifest_by_aggregate: Mapping[str, bytes]) -> None:
    """Replace the stored manifests by these manifests of the experiment. Either all of them are stored, or nothing changes.

    manifest_by_aggregate: for each manifest, the name of its aggregate, which must be safe as a file name -> its content.
    Raises WorkspaceError.
    """
    manifest_folder = shardlab_folder / MANIFEST_FOLDER
    staging_folder = manifest_folder.with_suffix(".new")
    with files.as_workspace_error("write"):
        shutil.rmtree(staging_folder, ignore_errors=True)
        files.make_folder(staging_folder)
        for aggregate, manifest_bytes in manifest_by_aggregate.items():
            files.write_atomic(staging_folder / f"{aggregate}.xml", manifest_bytes)
        if manifest_folder.exists():
            _rename_to_old(manifest_folder)
        staging_folder.rename(manifest_folder)
        files.sync_folder(shardlab_folder)


def put_experiment_aside(shardlab_folder: Path) -> None:
    """Rename the folder of the manifests and then the note, so that their names end in .old and no command uses them.

    Raises WorkspaceError.
    """
    with files.as_workspace_error("write"):
        for path in (shardlab_folder / MANIFEST_FOLDER, find_note_path(shardlab_folder)):
            if path.exists():
                _rename_to_old(path)
        files.sync_folder(shardlab_folder)


def _rename_to_old(path: Path) -> None:
    old_path = path.with_name(path.name + OLD_SUFFIX)
    if old_path.is_dir():
        shutil.rmtree(old_path)
    path.rename(old_path)
