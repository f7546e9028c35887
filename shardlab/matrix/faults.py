"""Faults that a cell asks for: a rank that is slowed, or a rank whose process ends, on purpose. They show how a strategy
behaves with a slow or a lost worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from shardlab.record_types import LARGEST_INTEGER, Count

ENDED_ON_PURPOSE = "ended_on_purpose"  # the event of a rank that ends its own process because `instruments.lost_worker` says so


class SlowedRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """Slows one rank on purpose, in every step, also in warm-up steps: when the batch is there and before the forward pass, the
    rank waits for its GPU, if it has one, and then sleeps on the host. The delay counts as time of data."""

    rank: Count
    """The rank that is slowed; it must be a rank that trains."""
    delay_ms: Annotated[float, msgspec.Meta(gt=0, le=600_000)]
    """Milliseconds that the rank sleeps in each step, by the clock of the host."""


class LostWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """Ends the process of one rank on purpose, with SIGKILL, before a timed step. If the strategy cannot go on without this
    rank, the run fails."""

    rank: Count
    """The rank that is lost; it must be a rank that trains."""
    step: Annotated[int, msgspec.Meta(ge=2, le=LARGEST_INTEGER)]
    """The timed step that the rank does not make any more; timed steps count from 1."""

    @property
    def why(self) -> str:
        """A sentence for the state of a run that lost this rank."""
        return f"rank {self.rank} was ended on purpose at step {self.step} (instruments.lost_worker)"


def list_fault_names(instruments: Mapping[str, Any]) -> str:
    """The names of the faults that a cell asks for: `none`, `straggler`, `lost_worker`, or `straggler and lost_worker`.

    instruments: the instruments of the cell, in their plain form.
    """
    return " and ".join(fault_name for fault_name in ("straggler", "lost_worker") if instruments.get(fault_name)) or "none"


def describe_faults(instruments: Mapping[str, Any]) -> str:
    """The faults that a cell asks for, in words: `rank 1 slowed by 50 ms`, `rank 2 lost at step 20`; '' if there are none.

    instruments: the instruments of the cell, in their plain form.
    """
    straggler_keys, lost_worker_keys = instruments.get("straggler"), instruments.get("lost_worker")
    return ", ".join(
        [
            *([f"rank {straggler_keys['rank']} slowed by {straggler_keys['delay_ms']:g} ms"] if straggler_keys else []),
            *([f"rank {lost_worker_keys['rank']} lost at step {lost_worker_keys['step']}"] if lost_worker_keys else []),
        ]
    )
