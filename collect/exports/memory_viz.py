"""Exports the snapshots of the CUDA allocator as pickles for the page memory_viz of PyTorch, which reads nothing else.

The page (https://pytorch.org/memory_viz) reads pickles of the protocols 2 to 4 that contain plain values.
"""

from __future__ import annotations

import pickle
from pathlib import Path

from collect.export import Export
from collect.reading.load import LoadedMatrix
from collect.sources import snapshot
from collect.summary import Summary
from shardlab.errors import InputError
from shardlab.files import files

PICKLE_PROTOCOL = 4
SNAPSHOTS_FOLDER = "snapshots"


def write_pickles(loaded: LoadedMatrix, _summary: Summary, folder: Path, _final_path: Path) -> None:
    """Write snapshots/RUN/rank-RRRRR.pickle for each snapshot. Raises InputError if the matrix has none."""
    snapshot_paths = [
        (run.run_id, path)
        for run in loaded.runs
        for path in sorted((run.folder.path / "memory").glob(f"rank-*{snapshot.SNAPSHOT_SUFFIX}"))
        if path.is_file() and not path.is_symlink() and not path.parent.is_symlink()
    ]
    if not snapshot_paths:
        raise InputError(
            f"the matrix {loaded.expansion.name} has no snapshot of the CUDA allocator. Allowed: a matrix with runs whose "
            "cells have instruments: {memory: snapshot}, or an imported snapshot."
        )
    for run_id, path in snapshot_paths:
        document = snapshot.read_snapshot_document(path)
        sections = {section_name: document[section_name] for section_name in ("segments", "device_traces")}
        files.make_folder(folder / SNAPSHOTS_FOLDER / run_id)
        pickle_path = folder / SNAPSHOTS_FOLDER / run_id / f"{path.name.removesuffix(snapshot.SNAPSHOT_SUFFIX)}.pickle"
        files.write_new(pickle_path, pickle.dumps(sections, protocol=PICKLE_PROTOCOL))


EXPORT = Export(
    name="memory-viz",
    summary="a pickle per snapshot of the CUDA allocator, for https://pytorch.org/memory_viz",
    written_names=frozenset({SNAPSHOTS_FOLDER}),
    write=write_pickles,
)
