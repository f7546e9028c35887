"""Unpacks the official archives of ImageNet (ILSVRC 2012) into one folder per class.

| archive | content |
|---|---|
| ILSVRC2012_img_train.tar | WNID.tar for each class, which contains WNID_NUMBER.JPEG |
| ILSVRC2012_img_val.tar | ILSVRC2012_val_NUMBER.JPEG, from 1, without folders |
| ILSVRC2012_devkit_t12.tar.gz | the ILSVRC2012_ID of each validation image, and meta.mat with the WNID of each ID |

The archives may be malicious: only plain files with expected names are written. A class is unpacked into a hidden folder,
which is renamed when it is complete, so that a later call continues after the last complete class.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from provision.datasets import synsets
from provision.datasets.archive import damage_as_input_error, foreign_member_error, read_members, write_member
from provision.datasets.formats import FORMATS
from shardlab.errors import InputError

TRAIN, VALIDATION, DEVELOPMENT_KIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
MOST_CLASSES = 10_000
MOST_KIT_FILES, MOST_KIT_BYTES = 10_000, 2**27  # the official kit has about a hundred files and 3 MiB
MOST_TEXT_BYTES = 2**24  # most bytes of a file of the kit that is read
CLASS_ARCHIVE = re.compile(r"(?:\./)?(?P<wnid>n[0-9]{1,12})\.tar")
VALIDATION_IMAGE = re.compile(r"(?:\./|val/)?(?P<name>ILSVRC2012_val_(?P<number>[0-9]{8})\.JPEG)")
META, TRUTH = "data/meta.mat", "data/ILSVRC2012_validation_ground_truth.txt"
WNID = re.compile(r"n[0-9]{1,12}")


def has_official_archives(folder: Path) -> bool:
    """Whether a folder has the official archive of the training images."""
    return (folder / TRAIN).is_file()


def unpack_official_archives(source: Path, folder: Path, settle: Callable[[], None]) -> None:
    """Unpack the three archives in `source` into `folder`, as train/WNID/*.JPEG and val/WNID/*.JPEG, then call `settle`.

    If an earlier call with the same archives was interrupted, this call continues after the last complete class.

    settle: checks `folder` and renames it. Raises InputError if an archive is missing or refused, or if the check fails; a
    refused archive leaves nothing. Raises OSError, for example if the disk is full; complete classes are then kept.
    """
    archives = [source / name for name in (TRAIN, VALIDATION, DEVELOPMENT_KIT)]
    for path in archives:
        if not path.is_file():
            raise InputError(f"{path}: no such file. Allowed: the official archives {', '.join(p.name for p in archives)}.")
    note = folder.with_name(f"{folder.name}.json")
    stats = [path.stat() for path in archives]
    expected_note = [[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in zip(archives, stats, strict=True)]
    if _read_note(note) != expected_note:
        shutil.rmtree(folder, ignore_errors=True)
        note.write_text(json.dumps(expected_note))
    try:
        wnids = _read_validation_classes(source / DEVELOPMENT_KIT)
        _unpack_train(source / TRAIN, folder / "train")
        _unpack_validation(source / VALIDATION, folder / "val", wnids)
        settle()
    except InputError:
        shutil.rmtree(folder, ignore_errors=True)
        note.unlink()
        raise
    note.unlink()


def _read_note(note: Path) -> object:
    """The names, sizes and times of the archives of an interrupted call, from its note; None if no note can be read."""
    try:
        return json.loads(note.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _unpack_train(archive: Path, folder: Path) -> None:
    data_format, classes = FORMATS["imagenet"], 0
    with archive.open("rb") as raw, damage_as_input_error(archive):
        for member in read_members(archive, raw, MOST_CLASSES, data_format.most_bytes, may_be_zipped=False):
            match = CLASS_ARCHIVE.fullmatch(member.info.name)
            if match is None:
                raise foreign_member_error(archive, member.info.name, "WNID.tar, one for each class")
            wnid, inner = match["wnid"], f"{archive}: {member.info.name}"
            classes += 1
            if (folder / wnid).exists():
                continue
            unfinished = _make_empty_folder(folder / f".{wnid}.growing")
            pattern = re.compile(rf"(?:\./)?(?P<name>{wnid}_[0-9]{{1,12}}\.JPEG)")
            with damage_as_input_error(inner):
                for photo in read_members(
                    inner, member.open(), data_format.most_files, data_format.most_bytes, may_be_zipped=False
                ):
                    name_match = pattern.fullmatch(photo.info.name)
                    if name_match is None:
                        raise foreign_member_error(inner, photo.info.name, f"{wnid}_NUMBER.JPEG")
                    write_member(inner, photo, unfinished / name_match["name"], image=True)
            _publish_folder(unfinished, folder / wnid)
    if not classes:
        raise InputError(f"{archive}: contains no data. Allowed: WNID.tar, one for each class.")


def _unpack_validation(archive: Path, folder: Path, wnids: Sequence[str]) -> None:
    """Unpack the validation images into one folder per class. wnids: the class of image 1, of image 2, and so on."""
    if folder.exists():
        return
    data_format, images = FORMATS["imagenet"], 0
    unfinished = _make_empty_folder(folder.with_name(f".{folder.name}.growing"))
    with archive.open("rb") as raw, damage_as_input_error(archive):
        for member in read_members(archive, raw, data_format.most_files, data_format.most_bytes, may_be_zipped=False):
            match = VALIDATION_IMAGE.fullmatch(member.info.name)
            if match is None:
                raise foreign_member_error(archive, member.info.name, "ILSVRC2012_val_NUMBER.JPEG")
            if not 1 <= (number := int(match["number"])) <= len(wnids):
                raise InputError(
                    f"{archive}: the member {member.info.name!r} has no class. Allowed: the numbers 1 to {len(wnids)}, which "
                    f"{DEVELOPMENT_KIT} lists."
                )
            write_member(archive, member, unfinished / wnids[number - 1] / match["name"], image=True)
            images += 1
    if images != len(wnids):
        raise InputError(f"{archive}: has {images} images. Allowed: {len(wnids)}, as many as {DEVELOPMENT_KIT} lists.")
    _publish_folder(unfinished, folder)


def _read_validation_classes(kit: Path) -> list[str]:
    """The WNID of each validation image, in the order of their numbers."""
    kit_files = _read_kit(kit)
    for name in (META, TRUTH):
        if name not in kit_files:
            raise InputError(f"{kit}: has no file {name}. Allowed: the official development kit of ILSVRC 2012.")
    wnid_by_id = synsets.read_classes(kit_files[META], f"{kit}: {META}")
    wnids: list[str] = []
    for line, text in enumerate(kit_files[TRUTH].decode("ascii", "replace").split(), 1):
        wnid = wnid_by_id.get(int(text)) if len(text) < 10 and text.isdecimal() else None
        if wnid is None or not WNID.fullmatch(wnid):
            raise InputError(f"{kit}: {TRUTH}: line {line}: found {text[:40]!r}. Allowed: an ILSVRC2012_ID of {META}.")
        wnids.append(wnid)
    return wnids


def _read_kit(kit: Path) -> Mapping[str, bytes]:
    """The bytes of the files META and TRUTH of the development kit, by name; a file that the kit lacks is left out."""
    contents: dict[str, bytes] = {}
    with kit.open("rb") as raw, damage_as_input_error(kit):
        for member in read_members(kit, raw, MOST_KIT_FILES, MOST_KIT_BYTES):
            for name in (META, TRUTH):
                if member.info.name.endswith(f"/{name}"):
                    if member.info.size > MOST_TEXT_BYTES:
                        raise InputError(f"{kit}: {name} has {member.info.size} bytes. Allowed: at most {MOST_TEXT_BYTES}.")
                    contents[name] = member.open().read()
    return contents


def _make_empty_folder(folder: Path) -> Path:
    """Make an empty folder. If an interrupted call left this folder, it is removed first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _publish_folder(unfinished: Path, folder: Path) -> None:
    """Flush a complete folder to the disk and rename it, so that `folder` exists only when it is complete."""
    os.sync()  # one sync of all file systems is faster than a thousand calls of fsync
    unfinished.rename(folder)
