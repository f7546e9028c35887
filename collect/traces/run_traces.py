"""Reads the figures (numbers) of a run's traces: exact, and as HolisticTraceAnalysis computes them if the matrix asks for
it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import msgspec

from collect.traces import figure_cache, hta, trace
from collect.traces.breakdown import Breakdown
from collect.traces.rank_analysis import RankAnalysis
from collect.traces.run_answers import RunAnswers
from shardlab.errors import InputError
from shardlab.matrix.study import Traces


class RunTraces(msgspec.Struct, frozen=True, dict=True):
    """The figures (numbers) of the profiled ranks of a run. Damaged traces are left out.

    exact: the exact breakdown of each rank.

    analyses: for the same ranks, the data from which `answers` is computed; always exact.

    like_hta: the breakdown of each rank as HolisticTraceAnalysis computes it; empty if the matrix does not ask for it, or if
    HolisticTraceAnalysis has no result.
    """

    exact: list[Breakdown] = []
    analyses: list[RankAnalysis] = []
    like_hta: list[Breakdown] = []

    @cached_property
    def answers(self) -> RunAnswers:
        """Results about the run as a whole, computed from `analyses`."""
        return RunAnswers(self.analyses)

    @property
    def judged(self) -> list[Breakdown]:
        """The breakdowns from which metrics are computed: `like_hta` if it is not empty, else `exact`."""
        return self.like_hta or self.exact


def read(run: Path, how: Traces) -> RunTraces:
    """Read the figures of the traces in a run folder.

    how: `like-hta` to get the figures of HolisticTraceAnalysis, too. A trace that is damaged or cut short is left out, because
    incomplete figures must not rank cells; `collect trace` reports the damage.
    """
    paths = regular((run / "trace").glob("rank-*.json.gz"))
    known = [found for path in paths if (found := figure_cache.figures(path)) is not None]
    exact = [found.breakdown for found in known]
    analyses = [found.analysis for found in known]
    return RunTraces(
        exact, analyses, _like_hta(paths) if how == "like-hta" and any(one.source == "gpu" for one in exact) else []
    )


def regular(paths: Iterable[Path]) -> list[Path]:
    """The paths that are regular files, sorted. Symlinks are left out because they could lead out of the run folder, and
    FIFOs because reading them would block."""
    return sorted(path for path in paths if path.is_file() and not path.is_symlink() and not path.parent.is_symlink())


def _like_hta(paths: list[Path]) -> list[Breakdown]:
    """The breakdowns as HolisticTraceAnalysis computes them. Empty if it has no result for any one trace.

    HolisticTraceAnalysis itself would then fail for all traces.
    """
    whole = [found for path in paths if not ((found := trace.read(path)).lost or found.cut)]
    try:
        return hta.breakdowns(whole)
    except InputError:
        return []
