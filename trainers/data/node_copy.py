"""Copies the data set of a run to the disk of each node, before the run reads it (`data.stage: node` in the cluster file).

The data are copied once per node, before the timed steps: the first rank of a node copies them, and the other ranks of the node
wait. An event of the run records how many bytes were copied, in how many seconds, and to which folder.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import gethostname

from shardlab.cluster import node_folder
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.matrix.cell import Cell
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from trainers.data import data_sets, image_list, token_sets
from trainers.ranks import hang_dump

CHUNK_BYTES = 1 << 24
COPY_THREADS = 8
FILES_PER_BATCH = 10_000  # number of files that are queued at once: each queued file needs an object of more than 1 KiB
REPORT_S = 20.0  # seconds between two events while files are copied; without events, the supervisor would end the run as hung
GIB = 1 << 30


@contextlib.contextmanager
def stage_data(run: Run, run_dir: RunDir) -> Iterator[Path]:
    """The data path from which this rank reads in the `with` block: the data path of the run, or the copy on this node.

    Raises InputError and WorkspaceError.
    """
    data_path = Path(run.data_path)
    if run.data_stage != "node" or not _reads_files(run.training_cell, data_path):
        yield data_path
        return

    # `copy_into_folder` builds the list of paths, which needs 0.6 GiB of memory for ImageNet. Only the rank that copies calls
    # it, so the other ranks do not need this memory.
    def copy_into_folder(folder: Path) -> None:
        _copy_data_set(run.training_cell, data_path, folder, run_dir)

    node_folder.remove_unused()  # copies that killed runs left behind occupy space that this run needs
    with node_folder.hold_shared_folder(node_folder.make_shared_folder_name(run_dir.path), copy_into_folder) as folder:
        yield folder


def _reads_files(cell: Cell, data_path: Path) -> bool:
    return data_sets.find_data_path(cell.options, data_path) is not None or cell.options.get("data") == "stdlib-text"


def _list_files_to_copy(cell: Cell, data_path: Path) -> dict[str, Path]:
    """The files that the cell reads, by their relative path in the copy. Raises InputError and WorkspaceError."""
    data_set_path = data_sets.find_data_path(cell.options, data_path)
    if data_set_path is None:
        text_path = token_sets.ensure_stdlib_text(data_path)
        return {token_sets.make_stdlib_file_name(): text_path}
    if not data_set_path.path.exists():
        raise InputError(data_set_path.missing_path_error)
    if data_set_path.name == "imagenet":
        return _list_images_to_copy(cell, data_set_path.path)
    if data_set_path.path.is_dir():
        paths = sorted(path for path in data_set_path.path.rglob("*") if path.is_file())
        return {str(path.relative_to(data_path)): path for path in paths}
    if (copy_refusal := data_sets.refuse_copy(cell.options)) is not None:
        raise InputError(copy_refusal)
    return {str(cell.options["tokens_file"]): data_set_path.path}


def _list_images_to_copy(cell: Cell, root: Path) -> dict[str, Path]:
    """The images in the lists that the cell reads, and the lists themselves, so that no rank has to create the lists again."""
    splits: list[tuple[str, int | None]] = [("train", cell.options["subset"])]  # type: ignore[list-item]
    if cell.instruments.validation is not None:
        splits.append(("val", None))
    paths: dict[str, Path] = {}
    for split, subset in splits:
        seed = int(str(cell.options["subset_seed"]))
        listing = image_list.ensure_image_list(root, split, subset, seed)
        paths[image_list.make_list_file_name(root, split, subset, seed)] = image_list.find_list_path(root, split, subset, seed)
        paths |= {f"{root.name}/{entry.path}": root / entry.path for entry in listing.entries}
    return paths


def _copy_data_set(cell: Cell, data_path: Path, copy_folder: Path, run_dir: RunDir) -> None:
    """Copy the data set into a folder of this node and write an event of the run.

    Raises InputError if the data set is missing or if the node's disk is too small, and WorkspaceError.
    """
    start_s, progress = time.monotonic(), _CopyProgress(run_dir)
    parent_folder, folder_reason = node_folder.choose_parent_folder()
    with files.as_workspace_error("copy the data set"):
        sources_by_path = _list_files_to_copy(cell, data_path)
        total_bytes = 0
        for path in sources_by_path.values():  # this may take minutes for ImageNet on a network disk, so it reports progress
            total_bytes += path.stat().st_size
            progress.add_bytes(0)
        free_bytes = shutil.disk_usage(copy_folder).free
        if total_bytes > free_bytes:
            raise InputError(
                f"{parent_folder} ({folder_reason}): the data set has {total_bytes / GIB:.1f} GiB, and "
                f"{free_bytes / GIB:.1f} GiB are free on {gethostname()}. Set TMPDIR to a larger disk of the node, or "
                "remove `stage: node` under `data`."
            )
        with ThreadPoolExecutor(COPY_THREADS) as pool:
            relative_paths = list(sources_by_path)
            for batch_start in range(0, len(relative_paths), FILES_PER_BATCH):
                path_batch = relative_paths[batch_start : batch_start + FILES_PER_BATCH]
                for _ in pool.map(lambda name: _copy_file(sources_by_path[name], copy_folder / name, progress), path_batch):
                    pass  # iterating over the results raises the exception of a thread
    run_dir.write_event(
        _name_event_writer(),
        "data_copied",
        sync=False,
        bytes=progress.copied_bytes,
        files=len(sources_by_path),
        seconds=round(time.monotonic() - start_s, 3),
        folder=str(copy_folder),
        why=folder_reason,
    )


def _copy_file(source: Path, target: Path, progress: _CopyProgress) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, target.open("xb") as writer:
        while chunk := reader.read(CHUNK_BYTES):
            writer.write(chunk)
            progress.add_bytes(len(chunk))


class _CopyProgress:
    """Counts the copied bytes, and writes events so that the supervisor sees progress. Several threads use one object."""

    def __init__(self, run_dir: RunDir) -> None:
        self.copied_bytes = 0
        self._run_dir, self._reported_s, self._lock = run_dir, time.monotonic(), threading.Lock()

    def add_bytes(self, byte_count: int) -> None:
        with self._lock:
            self.copied_bytes += byte_count
            if time.monotonic() - self._reported_s < REPORT_S:
                return
            self._reported_s = time.monotonic()
            hang_dump.report_progress()
            self._run_dir.write_event(_name_event_writer(), "data_copying", sync=False, bytes=self.copied_bytes)


def _name_event_writer() -> str:
    return f"data-{gethostname()}"
