"""Looks for a data set in its folder, or stages it there, completely or not at all, even if several processes do so at once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from provision.datasets import archive, download, imagenet_archives
from provision.datasets.formats import FORMATS, DataSetFormat
from shardlab import url
from shardlab.cluster import data_cache
from shardlab.errors import InputError

SCHEMA = 1
STAGING_NAME = ".staging"  # the folder in the data path for locks, notes, and files that are being downloaded or unpacked


@dataclass(frozen=True)
class StageRequest:
    """A data set that is wanted in the data path."""

    data_path: str
    name: str
    source: str | None = None
    """An http(s) URL, an archive or a folder; None if the data set must already be in the data path."""
    sha256: str | None = None


@dataclass(frozen=True)
class DataSetState:
    """The state of a data set."""

    ready: bool
    """Whether the data set is staged and verified."""
    can: bool
    """Whether staging is possible."""
    says: str
    """A sentence about the state."""
    makes: bool = False
    """Whether staging would write the data set, and not only verify it."""


def inspect_data_set(request: StageRequest) -> DataSetState:
    """Find out what `stage_data_set` would do, without changing anything.

    Reads only sizes and names of files, and compares them with the note that was written when the data set was staged.
    """
    data_format, folder = FORMATS[request.name], _find_data_set_folder(request)
    if folder.exists():
        stage_note = _read_note(request)
        if stage_note is None:
            read_in_place_note = "" if _is_writable(request) else ", and is read in place, as its folder cannot be written"
            return DataSetState(False, True, f"verify {folder}, which already exists{read_in_place_note}")
        if request.sha256 and stage_note["sha256"] and stage_note["sha256"] != request.sha256:
            conflict_text = (
                f"{folder} was made from an archive with the SHA-256 {stage_note['sha256']}; remove it to stage the other one"
            )
            return DataSetState(False, False, conflict_text)
        if stage_note["summary"] != data_format.summarize_folder(folder):
            return DataSetState(False, False, f"{folder} has changed since it was staged; remove it to stage it again")
        return DataSetState(True, True, f"{folder} is staged")
    if request.source is None:
        return DataSetState(False, False, f"{folder} does not exist, and cluster.yaml names no archive for {request.name}")
    if not _is_writable(request):
        conflict_text = f"{request.data_path} cannot be written, so {request.name} cannot be staged there; set data.path to "
        conflict_text += "a folder of yours"
        return DataSetState(False, False, conflict_text)
    if not _is_url(request.source) and not Path(request.source).exists():
        return DataSetState(False, False, f"{request.source}: no such file, so {request.name} cannot be staged")
    action_text = "fetch" if _is_url(request.source) else "use the folder" if Path(request.source).is_dir() else "unpack"
    if _has_official_archives(request.name, Path(request.source)):
        action_text = "unpack the official archives in"
    return DataSetState(False, True, f"{action_text} {url.remove_secrets(request.source)} as {folder}", makes=True)


def stage_data_set(request: StageRequest) -> DataSetState:
    """Stage the data set if it is not staged. Raises InputError for a refused source, ShardlabError for a failed download."""
    data_format, folder = FORMATS[request.name], _find_data_set_folder(request)
    with _hold_data_set_lock(request):
        state = inspect_data_set(request)  # again, under the lock: another process may have staged the data set
        if state.ready:
            return state
        if not state.can:
            raise InputError(f"{state.says}.")
        if folder.exists():
            data_format.check_folder(folder)
            archive_sha256 = None
        else:
            archive_sha256 = _make_data_set(request, data_format, folder)
        _write_note(request, {"schema": SCHEMA, "sha256": archive_sha256, "summary": data_format.summarize_folder(folder)})
        return DataSetState(True, True, f"{folder} is staged")


def download_archive(request: StageRequest) -> DataSetState:
    """If the source is a URL, download and verify the archive, so that `stage_data_set` needs no network. Raises as
    `stage_data_set` does."""
    with _hold_data_set_lock(request):
        state = inspect_data_set(request)
        if state.ready or not state.makes or not _is_url(request.source or ""):
            return state
        return DataSetState(False, True, f"downloaded {_download_if_missing(request, FORMATS[request.name])}", makes=True)


def _download_if_missing(request: StageRequest, data_format: DataSetFormat) -> Path:
    """The path of the verified archive. Downloads the archive if it does not exist yet."""
    assert request.source is not None
    assert request.sha256 is not None  # cluster.yaml must give the sha256 of a URL
    folder = _staging_folder(request)
    archive_path = folder / f"{request.name}-{request.sha256[:12]}.archive"
    if not archive_path.exists():
        part = download.fetch_file(request.source, folder / f"{request.name}.partial", request.sha256, data_format.most_bytes)
        part.rename(archive_path)
        download.delete_partial(part)
    return archive_path


def _make_data_set(request: StageRequest, data_format: DataSetFormat, folder: Path) -> str | None:
    """Write the data set from its source into `folder`. Returns the SHA-256 of the archive; None if the source is a folder."""
    assert request.source is not None
    source = Path(request.source)
    unpacked_folder = folder.parent / STAGING_NAME / f"{request.name}.unpacking"
    if not _is_url(request.source) and _has_official_archives(request.name, source) and not request.sha256:
        imagenet_archives.unpack_official_archives(
            source, unpacked_folder, lambda: _check_and_publish(data_format, unpacked_folder, folder)
        )
        return None
    shutil.rmtree(unpacked_folder, ignore_errors=True)  # a killed process may have left this folder
    if not _is_url(request.source) and source.is_dir():
        if request.sha256:
            raise InputError(f"{source}: is a folder, which has no SHA-256. Allowed: a folder without sha256, or an archive.")
        _stage_from_folder(source, data_format, unpacked_folder, folder)
        return None
    if _is_url(request.source):
        assert request.sha256 is not None  # cluster.yaml must give the sha256 of a URL
        source, sha256 = _download_if_missing(request, data_format), request.sha256
    else:
        sha256 = download.compute_file_sha256(source)
        if request.sha256 not in (None, sha256):
            raise InputError(f"{source}: its SHA-256 is {sha256}. Allowed: {request.sha256}, as cluster.yaml says.")
    with _fill_folder(data_format, unpacked_folder, folder):
        archive.unpack_archive(source, data_format, unpacked_folder)
    for path in _staging_folder(request).glob(f"{request.name}-*.archive"):  # also those of an earlier sha256 in cluster.yaml
        path.unlink()
    download.delete_partial(_staging_folder(request) / f"{request.name}.partial")
    return sha256


def _has_official_archives(data_set_name: str, source_folder: Path) -> bool:
    """Whether the source is a folder with the official archives of ImageNet."""
    return data_set_name == "imagenet" and imagenet_archives.has_official_archives(source_folder)


def _stage_from_folder(source_folder: Path, data_format: DataSetFormat, unpacked_folder: Path, folder: Path) -> None:
    """Stage a data set from a folder of the user.

    If the folder contains the parts as tar files, they are unpacked. Otherwise a small data set is copied, and for a large data
    set a symbolic link to the folder is made.
    """
    archive_by_part = {part_name: source_folder / f"{part_name}.tar" for part_name in data_format.part_names}
    if archive_by_part and all(source_path.is_file() for source_path in archive_by_part.values()):
        with _fill_folder(data_format, unpacked_folder, folder):
            for part_name, source_path in archive_by_part.items():
                archive.unpack_archive(source_path, data_format, unpacked_folder, name_prefix=f"{part_name}/")
        return
    if data_format.is_linked:
        data_format.check_folder(source_folder)
        link_path = unpacked_folder.with_suffix(".link")
        link_path.unlink(missing_ok=True)
        link_path.symlink_to(source_folder.absolute())
        link_path.rename(folder)
        return
    with _fill_folder(data_format, unpacked_folder, folder):
        for source_path in sorted(source_folder.iterdir()):
            if data_format.member_re.fullmatch(source_path.name) and source_path.is_file():
                shutil.copyfile(source_path, unpacked_folder / source_path.name)


@contextlib.contextmanager
def _fill_folder(data_format: DataSetFormat, unpacked_folder: Path, folder: Path) -> Iterator[None]:
    """Make the folder `unpacked_folder` for the block to fill, then rename it to `folder`. After an error, `unpacked_folder` is
    removed."""
    unpacked_folder.mkdir()
    try:
        yield
        _check_and_publish(data_format, unpacked_folder, folder)
    except BaseException:
        shutil.rmtree(unpacked_folder, ignore_errors=True)
        raise


def _check_and_publish(data_format: DataSetFormat, unpacked_folder: Path, folder: Path) -> None:
    """Check the files in `unpacked_folder`, flush them to the disk, and only then rename `unpacked_folder` to `folder`."""
    try:
        data_format.check_folder(unpacked_folder)
    except InputError as error:  # the message must not name the folder `unpacked`, which is only temporary
        raise InputError(str(error).replace(f"{unpacked_folder}/", "in the archive: ")) from None
    os.sync()  # one sync of all file systems is faster than a million calls of fsync
    unpacked_folder.rename(folder)
    folder_descriptor = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_descriptor)
    finally:
        os.close(folder_descriptor)


def _find_data_set_folder(request: StageRequest) -> Path:
    return Path(request.data_path) / FORMATS[request.name].folder


def _is_writable(request: StageRequest) -> bool:
    return data_cache.is_writable(Path(request.data_path))


def _staging_folder(request: StageRequest) -> Path:
    """The folder with the locks, the notes and the downloaded archives of this data path."""
    data_path = Path(request.data_path)
    return data_path / STAGING_NAME if data_cache.is_writable(data_path) else data_cache.find_cache_folder(data_path)


def _is_url(source_text: str) -> bool:
    return source_text.startswith(("http://", "https://"))


@contextlib.contextmanager
def _hold_data_set_lock(request: StageRequest) -> Iterator[None]:
    """Hold the lock of a data set in its data path during the block; waits while another process holds this lock.

    The kernel releases the lock however its holder ends.
    """
    staging_folder = _staging_folder(request)
    staging_folder.mkdir(parents=True, exist_ok=True)
    with (staging_folder / f"{request.name}.lock").open("ab") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


def _find_note_path(request: StageRequest) -> Path:
    return _staging_folder(request) / f"{request.name}.json"


def _read_note(request: StageRequest) -> dict[str, object] | None:
    """The note that was written when the data set was staged; None if there is no note, or if it cannot be read.

    Without a readable note, the data set is verified again and the note is written again.
    """
    try:
        note = json.loads(_find_note_path(request).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return note if isinstance(note, dict) and note.keys() >= {"sha256", "summary"} and note.get("schema") == SCHEMA else None


def _write_note(request: StageRequest, stage_note: dict[str, object]) -> None:
    temporary_path = _find_note_path(request).with_suffix(".tmp")
    with temporary_path.open("w") as note_file:
        json.dump(stage_note, note_file)
        note_file.flush()
        os.fsync(note_file.fileno())
    temporary_path.rename(_find_note_path(request))


def convert_state_to_dict(state: DataSetState) -> dict[str, object]:
    """The state of a data set as a dict, for JSON."""
    return asdict(state)
