"""The figures of a run's traces: exact, and, if the matrix asks for it, as HolisticTraceAnalysis computes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from collect.traces import figure_cache, hta, trace
from collect.traces.breakdown import Breakdown
from shardlab.errors import InputError
from shardlab.study import Traces


class RunTraces(msgspec.Struct, frozen=True):
    """The breakdowns of the ranks that were profiled, where the trace is whole.

    like_hta: of all ranks together as HolisticTraceAnalysis has them, where the matrix asks for that and it finds kernels.
    """

    exact: list[Breakdown] = []
    like_hta: list[Breakdown] = []

    @property
    def judged(self) -> list[Breakdown]:
        """What metrics are of."""
        return self.like_hta or self.exact


def read(run: Path, how: Traces) -> RunTraces:
    """Of a run's folder. Half a trace has no figures to rank anything by, and is left out (`collect trace` tells of it)."""
    paths = regular((run / "trace").glob("rank-*.json.gz"))
    exact = [told for path in paths if (told := figure_cache.figures(path)) is not None]
    return RunTraces(exact, _like_hta(paths) if how == "like-hta" and any(one.source == "gpu" for one in exact) else [])


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
