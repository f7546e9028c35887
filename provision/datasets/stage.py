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
from provision.datasets.formats import FORMATS, Format
from shardlab import url
from shardlab.cluster import data_cache
from shardlab.errors import InputError

SCHEMA = 1
OWN = ".staging"  # the folder in the data path for locks, notes, and files that are being downloaded or unpacked


@dataclass(frozen=True)
class Wanted:
    """A data set that is wanted in the data path.

    source: an http(s) URL, an archive or a folder; None if the data set must already be in the data path.
    """

    data_path: str
    name: str
    source: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class DataSetState:
    """The state of a data set.

    ready: whether the data set is staged and verified. can: whether staging is possible. says: a sentence about the state.
    makes: whether staging would write the data set, and not only verify it.
    """

    ready: bool
    can: bool
    says: str
    makes: bool = False


def look(wanted: Wanted) -> DataSetState:
    """Find out what `stage` would do, without changing anything.

    Reads only sizes and names of files, and compares them with the note that was written when the data set was staged.
    """
    form, folder = FORMATS[wanted.name], _folder(wanted)
    if folder.exists():
        note = _read_note(wanted)
        if note is None:
            where = "" if _is_writable(wanted) else ", and is read in place, as its folder cannot be written"
            return DataSetState(False, True, f"verify {folder}, which already exists{where}")
        if wanted.sha256 and note["sha256"] and note["sha256"] != wanted.sha256:
            says = f"{folder} was made from an archive with the SHA-256 {note['sha256']}; remove it to stage the other one"
            return DataSetState(False, False, says)
        if note["summary"] != form.summary(folder):
            return DataSetState(False, False, f"{folder} has changed since it was staged; remove it to stage it again")
        return DataSetState(True, True, f"{folder} is staged")
    if wanted.source is None:
        return DataSetState(False, False, f"{folder} does not exist, and cluster.yaml names no archive for {wanted.name}")
    if not _is_writable(wanted):
        says = (
            f"{wanted.data_path} cannot be written, so {wanted.name} cannot be staged there; set data.path to a folder of yours"
        )
        return DataSetState(False, False, says)
    if not _is_url(wanted.source) and not Path(wanted.source).exists():
        return DataSetState(False, False, f"{wanted.source}: no such file, so {wanted.name} cannot be staged")
    how = "fetch" if _is_url(wanted.source) else "use the folder" if Path(wanted.source).is_dir() else "unpack"
    if _is_official(wanted.name, Path(wanted.source)):
        how = "unpack the official archives in"
    return DataSetState(False, True, f"{how} {url.without_secrets(wanted.source)} as {folder}", makes=True)


def stage(wanted: Wanted) -> DataSetState:
    """Stage the data set if it is not staged. Raises InputError for a refused source, ShardlabError for a failed download."""
    form, folder = FORMATS[wanted.name], _folder(wanted)
    with _alone(wanted):
        state = look(wanted)  # look again under the lock: another process may have staged the data set in the meantime
        if state.ready:
            return state
        if not state.can:
            raise InputError(f"{state.says}.")
        if folder.exists():
            form.check(folder)
            sha256 = None
        else:
            sha256 = _make(wanted, form, folder)
        _write_note(wanted, {"schema": SCHEMA, "sha256": sha256, "summary": form.summary(folder)})
        return DataSetState(True, True, f"{folder} is staged")


def download_archive(wanted: Wanted) -> DataSetState:
    """If the source is a URL, download and verify the archive, so that `stage` needs no network. Raises as `stage` does."""
    with _alone(wanted):
        state = look(wanted)
        if state.ready or not state.makes or not _is_url(wanted.source or ""):
            return state
        return DataSetState(False, True, f"downloaded {_downloaded(wanted, FORMATS[wanted.name])}", makes=True)


def _downloaded(wanted: Wanted, form: Format) -> Path:
    """The path of the verified archive. Downloads the archive if it does not exist yet."""
    assert wanted.source is not None
    assert wanted.sha256 is not None  # cluster.yaml must give the sha256 of a URL
    own = _own(wanted)
    path = own / f"{wanted.name}-{wanted.sha256[:12]}.archive"
    if not path.exists():
        partial = download.fetch(wanted.source, own / f"{wanted.name}.partial", wanted.sha256, form.most_bytes)
        partial.rename(path)
        download.forget(partial)
    return path


def _make(wanted: Wanted, form: Format, folder: Path) -> str | None:
    """Write the data set from its source into `folder`. Returns the SHA-256 of the archive; None if the source is a folder."""
    assert wanted.source is not None
    source = Path(wanted.source)
    unpacked = folder.parent / OWN / f"{wanted.name}.unpacking"
    if not _is_url(wanted.source) and _is_official(wanted.name, source) and not wanted.sha256:
        imagenet_archives.unpack(source, unpacked, lambda: _settle(form, unpacked, folder))
        return None
    shutil.rmtree(unpacked, ignore_errors=True)  # a killed process may have left this folder
    if not _is_url(wanted.source) and source.is_dir():
        if wanted.sha256:
            raise InputError(f"{source}: is a folder, which has no SHA-256. Allowed: a folder without sha256, or an archive.")
        _of_folder(source, form, unpacked, folder)
        return None
    if _is_url(wanted.source):
        assert wanted.sha256 is not None  # cluster.yaml must give the sha256 of a URL
        source, sha256 = _downloaded(wanted, form), wanted.sha256
    else:
        sha256 = download.digest(source)
        if wanted.sha256 not in (None, sha256):
            raise InputError(f"{source}: its SHA-256 is {sha256}. Allowed: {wanted.sha256}, as cluster.yaml says.")
    with _filled(form, unpacked, folder):
        archive.unpack(source, form, unpacked)
    for path in _own(wanted).glob(f"{wanted.name}-*.archive"):  # also archives of an earlier sha256 in cluster.yaml
        path.unlink()
    download.forget(_own(wanted) / f"{wanted.name}.partial")
    return sha256


def _is_official(name: str, source: Path) -> bool:
    """Whether the source is a folder with the official archives of ImageNet."""
    return name == "imagenet" and imagenet_archives.are_in(source)


def _of_folder(source: Path, form: Format, unpacked: Path, folder: Path) -> None:
    """Stage a data set from a folder of the user.

    If the folder contains the parts as tar files, they are unpacked. Otherwise a small data set is copied, and for a large data
    set a symbolic link to the folder is made.
    """
    parts = {name: source / f"{name}.tar" for name in form.parts}
    if parts and all(path.is_file() for path in parts.values()):
        with _filled(form, unpacked, folder):
            for name, path in parts.items():
                archive.unpack(path, form, unpacked, within=f"{name}/")
        return
    if form.linked:
        form.check(source)
        link = unpacked.with_suffix(".link")
        link.unlink(missing_ok=True)
        link.symlink_to(source.absolute())
        link.rename(folder)
        return
    with _filled(form, unpacked, folder):
        for path in sorted(source.iterdir()):
            if form.member.fullmatch(path.name) and path.is_file():
                shutil.copyfile(path, unpacked / path.name)


@contextlib.contextmanager
def _filled(form: Format, unpacked: Path, folder: Path) -> Iterator[None]:
    """Make the folder `unpacked` for the block to fill, then rename it to `folder`. After an error, `unpacked` is removed."""
    unpacked.mkdir()
    try:
        yield
        _settle(form, unpacked, folder)
    except BaseException:
        shutil.rmtree(unpacked, ignore_errors=True)
        raise


def _settle(form: Format, unpacked: Path, folder: Path) -> None:
    """Check the files in `unpacked`, flush them to the disk, and only then rename `unpacked` to `folder`."""
    try:
        form.check(unpacked)
    except InputError as error:  # the message must not name the folder `unpacked`, which is only temporary
        raise InputError(str(error).replace(f"{unpacked}/", "in the archive: ")) from None
    os.sync()  # one sync of all file systems is faster than a million calls of fsync
    unpacked.rename(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder(wanted: Wanted) -> Path:
    return Path(wanted.data_path) / FORMATS[wanted.name].folder


def _is_writable(wanted: Wanted) -> bool:
    return data_cache.is_writable(Path(wanted.data_path))


def _own(wanted: Wanted) -> Path:
    """The folder with the locks, the notes and the downloaded archives of this data path."""
    data_path = Path(wanted.data_path)
    return data_path / OWN if data_cache.is_writable(data_path) else data_cache.folder_of(data_path)


def _is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


@contextlib.contextmanager
def _alone(wanted: Wanted) -> Iterator[None]:
    """Hold the lock of a data set in its data path during the block; waits while another process holds this lock.

    The kernel releases the lock however its holder ends.
    """
    own = _own(wanted)
    own.mkdir(parents=True, exist_ok=True)
    with (own / f"{wanted.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _note(wanted: Wanted) -> Path:
    return _own(wanted) / f"{wanted.name}.json"


def _read_note(wanted: Wanted) -> dict[str, object] | None:
    """The note that was written when the data set was staged; None if there is no note, or if it cannot be read.

    Without a readable note, the data set is verified again and the note is written again.
    """
    try:
        note = json.loads(_note(wanted).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return note if isinstance(note, dict) and note.keys() >= {"sha256", "summary"} and note.get("schema") == SCHEMA else None


def _write_note(wanted: Wanted, note: dict[str, object]) -> None:
    temporary = _note(wanted).with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump(note, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(_note(wanted))


def plain(state: DataSetState) -> dict[str, object]:
    """The state of a data set as a dict, for JSON."""
    return asdict(state)
