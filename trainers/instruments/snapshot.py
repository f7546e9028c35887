"""The instrument `memory: snapshot`: writes the blocks of the CUDA allocator and their history during a step."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from shardlab.files import files
from trainers.instrument import Instrument

if TYPE_CHECKING:
    from pathlib import Path

    from trainers.ranks.ranks import Peers, Ranks

SCHEMA = 1
MOST_ENTRIES = 200_000  # limit of the history; a step of a large model has some ten thousand entries


class MemorySnapshot(Instrument):
    """Writes the dictionaries `segments` and `device_traces` of torch's snapshot as gzipped JSON. Torch itself writes snapshots
    as pickles, which can execute code when they are read."""

    name = "memory"

    def __init__(self, path: Path, step: int, ranks: Ranks, peers: Peers) -> None:
        self._path, self._step, self._ranks, self._peers = path, step, ranks, peers

    def watches_step(self, step: int) -> bool:
        return step == self._step

    def before_step(self, step: int) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES, stacks="python", device=self._ranks.device)

    def after_step(self, step: int) -> None:
        snapshot = torch.cuda.memory._snapshot(self._ranks.device)
        torch.cuda.memory._record_memory_history(enabled=None, device=self._ranks.device)
        sections = {name: snapshot[name] for name in ("segments", "device_traces") if name in snapshot}
        document = {"schema": SCHEMA, "rank": self._ranks.rank, "step": step, **sections}
        files.make_folder(self._path.parent)
        files.write_atomic(self._path, gzip.compress(msgspec.json.encode(document), mtime=0), sync=False)
        self._peers.barrier()  # writing takes seconds, for which other ranks would wait inside their next step

    def collect_results(self) -> dict[str, Any]:
        return {"step": self._step}
