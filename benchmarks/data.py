"""Measures how many images or tokens per second one process reads, and compares our ImageNet reader with a plain pipeline.

    python benchmarks/data.py [--images 256] [--rounds 15] [--width 500] [--height 375] [--batch 32]

The plain pipeline opens a file with PIL and applies torchvision's Resize(256), CenterCrop(224), ToTensor and Normalize. Both
pipelines read the same generated JPEGs from the page cache. They take turns, and their ratio is computed for each round, so
that changes in the speed of the machine affect both. "1 thread": both use one thread; the times are wall-clock time and CPU
time, and CPU time is more reliable if others use the machine too. "all threads": our reader uses as many threads as a rank that
is alone on its host.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image

from shardlab.files import image_files
from trainers.data import data_sets, imagenet, tokens
from trainers.data.image_sets import open_images
from trainers.data.token_sets import open_tokens
from trainers.tasks import vision_library

Read = Callable[[np.ndarray], object]
SIZE, CLASSES = 224, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--images", 256), ("--rounds", 15), ("--width", 500), ("--height", 375), ("--batch", 32)):
        parser.add_argument(name, type=int, default=default, help=f"(default: {default})")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bytes_an_image = write_images(folder / "imagenet", given.images, given.width, given.height)
        print(f"{given.images} JPEGs of {given.width} x {given.height}, {bytes_an_image / 1e3:.0f} kB each")
        print(f"all threads: {imagenet.count_decoding_threads()}")
        compare(folder, given.images, given.batch, given.rounds)
        write_others(folder)
        others(folder, given.batch, given.rounds)


def compare(folder: Path, images: int, batch: int, rounds: int) -> None:
    """Print the images per second of both pipelines and the ratio of both rates, with one thread and with all threads."""
    ours = open_images("imagenet", folder, "train", image_size=SIZE, class_count=None, subset=None, subset_seed=0)
    assert isinstance(ours, imagenet.ImageFolders)
    plain = plain_reader([folder / "imagenet" / entry.path for entry in ours._entries])
    agree(ours.read, plain)
    print(f"{'':30}{'ours':>10}{'plain':>10}{'ratio':>8}  middle 80 % of the rounds")
    clocks = [("1 thread", 1, time.perf_counter), ("1 thread, CPU time", 1, time.process_time)]
    for label, threads, clock in [*clocks, ("all threads", imagenet.count_decoding_threads(), time.perf_counter)]:
        with ThreadPoolExecutor(threads) as pool:
            ours._pool = pool
            rates = alternate([ours.read, plain], images, batch, rounds, clock)
        ratios = sorted(a / b for a, b in zip(*rates, strict=True))
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        medians = [statistics.median(one) for one in rates]
        spread = f"{statistics.median(ratios):8.2f}  {low:.2f} to {high:.2f}"
        print(f"{'images/s, ' + label:30}{medians[0]:10.0f}{medians[1]:10.0f}{spread}")


def plain_reader(paths: list[Path]) -> Read:
    """A reader that works like a usual training script: it reads one image after the other in the only thread of the worker."""
    vision_library.import_torchvision()
    from torchvision import transforms

    steps = [transforms.Resize(256), transforms.CenterCrop(SIZE), transforms.ToTensor()]
    transform = transforms.Compose([*steps, transforms.Normalize(imagenet.MEAN, imagenet.STD)])

    def one(path: Path) -> torch.Tensor:
        with Image.open(path) as image:
            return transform(image.convert("RGB"))

    return lambda indices: torch.stack([one(paths[int(index)]) for index in indices])


def agree(ours: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], plain: Read) -> None:
    """End the benchmark if the two pipelines give different pixels, because a wrong picture may take less time to make."""
    indices = np.arange(4)
    difference = np.abs(ours(indices)[0] - torch.as_tensor(plain(indices)).numpy()).mean()
    print(f"mean absolute difference of normalised pixels: {difference:.3f}")
    if difference > 0.1:
        sys.exit("the two pipelines do not agree")


def others(folder: Path, batch: int, rounds: int) -> None:
    """Print the items per second of the data sets that need no decoding."""
    keys = {"class_count": None, "subset": None, "subset_seed": 0}
    readers: list[tuple[str, Read, int, int]] = []
    for name, size in (("cifar10", 32), ("cifar10", SIZE), ("synthetic", 32), ("synthetic", SIZE)):
        images = open_images(name, folder, "train", image_size=size, **keys)
        readers.append((f"{name} at {size}: images/s", images.read, images.source.items, 1))
    for name, file in (("tokens", "some.tokens"), ("synthetic", None)):
        sequences = open_tokens(name, folder, "train", seq_len=1024, vocabulary_size=50_257, tokens_file=file)
        readers.append((f"{name}: tokens/s", sequences.read, sequences.source.items, 1024))
    for label, read, items, units in readers:
        (rates,) = alternate([read], min(items, 4 * batch), batch, rounds)
        print(f"{label:28}{statistics.median(rates) * units:14,.0f}")


def alternate(
    readers: list[Read], items: int, batch: int, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """The items per second of each reader in each round.

    In a round, each reader reads all items. The order of the readers is reversed from round to round. clock: returns the time
    in seconds.
    """
    rates: list[list[float]] = [[] for _ in readers]
    batches = [np.arange(begin, min(begin + batch, items)) for begin in range(0, items, batch)]
    for number in range(-1, rounds):  # round -1 is warm-up
        turn = list(zip(rates, readers, strict=True))
        for kept, read in turn if number % 2 else turn[::-1]:
            begin = clock()
            for indices in batches:
                read(indices)
            if number >= 0:
                kept.append(items / (clock() - begin))
    return rates


def write_images(folder: Path, images: int, width: int, height: int) -> float:
    """Write folders of classes with JPEGs that have soft shapes and some grain, like photographs.

    Returns the mean size of a file in bytes.
    """
    generator = np.random.default_rng(0)
    for split, count in (("train", images), ("val", CLASSES)):
        for number in range(count):
            coarse = Image.fromarray(generator.integers(0, 256, (9, 12, 3), dtype=np.uint8))
            soft = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
            pixels = np.clip(soft + generator.integers(-24, 25, soft.shape), 0, 255).astype(np.uint8)
            path = folder / split / f"n{number % CLASSES:08}" / f"{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, quality=90)
    return statistics.mean(path.stat().st_size for path in folder.rglob("train/*/*.JPEG"))


def write_others(folder: Path) -> None:
    """Write the files of CIFAR-10 and a token file, with random content."""
    generator = np.random.default_rng(0)
    (folder / data_sets.FOLDER_BY_DATA_SET["cifar10"]).mkdir()
    for name in (*image_files.CIFAR10_FILES["train"], *image_files.CIFAR10_FILES["validation"]):
        records = generator.integers(0, 256, (1000, image_files.CIFAR10_RECORD_BYTES), dtype=np.uint8)
        records[:, 0] %= image_files.LABEL_COUNT
        (folder / data_sets.FOLDER_BY_DATA_SET["cifar10"] / name).write_bytes(records.tobytes())
    tokens.write_token_file(folder / "some.tokens", [generator.integers(0, 50_257, 4 * 2**20)], 50_257)


if __name__ == "__main__":
    main()
