"""The figures of a run's traces: exact, and, if the matrix asks for it, as HolisticTraceAnalysis computes them."""

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
from shardlab.study import Traces


class RunTraces(msgspec.Struct, frozen=True, dict=True):
    """The breakdowns of the ranks that were profiled, where the trace is whole.

    analyses: of the same ranks what the answers about the run need, always exact. like_hta: of all ranks together as
    HolisticTraceAnalysis has them, where the matrix asks for that and it finds kernels.
    """

    exact: list[Breakdown] = []
    analyses: list[RankAnalysis] = []
    like_hta: list[Breakdown] = []

    @cached_property
    def answers(self) -> RunAnswers:
        """What the ranks say together."""
        return RunAnswers(self.analyses)

    @property
    def judged(self) -> list[Breakdown]:
        """What metrics are of."""
        return self.like_hta or self.exact


def read(run: Path, how: Traces) -> RunTraces:
    """Of a run's folder. Half a trace has no figures to rank anything by, and is left out (`collect trace` tells of it)."""
    paths = regular((run / "trace").glob("rank-*.json.gz"))
    known = [found for path in paths if (found := figure_cache.figures(path)) is not None]
    exact = [found.breakdown for found in known]
    analyses = [found.analysis for found in known]
    return RunTraces(
        exact, analyses, _like_hta(paths) if how == "like-hta" and any(one.source == "gpu" for one in exact) else []
    )


def regular(paths: Iterable[Path]) -> list[Path]:
    """The regular files among the files of a run, sorted: a symlink could lead anywhere, and a FIFO would block for ever."""
    return sorted(path for path in paths if path.is_file() and not path.is_symlink() and not path.parent.is_symlink())


def _like_hta(paths: list[Path]) -> list[Breakdown]:
    """None of them where one has no kernels, as HTA would fail for all."""
    whole = [found for path in paths if not ((found := trace.read(path)).lost or found.cut)]
    try:
        return hta.breakdowns(whole)
    except InputError:
        return []
