"""A snapshot of the CUDA allocator: its blocks and their history during a step. It has not run on a GPU yet."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from shardlab import files
from trainers.instrument import Instrument

if TYPE_CHECKING:
    from pathlib import Path

    from trainers.ranks import Peers, Ranks

SCHEMA = 1
ENTRIES = 200_000  # of history; a step of a large model makes some ten thousand


class MemorySnapshot(Instrument):
    """torch writes snapshots as pickles; here the same dictionaries (segments, device_traces) stand as gzipped JSON."""

    name = "memory"

    def __init__(self, path: Path, step: int, ranks: Ranks, company: Peers) -> None:
        self._path, self._step, self._ranks, self._company = path, step, ranks, company

    def watches(self, step: int) -> bool:
        return step == self._step

    def before(self, step: int) -> None:
        torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python", device=self._ranks.device)

    def after(self, step: int) -> None:
        taken = torch.cuda.memory._snapshot(self._ranks.device)
        torch.cuda.memory._record_memory_history(enabled=None, device=self._ranks.device)
        kept = {name: taken[name] for name in ("segments", "device_traces") if name in taken}
        document = {"schema": SCHEMA, "rank": self._ranks.rank, "step": step, **kept}
        files.make_folder(self._path.parent)
        files.write_atomic(self._path, gzip.compress(msgspec.json.encode(document), mtime=0), sync=False)
        self._company.barrier()  # writing takes seconds: nobody else's next step shall wait for it

    def found(self) -> dict[str, Any]:
        return {"step": self._step}
