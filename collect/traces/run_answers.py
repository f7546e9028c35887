"""Computes results that need the traces of all ranks of a run, such as the waiting for slow ranks, and makes JSON of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from collect.traces import collectives, stragglers
from collect.traces.collectives import CollectiveUse
from collect.traces.rank_analysis import RankAnalysis
from collect.traces.stragglers import RankWaits

_USE_PROPERTIES = ("transfer_ns", "hidden_pct", "algorithm_gb_per_s", "bus_gb_per_s", "link_pct")


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

    def document(self) -> dict[str, Any]:
        """The results about the run as JSON values. A result that is not known is null."""
        use_documents = [
            msgspec.to_builtins(use) | {"group": _group_document(use), **{name: getattr(use, name) for name in _USE_PROPERTIES}}
            for use in self.collectives
        ]
        return {"collectives": use_documents, "stragglers": self._stragglers_document()}

    def _stragglers_document(self) -> dict[str, Any]:
        waits = self.waits
        skew_ns = waits.skew_ns
        return {
            "rank": waits.straggler.rank if waits.straggler else None,
            "why": waits.why or None,
            "matched": len(skew_ns),
            "unmatched_calls": waits.unmatched,
            "skew_mean_ns": statistics.fmean(skew_ns) if skew_ns else None,
            "skew_median_ns": skew_ns[(len(skew_ns) - 1) // 2] if skew_ns else None,
            "skew_longest_ns": skew_ns[-1] if skew_ns else None,
            "lost_pct": waits.lost_pct,
            "ranks": [msgspec.to_builtins(rank_wait) | {"lost_pct": rank_wait.lost_pct} for rank_wait in waits.ranks],
        }


def _group_document(use: CollectiveUse) -> dict[str, Any]:
    group = use.group
    return {
        "name": group.name or None,
        "description": group.description or None,
        "size": group.size,
        "ranks": list(group.ranks) or None,
        "mixed": group.mixed,
    }
