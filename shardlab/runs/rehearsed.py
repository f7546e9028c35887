"""The result of rehearsing a cell: the memory, collectives and floating-point operations of one step of the cell.

To rehearse a cell, ``python -m trainers rehearse`` runs one step of it without the hardware that the cell needs, and writes the
result (docs/planner.md). The planner reads the result. This module does not import torch.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from shardlab.files import files, source_digest
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.matrix.cell import Cell, Role, find_role_keys
from shardlab.plugins.plugin_kind import OwnStrategy, OwnWorkload
from shardlab.record_types import Count, Measured

SCHEMA = 1

RehearsalWay = Literal["fake_tensors", "real_tensors"]
"""How a step was rehearsed, always in one process with a process group that exchanges nothing.

fake_tensors: tensors have shapes and no memory (torch's FakeTensorMode), so any size of model can be rehearsed.
real_tensors: tensors have memory, so only a small model can be rehearsed as a whole; a large one with fewer blocks.
"""


class RehearsalRequest(msgspec.Struct, frozen=True):
    """The cell that is to be rehearsed. Unknown keys are ignored, so that the run.json of a run is also a valid request."""

    cell: Cell
    own_workload: OwnWorkload | None = None
    """The workload of the cell, if a file of the workspace defines it. Python code must be where `own_workload.file` says; a
    configuration must be in the folder `workloads` beside the request, as in the folder of a run."""
    own_strategy: OwnStrategy | None = None
    """The strategy of the cell, if a file of the workspace defines it; the file must be where `own_strategy.file` says."""

    def compute_cache_key(self, *, full_depth: bool) -> str:
        """The name of the result for this request in the cache of results: a digest of 16 hexadecimal digits.

        The digest covers everything on which the result depends: the keys of the cell that change a step, shardlab's source,
        the installed packages, and full_depth. full_depth: whether a deep model is rehearsed with all its blocks, and not
        extrapolated from two smaller numbers of blocks.
        """
        relevant_keys = find_role_keys(
            Role.MODEL, Role.PRECISION, Role.CLIPPING, Role.STRATEGY, Role.EXECUTION, Role.RANKS, Role.PASSES, Role.NODES
        )
        cell: dict[str, Any] = {key: value for key, value in msgspec.to_builtins(self.cell).items() if key in relevant_keys}
        optimizer = self.cell.optimizer
        cell["optimizer"] = [optimizer.name, optimizer.momentum > 0, optimizer.weight_decay > 0, optimizer.fused]
        encoded_parts = msgspec.json.encode([SCHEMA, cell, full_depth, _compute_code_digests()], order="deterministic")
        return hashlib.sha256(encoded_parts).hexdigest()[:16]


@functools.cache
def _compute_code_digests() -> tuple[str, str]:
    """Two digests: of the part of shardlab's source that a rehearsal executes, and of the installed packages."""
    return source_digest.digest_packages(("shardlab", "trainers")), source_digest.digest_installed_packages()


class MemoryByCategory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of tensors on the device of one rank at one moment, by category.

    The instrument `memory: categories` (trainers/instruments/memory_timeline.py) has the same categories, so that a prediction
    and a measurement can be compared category by category. No field contains memory outside tensors, which is the CUDA context,
    buffers of NCCL, and memory that the allocator adds when it rounds sizes up or leaves gaps between blocks.
    """

    parameter: Count
    """The weights that the rank keeps from step to step."""
    gathered: Count
    """Weights for computing: gathered from other ranks, or copied in 16 bits."""
    gradient: Count
    """Gradients that the optimizer reads."""
    optimizer_state: Count
    """The optimizer's state, such as momentum."""
    master_parameter: Count
    """The optimizer's own copy of the weights."""
    activation: Count
    """Results of forward, or of its recomputation, that are kept for backward."""
    buffer: Count
    """Other memory that is kept from step to step: buckets for gradients, buffers of modules, the batch."""
    temporary: Count
    """All other memory: intermediate results, gradients before the optimizer reads them, buffers of collectives."""

    @property
    def total(self) -> int:
        """The bytes of all categories together."""
        return sum(msgspec.structs.astuple(self))


class RehearsedCollective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A collective that a rank starts in each step."""

    op: str
    """The kind of communication: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send."""
    payload_bytes: Count
    """The size S of the whole message: for an all-gather the size of its output, for a reduce-scatter the size of its input."""
    ranks: Count
    """The number of ranks in the group of the collective."""
    times: Measured
    """How often the rank starts the collective in one step; the mean if the number differs between steps
    (trainers.strategy.Strategy.communication_period)."""


class RehearsedRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was found about a rank in one step. It is not the first step, which also allocates the optimizer's state."""

    rank: Count
    stands_for: Count
    """The number of ranks, this rank included, with the same memory and communication. Over all entries, these numbers add up
    to the number of ranks that train."""
    peak_bytes: Count
    """The most bytes of tensors on the device at one moment: the sum of `at_peak`."""
    at_peak: MemoryByCategory
    """The memory at the moment when it is largest."""
    kept: MemoryByCategory
    """The memory between two steps, by category."""
    collectives: tuple[RehearsedCollective, ...] | None
    """The collectives of one step in no particular order; None if they cannot be counted."""
    flops: Measured | None
    """Floating-point operations of forward, backward and recomputation of one step on this rank; None if not counted."""


class Rehearsed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="answer", tag="rehearsed"):
    """The result of the rehearsal of one step of a cell."""

    schema: Count
    cell: str
    """The hash of the cell that was rehearsed. Cells that differ only in keys that do not change a step share one rehearsal."""
    world_size: Count
    ranks: tuple[RehearsedRank, ...]
    """One entry for each kind of rank: a single entry if all ranks are alike, an entry for each pipeline rank with a
    pipeline."""
    how: RehearsalWay
    """Whether fake tensors (without data) or real tensors were used."""
    device: Literal["cpu", "cuda"]
    """The device whose operators were rehearsed. On a CPU, operators keep other intermediate results than on a GPU."""
    depths: tuple[Count, Count] | None
    """The two numbers of blocks with which the model was rehearsed, to extrapolate to the cell's number of blocks; None: the
    model was rehearsed with all blocks of the cell."""
    error_pct: Measured | None
    """The largest error of `peak_bytes` that was measured for rehearsals of this kind, in percent; None if it was never
    measured."""
    error_from: str
    """The runs on which `error_pct` was measured, in words; empty if `error_pct` is None."""
    remarks: tuple[str, ...]
    """Sentences about what the rehearsal does not cover."""
    seconds: Measured
    """The duration of the rehearsal."""

    @property
    def worst_rank(self) -> RehearsedRank:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)


class NotRehearsed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="answer", tag="not_rehearsed"):
    """The result for a cell that cannot be rehearsed. The planner then uses a formula."""

    schema: Count
    cell: str
    """The hash of the cell."""
    why: str
    """Why the cell cannot be rehearsed, as a sentence."""
    seconds: Measured


RehearsalAnswer = Rehearsed | NotRehearsed


def decode_answer(json_bytes: bytes) -> RehearsalAnswer:
    """Decode the JSON document that ``python -m trainers rehearse`` writes, which is the result for a cell.

    Raises msgspec.DecodeError for an invalid document, and for a document with another schema version.
    """
    answer: RehearsalAnswer = msgspec.json.decode(json_bytes, type=RehearsalAnswer)
    if answer.schema != SCHEMA:
        raise msgspec.ValidationError(f"schema: found {answer.schema}. Allowed: {SCHEMA}.")
    return answer


def read_answer(path: Path) -> RehearsalAnswer | None:
    """The result in a file; None if the file does not exist, cannot be read, or does not fit the type `RehearsalAnswer`."""
    try:
        return decode_answer(files.read(path))
    except (OSError, *DECODE_FAULTS):
        return None
