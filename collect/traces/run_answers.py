"""Computes results that need the traces of all ranks of a run, such as the waiting for slow ranks, and makes JSON of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from collect.traces import collectives, stragglers
from collect.traces.calls import ProcessGroup, label_groups
from collect.traces.collectives import CollectiveUse
from collect.traces.rank_analysis import RankAnalysis
from collect.traces.stragglers import RankWaits

_USE_PROPERTIES = ("is_partial", "transfer_ns", "hidden_pct", "algorithm_gb_per_s", "bus_gb_per_s", "link_pct")


class RunAnswers:
    """Results about a whole run, computed from the data of each rank. The order of the ranks does not change the results."""

    def __init__(self, ranks: Sequence[RankAnalysis]) -> None:
        self.ranks = list(ranks)

    @cached_property
    def waits(self) -> RankWaits:
        """How long ranks waited for slow ranks, in the calls of collectives that were found in the traces of several ranks."""
        return stragglers.compute_waits(self.ranks)

    @cached_property
    def collectives(self) -> list[CollectiveUse]:
        """The use of every collective in every process group, the longest total time first."""
        return collectives.compute_collective_uses(self.ranks, self.waits)

    @cached_property
    def group_labels(self) -> dict[ProcessGroup, str]:
        """The text that tables show for each process group."""
        return label_groups(use.group for use in self.collectives)

    @cached_property
    def rank_count(self) -> int:
        """The number of ranks that the traces name; 0 if they name none."""
        stated_sizes = [analysis.world_size for analysis in self.ranks] + [
            group.size for analysis in self.ranks for group in analysis.groups
        ]
        return max((stated_size for stated_size in stated_sizes if stated_size is not None), default=0)

    @property
    def missing_ranks(self) -> str:
        """A sentence that says how many ranks were profiled; "" if all were, or if the traces do not say how many there are."""
        profiled_count = len({analysis.rank for analysis in self.ranks})
        if not self.ranks or profiled_count >= self.rank_count:
            return ""
        verb = "was" if profiled_count == 1 else "were"
        return (
            f"{profiled_count:,} of {self.rank_count:,} ranks {verb} profiled: where ranks of a process group are missing, the "
            "time of a transfer is at most, and bandwidths and waiting for slow ranks are at least the given values."
        )

    def make_document(self) -> dict[str, Any]:
        """The results about the run as JSON values. A result that is not known is null."""
        use_documents = [
            msgspec.to_builtins(use)
            | {"group": _make_group_document(use), **{name: getattr(use, name) for name in _USE_PROPERTIES}}
            for use in self.collectives
        ]
        return {
            "collectives": use_documents,
            "stragglers": self._make_stragglers_document(),
            "missing_ranks": self.missing_ranks or None,
        }

    def _make_stragglers_document(self) -> dict[str, Any]:
        waits = self.waits
        skew_ns = waits.skew_ns
        return {
            "rank": waits.straggler.rank if waits.straggler else None,
            "why": waits.missing_reason or None,
            "matched": len(skew_ns),
            "unmatched_calls": waits.unmatched_count,
            "skew_mean_ns": statistics.fmean(skew_ns) if skew_ns else None,
            "skew_median_ns": skew_ns[(len(skew_ns) - 1) // 2] if skew_ns else None,
            "skew_longest_ns": skew_ns[-1] if skew_ns else None,
            "lost_pct": waits.lost_pct,
            "ranks": [msgspec.to_builtins(rank_wait) | {"lost_pct": rank_wait.lost_pct} for rank_wait in waits.ranks],
        }


def _make_group_document(use: CollectiveUse) -> dict[str, Any]:
    process_group = use.group
    return {
        "name": process_group.name or None,
        "description": process_group.description or None,
        "size": process_group.size,
        "ranks": list(process_group.ranks) or None,
        "first_ranks": list(process_group.first_ranks) or None,
        "mixed": process_group.mixed,
    }
