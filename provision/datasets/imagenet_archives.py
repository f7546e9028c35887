"""Unpacks the official archives of ImageNet (ILSVRC 2012) into one folder per class.

| archive | content |
|---|---|
| ILSVRC2012_img_train.tar | WNID.tar for each class, which contains WNID_NUMBER.JPEG |
| ILSVRC2012_img_val.tar | ILSVRC2012_val_NUMBER.JPEG, from 1, without folders |
| ILSVRC2012_devkit_t12.tar.gz | the ILSVRC2012_ID of each validation image |

`imagenet_classes.txt` has the WNID of each ILSVRC2012_ID from 1 to 1000, one in a line; meta.mat of the kit says the same.
The archives may be malicious: only plain files with expected names are written. A class is unpacked into a hidden folder,
which is renamed when it is complete, so that a later call continues after the last complete class.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from provision.datasets.archive import make_foreign_member_error, raise_damage_as_input_error, read_members, write_member
from provision.datasets.formats import FORMATS
from shardlab.errors import InputError

TRAIN_ARCHIVE = "ILSVRC2012_img_train.tar"
VALIDATION_ARCHIVE = "ILSVRC2012_img_val.tar"
KIT_ARCHIVE = "ILSVRC2012_devkit_t12.tar.gz"
MOST_CLASSES = 10_000
MOST_KIT_FILES, MOST_KIT_BYTES = 10_000, 2**27  # the official kit has about a hundred files and 3 MiB
MOST_TEXT_BYTES = 2**24  # most bytes of TRUTH_FILE
CLASS_ARCHIVE = re.compile(r"(?:\./)?(?P<wnid>n[0-9]{1,12})\.tar")
VALIDATION_IMAGE = re.compile(r"(?:\./|val/)?(?P<name>ILSVRC2012_val_(?P<number>[0-9]{8})\.JPEG)")
TRUTH_FILE = "data/ILSVRC2012_validation_ground_truth.txt"
CLASSES_FILE = Path(__file__).parent / "imagenet_classes.txt"


def has_official_archives(folder: Path) -> bool:
    """Whether a folder has the official archive of the training images."""
    return (folder / TRAIN_ARCHIVE).is_file()


def unpack_official_archives(archives_folder: Path, target_folder: Path, publish_data_set: Callable[[], None]) -> None:
    """Unpack the three archives in `archives_folder` into `target_folder`, as train/WNID/*.JPEG and val/WNID/*.JPEG, then call
    `publish_data_set`.

    If an earlier call with the same archives was interrupted, this call continues after the last complete class.

    publish_data_set: checks `target_folder` and renames it. Raises InputError if an archive is missing or refused, or if the
    check fails; a refused archive leaves nothing. Raises OSError, for example if the disk is full; complete classes are then
    kept.
    """
    archives = [archives_folder / archive_name for archive_name in (TRAIN_ARCHIVE, VALIDATION_ARCHIVE, KIT_ARCHIVE)]
    for path in archives:
        if not path.is_file():
            raise InputError(f"{path}: no such file. Allowed: the official archives {', '.join(p.name for p in archives)}.")
    note_path = target_folder.with_name(f"{target_folder.name}.json")
    archive_stats = [path.stat() for path in archives]
    expected_note = [[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in zip(archives, archive_stats, strict=True)]
    if _read_note(note_path) != expected_note:
        shutil.rmtree(target_folder, ignore_errors=True)
        note_path.write_text(json.dumps(expected_note))
    try:
        wnids = _read_validation_classes(archives_folder / KIT_ARCHIVE)
        _unpack_train(archives_folder / TRAIN_ARCHIVE, target_folder / "train")
        _unpack_validation(archives_folder / VALIDATION_ARCHIVE, target_folder / "val", wnids)
        publish_data_set()
    except InputError:
        shutil.rmtree(target_folder, ignore_errors=True)
        note_path.unlink()
        raise
    note_path.unlink()


def _read_note(note_path: Path) -> object:
    """The names, sizes and times of the archives of an interrupted call, from its note; None if no note can be read."""
    try:
        return json.loads(note_path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _unpack_train(archive: Path, train_folder: Path) -> None:
    data_format, class_count = FORMATS["imagenet"], 0
    with archive.open("rb") as archive_stream, raise_damage_as_input_error(archive):
        for class_member in read_members(archive, archive_stream, MOST_CLASSES, data_format.most_bytes, may_be_zipped=False):
            class_match = CLASS_ARCHIVE.fullmatch(class_member.header.name)
            if class_match is None:
                raise make_foreign_member_error(archive, class_member.header.name, "WNID.tar, one for each class")
            wnid, inner_archive_name = class_match["wnid"], f"{archive}: {class_member.header.name}"
            class_count += 1
            if (train_folder / wnid).exists():
                continue
            unfinished_folder = _make_empty_folder(train_folder / f".{wnid}.growing")
            image_name_pattern = re.compile(rf"(?:\./)?(?P<name>{wnid}_[0-9]{{1,12}}\.JPEG)")
            with raise_damage_as_input_error(inner_archive_name):
                for image_member in read_members(
                    inner_archive_name, class_member.open(), data_format.most_files, data_format.most_bytes, may_be_zipped=False
                ):
                    name_match = image_name_pattern.fullmatch(image_member.header.name)
                    if name_match is None:
                        raise make_foreign_member_error(inner_archive_name, image_member.header.name, f"{wnid}_NUMBER.JPEG")
                    write_member(inner_archive_name, image_member, unfinished_folder / name_match["name"], must_be_image=True)
            _publish_folder(unfinished_folder, train_folder / wnid)
    if not class_count:
        raise InputError(f"{archive}: contains no data. Allowed: WNID.tar, one for each class.")


def _unpack_validation(archive: Path, validation_folder: Path, wnids: Sequence[str]) -> None:
    """Unpack the validation images into one folder per class. wnids: the class of image 1, of image 2, and so on."""
    if validation_folder.exists():
        return
    data_format, image_count = FORMATS["imagenet"], 0
    unfinished_folder = _make_empty_folder(validation_folder.with_name(f".{validation_folder.name}.growing"))
    with archive.open("rb") as tar_stream, raise_damage_as_input_error(archive):
        for member in read_members(archive, tar_stream, data_format.most_files, data_format.most_bytes, may_be_zipped=False):
            name_match = VALIDATION_IMAGE.fullmatch(member.header.name)
            if name_match is None:
                raise make_foreign_member_error(archive, member.header.name, "ILSVRC2012_val_NUMBER.JPEG")
            if not 1 <= (image_number := int(name_match["number"])) <= len(wnids):
                raise InputError(
                    f"{archive}: the member {member.header.name!r} has no class. Allowed: the numbers 1 to {len(wnids)}, which "
                    f"{KIT_ARCHIVE} lists."
                )
            write_member(archive, member, unfinished_folder / wnids[image_number - 1] / name_match["name"], must_be_image=True)
            image_count += 1
    if image_count != len(wnids):
        raise InputError(f"{archive}: has {image_count} images. Allowed: {len(wnids)}, as many as {KIT_ARCHIVE} lists.")
    _publish_folder(unfinished_folder, validation_folder)


def _read_validation_classes(kit_path: Path) -> list[str]:
    """The WNID of each validation image, in the order of their numbers."""
    all_wnids = CLASSES_FILE.read_text().split()
    wnids: list[str] = []
    for line_number, id_text in enumerate(_read_truth(kit_path).decode("ascii", "replace").split(), 1):
        class_id = int(id_text) if len(id_text) < 10 and id_text.isdecimal() else 0
        if not 1 <= class_id <= len(all_wnids):
            raise InputError(
                f"{kit_path}: {TRUTH_FILE}: line {line_number}: found {id_text[:40]!r}. Allowed: an ILSVRC2012_ID from 1 to "
                f"{len(all_wnids)}."
            )
        wnids.append(all_wnids[class_id - 1])
    return wnids


def _read_truth(kit: Path) -> bytes:
    """The bytes of TRUTH_FILE of the development kit."""
    truth_bytes = None
    with kit.open("rb") as kit_stream, raise_damage_as_input_error(kit):
        for member in read_members(kit, kit_stream, MOST_KIT_FILES, MOST_KIT_BYTES):
            if member.header.name.endswith(f"/{TRUTH_FILE}"):
                if member.header.size > MOST_TEXT_BYTES:
                    raise InputError(f"{kit}: {TRUTH_FILE} has {member.header.size} bytes. Allowed: at most {MOST_TEXT_BYTES}.")
                truth_bytes = member.open().read()
    if truth_bytes is None:
        raise InputError(f"{kit}: has no file {TRUTH_FILE}. Allowed: the official development kit of ILSVRC 2012.")
    return truth_bytes


def _make_empty_folder(folder: Path) -> Path:
    """Make an empty folder. If an interrupted call left this folder, it is removed first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _publish_folder(unfinished_folder: Path, folder: Path) -> None:
    """Flush a complete folder to the disk and rename it, so that `folder` exists only when it is complete."""
    os.sync()  # one sync of all file systems is faster than a thousand calls of fsync
    unfinished_folder.rename(folder)
