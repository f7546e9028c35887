"""Readers of image sets: they read the official formats, refuse damaged files, and give the same pixels each time."""

import gzip
import io

import numpy as np
import pytest
from PIL import Image
from support_datasets import CIFAR, cifar_members, cifar_records, idx, imagenet_members, jpeg, mnist_members, put

from shardlab.errors import InputError, UnknownName, WorkspaceError
from trainers.data import image_list, imagenet
from trainers.data.image_sets import open_images
from trainers.data.images import resize_images

ALL = np.arange(3)


def opened(folder, name, split="train", **keys):
    return open_images(name, folder, split, **{"image_size": 32, "class_count": None, "subset": None, "subset_seed": 0, **keys})


@pytest.mark.parametrize(("name", "missing"), [("cifar10", CIFAR), ("mnist", "mnist"), ("imagenet", "imagenet")])
def test_a_missing_data_set_is_refused_and_not_replaced_by_synthetic_data(tmp_path, name, missing):
    """If the files of a data set are missing, the error says how to stage them; no synthetic data is used."""
    with pytest.raises(InputError) as refusal:
        opened(tmp_path, name)
    assert str(refusal.value).startswith(f"{tmp_path / missing}: not found")
    assert "To let `provision` stage it" in str(refusal.value)
    assert f"name: {name}" in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_wrong_words_are_refused(tmp_path):
    with pytest.raises(UnknownName, match="Did you mean 'cifar10'"):
        opened(tmp_path, "cifar")
    with pytest.raises(UnknownName, match="Allowed: train, validation"):
        opened(tmp_path, "synthetic", "test")
    for keys in ({"image_size": 0}, {"subset": 0}, {"class_count": 1}):
        with pytest.raises(InputError, match="Allowed: at least"):
            opened(tmp_path, "synthetic", **keys)
    with pytest.raises(InputError, match=r"subset_seed: found -1\. Allowed: 0 to"):
        opened(tmp_path, "cifar10", subset_seed=-1)


@pytest.mark.parametrize("size", [8, 32, 50])
def test_synthetic_images_follow_from_their_index(tmp_path, size):
    train, again = (opened(tmp_path, "synthetic", image_size=size, class_count=7) for _ in range(2))
    images, labels = train.read(np.array([5, 3, 1999]))
    assert (images.shape, images.dtype, labels.dtype) == ((3, 3, size, size), np.float32, np.int64)
    assert np.array_equal(again.read(np.array([3]))[0][0], images[1])
    assert train.source == again.source
    assert (train.source.synthetic, train.source.items, train.class_count) == (True, 2000, 7)
    validation = opened(tmp_path, "synthetic", "validation", image_size=size, class_count=7)
    assert validation.source.items == 500
    assert validation.source.sha256 != train.source.sha256
    assert not np.array_equal(validation.read(np.array([3]))[0][0], images[1])
    many, labels = train.read(np.arange(2000))
    assert abs(many.mean()) < 0.1
    assert 0.9 < many.std() < 1.1
    assert set(labels) == set(range(7))
    assert not list(tmp_path.iterdir())


def test_synthetic_images_can_be_learned_also_across_the_splits(tmp_path):
    images, labels = opened(tmp_path, "synthetic", image_size=16).read(np.arange(1000))
    means = np.stack([images[labels == label].mean(0) for label in range(10)])
    images, labels = opened(tmp_path, "synthetic", "validation", image_size=16).read(np.arange(200))
    nearest = ((images[:, None] - means) ** 2).sum((2, 3, 4)).argmin(1)
    assert (nearest == labels).mean() > 0.95


def test_a_synthetic_set_is_as_long_as_asked(tmp_path):
    large = opened(tmp_path, "synthetic", image_size=4, class_count=1000, subset=131_072)
    assert large.source.items == 131_072
    assert large.read(np.array([131_071]))[1] < 1000


def test_cifar_is_read_plane_by_plane_and_split_as_published(tmp_path):
    members = cifar_members()
    put(tmp_path, members)
    train, validation = opened(tmp_path, "cifar10"), opened(tmp_path, "cifar10", "validation")
    assert (train.source.items, validation.source.items, train.class_count, train.source.synthetic) == (20, 4, 10, False)
    images, labels = train.read(np.array([5]))
    record = members[f"{CIFAR}/data_batch_2.bin"][3073 : 2 * 3073]
    assert labels.tolist() == [record[0]] == [1]
    for plane, (mean, std) in enumerate([(0.4914, 0.2470), (0.4822, 0.2435), (0.4465, 0.2616)]):
        pixel = record[1 + 1024 * plane + 32 * 3 + 7]
        assert images[0, plane, 3, 7] == pytest.approx((pixel / 255 - mean) / std, rel=1e-5, abs=1e-6)
    larger = opened(tmp_path, "cifar10", image_size=64)
    assert larger.source.name == "CIFAR-10 resized to 64 x 64"
    assert larger.read(ALL)[0].shape == (3, 3, 64, 64)


@pytest.mark.parametrize(("size", "source"), [(64, 32), (50, 32), (20, 32), (28, 28), (224, 32)])
def test_images_are_resized_as_pillow_does(size, source):
    planes = np.random.default_rng(0).uniform(0, 255, (2, 1, source, source)).astype(np.float32)
    for plane, ours in zip(planes[:, 0], resize_images(planes, size)[:, 0], strict=True):
        theirs = Image.fromarray(plane, mode=None).resize((size, size), Image.Resampling.BILINEAR)
        assert np.allclose(np.asarray(theirs), ours, atol=1e-2)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "found 0 bytes. Allowed: a multiple of 3073"),
        (cifar_records()[:-1], "found 12291 bytes. Allowed: a multiple of 3073"),
        (cifar_records(label=10), "record 0 has the label 10. Allowed: 0 to 9."),
        (None, "no such file. Allowed: a folder with data_batch_1.bin"),
    ],
)
def test_damaged_cifar_is_refused_in_a_sentence(tmp_path, content, why):
    put(tmp_path, cifar_members())
    broken = tmp_path / CIFAR / "data_batch_4.bin"
    broken.unlink() if content is None else broken.write_bytes(content)
    with pytest.raises(InputError) as refusal:
        opened(tmp_path, "cifar10")
    assert str(refusal.value).startswith(f"{broken}: {why}")
    assert opened(tmp_path, "cifar10", "validation").source.items == 4


def test_a_subset_is_drawn_by_its_seed_alone(tmp_path):
    put(tmp_path, cifar_members())
    whole, some, again, other = (
        opened(tmp_path, "cifar10", subset=subset, subset_seed=seed) for subset, seed in ((None, 0), (8, 1), (8, 1), (8, 2))
    )
    assert some.source == again.source
    assert some.source.name == "CIFAR-10, 8 images by seed 1"
    assert len({one.source.sha256 for one in (whole, some, other)}) == 3
    everything = {image.tobytes(): place for place, image in enumerate(whole.read(np.arange(20))[0])}
    places = [everything[image.tobytes()] for image in some.read(np.arange(8))[0]]
    assert places == sorted(set(places))
    assert opened(tmp_path, "cifar10", "validation", subset=2).source.items == 4
    with pytest.raises(InputError, match=r"found 21, but CIFAR-10 has 20 images\. Allowed: at most 20"):
        opened(tmp_path, "cifar10", subset=21)


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_stands_in_three_colours_in_a_frame(tmp_path, zipped):
    put(tmp_path / "mnist", mnist_members(zipped=zipped))
    train = opened(tmp_path, "mnist")
    assert (train.source.items, opened(tmp_path, "mnist", "validation").source.items) == (6, 3)
    assert train.source.name == "MNIST, grey in three colours framed to 32 x 32"
    images, labels = train.read(np.array([4, 2]))
    assert labels.tolist() == [4, 2]
    assert images.shape == (2, 3, 32, 32)
    assert np.array_equal(images[:, 0], images[:, 2])
    black = (0 - 0.1307) / 0.3081
    assert np.allclose(images[:, :, :2], black)
    assert np.allclose(images[:, :, :, -2:], black)
    plain = opened(tmp_path, "mnist", image_size=28)
    assert plain.source.name == "MNIST, grey in three colours"
    assert plain.source.sha256 == train.source.sha256
    assert np.allclose(plain.read(np.array([4]))[0][0], images[0, :, 2:-2, 2:-2])
    assert opened(tmp_path, "mnist", image_size=64).read(ALL)[0].shape == (3, 3, 64, 64)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
SIX = mnist_members(zipped=False)[IMAGES]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        (IMAGES, None, f"no such file, and no {IMAGES}.gz."),
        (IMAGES, b"", "starts with . Allowed: 00 00 08 03"),
        (IMAGES, b"\x80\x04 a pickle......", "starts with 80 04 20 61. Allowed: 00 00 08 03"),
        (IMAGES, b"\0\0\x0d\3" + SIX[4:], "starts with 00 00 0d 03"),
        (IMAGES, SIX[:10], "starts with 00 00 08 03"),
        (IMAGES, SIX[:-1], "found 4703 bytes after the header. Allowed: 4704"),
        (IMAGES, SIX + b"x", "found more than 4704 bytes after the header. Allowed: 4704"),
        (IMAGES, b"\0\0\x08\3" + b"\xff" * 12, "its header announces 79228162458924105385300197375 bytes. Allowed: 1 to"),
        (IMAGES, b"\0\0\x08\3" + bytes(12), "its header announces 0 bytes"),
        (IMAGES, idx(np.zeros((6, 9, 9))), "found images of 9 x 9 pixels. Allowed: 28 x 28"),
        (LABELS, idx(np.arange(5)), "found 5 labels. Allowed: 6, one for each image"),
        (LABELS, idx(np.array([0, 1, 2, 10, 4, 5])), "record 3 has the label 10. Allowed: 0 to 9"),
        (f"{LABELS}.gz", b"no gzip", "the gzip file is damaged or incomplete"),
        (f"{LABELS}.gz", gzip.compress(idx(np.arange(6)), mtime=0)[:-5], "the gzip file is damaged"),
        (f"{LABELS}.gz", gzip.compress(idx(np.arange(6)) + bytes(9), mtime=0), "found more than 6 bytes after the header"),
    ],
)
def test_damaged_mnist_is_refused_in_a_sentence(tmp_path, name, content, why):
    folder = put(tmp_path / "mnist", mnist_members(zipped=False))
    (folder / name.removesuffix(".gz")).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(InputError) as refusal:
        opened(tmp_path, "mnist")
    assert str(refusal.value).startswith(f"{folder / name}: {why}")


def test_an_idx_file_that_cannot_be_read_says_so(tmp_path):
    (put(tmp_path / "mnist", mnist_members(zipped=False)) / LABELS).unlink()
    (tmp_path / "mnist" / LABELS).mkdir()
    with pytest.raises(WorkspaceError, match="cannot read the data set"):
        opened(tmp_path, "mnist")


@pytest.fixture
def imagenet_path(tmp_path):
    put(tmp_path / "imagenet", imagenet_members())
    return tmp_path


def test_imagenet_labels_come_from_all_folders_of_train(imagenet_path):
    train = opened(imagenet_path, "imagenet")
    assert (train.source.items, train.class_count, train.source.name) == (12, 3, "ImageNet, 32 x 32")
    images, labels = train.read(np.arange(12))
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    validation = opened(imagenet_path, "imagenet", "validation")
    assert validation.read(ALL)[1].tolist() == [0, 1, 2]
    # Images of one colour show how pixels are normalised. JPEG itself changes a value by up to two of 255 levels.
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    assert np.allclose(images[4, :, 16, 16] * std + mean, np.array([80, 100, 50]) / 255, atol=3 / 255)


def test_a_subset_of_imagenet_is_written_down_once_and_keeps_the_classes(imagenet_path):
    some = opened(imagenet_path, "imagenet", subset=3, subset_seed=38850191)
    path = imagenet_path / "imagenet-train-3-seed-38850191.list"
    written, stamp = path.read_bytes(), path.stat().st_mtime_ns
    head, *entries = written.splitlines()
    assert head == b'{"schema":1,"split":"train","classes":3,"found":12,"images":3,"seed":38850191}'
    assert len(entries) == 3
    again = opened(imagenet_path, "imagenet", subset=3, subset_seed=38850191)
    assert again.source == some.source
    assert (again.class_count, again.source.items) == (3, 3)
    assert path.stat().st_mtime_ns == stamp
    path.unlink()
    assert opened(imagenet_path, "imagenet", subset=3, subset_seed=38850191).source == some.source
    assert path.read_bytes() == written
    assert opened(imagenet_path, "imagenet", subset=3, subset_seed=1).source.sha256 != some.source.sha256
    with pytest.raises(InputError, match=r"found 13, but .*train has 12 images"):
        opened(imagenet_path, "imagenet", subset=13)


def test_a_class_that_a_subset_leaves_out_shifts_no_label(imagenet_path):
    for seed in range(5):
        one = opened(imagenet_path, "imagenet", subset=1, subset_seed=seed)
        (entry,) = image_list.read_list(imagenet_path / f"imagenet-train-1-seed-{seed}.list", "train", 1).entries
        assert one.read(np.array([0]))[1].tolist() == [int(entry.path.split("/")[1][1:]) - 1]


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (40, 30), (3000, 2000), (64, 64)])
@pytest.mark.parametrize("size", [32, 224])
def test_scaling_the_square_is_scaling_all_and_cutting(tmp_path, width, height, size):
    """The reader scales only the central square. This gives the same pixels as scaling the whole image and then cropping it."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    picture = Image.fromarray(np.stack([across, down, 255 - across], axis=-1).astype(np.uint8))
    handle = io.BytesIO()
    picture.save(handle, "JPEG", quality=95)
    ours = np.empty((3, size, size), np.float32)
    imagenet.decode_image(handle.getvalue(), tmp_path, size, ours)
    scale = size * 256 / 224 / min(width, height)
    whole = Image.open(io.BytesIO(handle.getvalue())).resize(
        (round(width * scale), round(height * scale)), Image.Resampling.BILINEAR
    )
    left, top = (whole.width - size) // 2, (whole.height - size) // 2
    theirs = np.asarray(whole.crop((left, top, left + size, top + size))).transpose(2, 0, 1) / 255
    std, mean = (np.array(values).reshape(3, 1, 1) for values in (imagenet.STD, imagenet.MEAN))
    assert np.abs(ours * std + mean - theirs).mean() < 4 / 255


@pytest.mark.parametrize(
    ("mode", "colour", "red_green_blue"),
    [
        ("L", 90, (90, 90, 90)),
        # In CMYK, each ink (0 to 255) absorbs light independently of the others: red is 255 (1 - cyan / 255) (1 - black / 255);
        # green and blue follow from magenta and yellow in the same way.
        ("CMYK", (200, 100, 0, 50), (255 * 55 / 255 * 205 / 255, 255 * 155 / 255 * 205 / 255, 205)),
    ],
)
def test_other_colours_become_red_green_and_blue(tmp_path, mode, colour, red_green_blue):
    image = np.full((3, 8, 8), np.nan, np.float32)
    imagenet.decode_image(jpeg(colour=colour, mode=mode), tmp_path, 8, image)
    # The mean and the standard deviation of ImageNet's three colours, with which torchvision normalises images.
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    seen = 255 * (image * std.reshape(3, 1, 1) + mean.reshape(3, 1, 1))
    assert np.abs(seen - np.array(red_green_blue).reshape(3, 1, 1)).max() < 3  # JPEG itself changes a value by up to two levels


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "the image is damaged"),
        (jpeg()[:200], "the image is damaged"),
        (b"GIF89a" + bytes(99), "the image is damaged or incomplete"),
    ],
)
def test_a_damaged_image_is_refused_by_name(imagenet_path, content, why):
    broken = imagenet_path / "imagenet/train/n00000002/n00000002_1.JPEG"
    broken.write_bytes(content)
    train = opened(imagenet_path, "imagenet")
    with pytest.raises(InputError) as refusal:
        train.read(np.arange(12))
    assert str(refusal.value).startswith(f"{broken}: {why}")
    broken.write_bytes(jpeg())
    with pytest.raises(InputError, match="the file changed after the image list was made"):
        train.read(np.array([5]))
    broken.unlink()
    with pytest.raises(WorkspaceError, match="cannot read the image"):
        train.read(np.array([5]))
    assert train.read(np.array([4]))[1] == [1]


def test_an_image_of_absurd_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(imagenet, "MOST_PIXELS", 1000)
    with pytest.raises(InputError, match=r"found 40 x 30 pixels\. Allowed: at most 1000"):
        imagenet.decode_image(jpeg(), tmp_path, 8, np.empty((3, 8, 8), np.float32))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda root: (root / "val/n00000009").mkdir(), "n00000009: is not a class of"),
        (lambda root: (root / "val").rename(root / "gone"), "val: no such folder"),
        (lambda root: [path.unlink() for path in (root / "val").rglob("*.JPEG")], "val: found no image"),
        (lambda root: [path.rename(root / path.name) for path in (root / "train").iterdir()], "found 0 class folders"),
    ],
)
def test_folders_that_are_not_imagenet_are_refused(imagenet_path, change, why):
    change(imagenet_path / "imagenet")
    with pytest.raises(InputError, match=why):
        opened(imagenet_path, "imagenet", "validation")
    assert not list(imagenet_path.glob("*.list"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: b"", ":1: is not the header of an image list"),
        (lambda text: b"{}\n", ":1: is not the header of an image list"),
        (lambda text: text.replace(b'"schema":1', b'"schema":2'), "does not match the lines after it"),
        (lambda text: text[: text.rindex(b"[")], "does not match the lines after it"),
        (lambda text: text.replace(b"[", b"{"), ":2: is not an entry"),
        (lambda text: text.replace(b"train/n00000001/", b"../../"), "found '../../"),
        (lambda text: text.replace(b'EG",0', b'EG",3'), "of class 3. Allowed: train/CLASS/FILE, 0 to 2"),
    ],
)
def test_a_list_that_was_changed_is_refused(imagenet_path, change, why):
    opened(imagenet_path, "imagenet")
    path = imagenet_path / "imagenet-train.list"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError) as refusal:
        opened(imagenet_path, "imagenet")
    assert str(refusal.value).startswith(str(path))
    assert why in str(refusal.value)
