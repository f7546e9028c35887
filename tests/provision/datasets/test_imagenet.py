"""The official archives of ImageNet become class folders. An interrupted call continues; a wrong archive is refused."""

import hashlib
import io
import tarfile

import pytest
from support_datasets import imagenet_members, jpeg, put, tar

from provision.datasets import archive, imagenet_archives, stage
from provision.datasets.stage import StageRequest
from shardlab.errors import InputError

TRAIN, VALIDATION, KIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
WNIDS = ("n02119789", "n02100735", "n02110185")  # the class names (WordNet ids) of the class ids 1, 2, 3
KIT_DATA, TRUTH_NAME = "ILSVRC2012_devkit_t12/data", "ILSVRC2012_validation_ground_truth.txt"
TRUTH = "2\n3\n1\n2\n"  # the class ids of validation images 1 to 4


def class_archive(*members):
    handle = io.BytesIO()
    with tarfile.open(fileobj=handle, mode="w") as made:
        for name, content in members:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    return handle.getvalue()


def train_members():
    named = {name.split("/", 1)[1]: content for name, content in imagenet_members(WNIDS).items() if name.startswith("train/")}
    of_class = {wnid: [(path.split("/")[1], named[path]) for path in named if path.startswith(wnid)] for wnid in WNIDS}
    return {f"{wnid}.tar": class_archive(*images) for wnid, images in of_class.items()}


def official(folder, *, train=None, validation=None, kit=None):
    """Write the three archives with small images.

    train, validation, kit: members that are added to the archive or replace members of the same name.
    """
    folder.mkdir()
    images = {f"ILSVRC2012_val_{number:08d}.JPEG": jpeg(30 + number) for number in range(1, 5)}
    texts = {"ILSVRC2012_devkit_t12/readme.txt": b"x", f"{KIT_DATA}/{TRUTH_NAME}": TRUTH.encode()}
    tar(folder / TRAIN, train_members() | (train or {}), zipped=False)
    tar(folder / VALIDATION, {n: c for n, c in (images | (validation or {})).items() if c is not None}, zipped=False)
    tar(folder / KIT, {name: c for name, c in (texts | (kit or {})).items() if c is not None})
    return folder


def wanted(tmp_path, source):
    return StageRequest(str(tmp_path / "data"), "imagenet", str(source))


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_official_archives_become_class_folders(tmp_path):
    source = official(tmp_path / "official")
    assert stage.inspect_data_set(wanted(tmp_path, source)).says.startswith(f"unpack the official archives in {source} as ")
    assert stage.stage_data_set(wanted(tmp_path, source)).ready
    expected = {name: content for name, content in imagenet_members(WNIDS).items() if name.startswith("train/")}
    for number, place in enumerate((1, 2, 0, 1), 1):  # TRUTH, as positions in WNIDS
        name = f"ILSVRC2012_val_{number:08d}.JPEG"
        expected[f"val/{WNIDS[place]}/{name}"] = jpeg(30 + number)
    assert tree(tmp_path / "data" / "imagenet") == expected
    assert {path.name for path in (tmp_path / "data" / ".staging").iterdir()} == {"imagenet.lock", "imagenet.json"}
    assert stage.inspect_data_set(wanted(tmp_path, source)).ready


def test_the_1000_classes_are_those_of_the_development_kit():
    classes = imagenet_archives.CLASSES_FILE.read_bytes()  # compared with meta.mat of the official kit when it was written
    assert hashlib.sha256(classes).hexdigest() == "e85e4969a881deb8a8ba329357d033f7a664de8f1e099f593ad723bcf79bbfe5"
    assert len(set(classes.split())) == 1000


def test_an_interrupted_call_continues_after_the_last_complete_class(tmp_path, monkeypatch):
    source = official(tmp_path / "official")
    real, written = archive.write_member, []

    def until_the_disk_is_full(where, member, path, *, must_be_image):
        if len(written) == 6:
            raise OSError(28, "No space left on device", str(path))
        written.append(path.name)
        real(where, member, path, must_be_image=must_be_image)

    monkeypatch.setattr("provision.datasets.imagenet_archives.write_member", until_the_disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        stage.stage_data_set(wanted(tmp_path, source))
    assert not (tmp_path / "data" / "imagenet").exists()
    again = []
    monkeypatch.setattr(
        "provision.datasets.imagenet_archives.write_member",
        lambda where, member, path, *, must_be_image: (
            again.append(path.name),
            real(where, member, path, must_be_image=must_be_image),
        ),
    )
    assert stage.stage_data_set(wanted(tmp_path, source)).ready
    assert not {name for name in again if name.startswith(WNIDS[0])}  # the first class of the archive was complete
    assert {name for name in again if name.startswith(WNIDS[1])} == {f"{WNIDS[1]}_{number}.JPEG" for number in range(4)}
    assert len(tree(tmp_path / "data" / "imagenet")) == 16


def test_classes_unpacked_from_other_archives_are_not_used(tmp_path):
    source = official(tmp_path / "official")
    left = put(tmp_path / "data" / ".staging" / "imagenet.unpacking", {f"train/{WNIDS[0]}/{WNIDS[0]}_9.JPEG": jpeg()})
    left.with_name("imagenet.unpacking.json").write_text("[]")
    assert stage.stage_data_set(wanted(tmp_path, source)).ready
    assert not (tmp_path / "data" / "imagenet" / "train" / WNIDS[0] / f"{WNIDS[0]}_9.JPEG").exists()


def link(name):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return info


IMAGE = f"{WNIDS[0]}_1.JPEG"
REFUSED = [
    ({"train": {"../n00000009.tar": b""}}, f"{TRAIN}: the member '../n00000009.tar' leads out of its folder"),
    ({"train": {"notes.txt": b"x"}}, "the member 'notes.txt' does not belong to this set. Allowed: WNID.tar"),
    ({"train": {f"{WNIDS[0]}.tar": b"no tar" * 200}}, f"{TRAIN}: {WNIDS[0]}.tar: is not a whole tar file"),
    ({"train": {f"{WNIDS[0]}.tar": class_archive(("../x.JPEG", jpeg()))}}, "the member '../x.JPEG' leads out of its folder"),
    ({"train": {f"{WNIDS[0]}.tar": class_archive((link(IMAGE), b""))}}, f"'{IMAGE}' is a symbolic link. Allowed: plain files"),
    ({"train": {f"{WNIDS[0]}.tar": class_archive((f"{WNIDS[1]}_1.JPEG", jpeg()))}}, f"Allowed: {WNIDS[0]}_NUMBER.JPEG"),
    ({"train": {f"{WNIDS[0]}.tar": class_archive((IMAGE, b"MZ a program"))}}, "starts with 4d 5a 20 61. Allowed: a JPEG"),
    ({"validation": {"ILSVRC2012_val_00000005.JPEG": jpeg()}}, "has no class. Allowed: the numbers 1 to 4"),
    ({"validation": {"ILSVRC2012_val_00000004.JPEG": None}}, "has 3 images. Allowed: 4, as many as"),
    ({"kit": {f"{KIT_DATA}/{TRUTH_NAME}": None}}, f"{KIT}: has no file data/{TRUTH_NAME}"),
    ({"kit": {f"{KIT_DATA}/{TRUTH_NAME}": b"2\n1001\n"}}, "line 2: found '1001'. Allowed: an ILSVRC2012_ID from 1 to 1000"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "why"), REFUSED, ids=[why[:40] for _, why in REFUSED])
def test_a_wrong_archive_is_refused_and_leaves_nothing(tmp_path, changed, why):
    source = official(tmp_path / "official", **changed)
    with pytest.raises(InputError) as refusal:
        stage.stage_data_set(wanted(tmp_path, source))
    assert str(refusal.value).startswith(f"{source}/")
    assert why in str(refusal.value)
    assert {path.name for path in (tmp_path / "data").rglob("*")} == {".staging", "imagenet.lock"}


def test_the_development_kit_must_be_beside_the_images(tmp_path):
    source = official(tmp_path / "official")
    (source / KIT).unlink()
    with pytest.raises(InputError, match=f"{KIT}: no such file. Allowed: the official archives {TRAIN}, {VALIDATION}, {KIT}"):
        stage.stage_data_set(wanted(tmp_path, source))
