"""How much the hosts sent while steps were timed, from the kernel's interface counters."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence, Set
from operator import itemgetter

import polars as pl

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn
from collect.sources.samples import Seen

LEAST_COVERAGE = 0.8  # of the timed window that has to lie between samples of an interface


def network(run: LoadedRun) -> Quantity | None:
    """Bytes sent on physical interfaces, or on virtual ones where a host (a container) shows no physical one."""
    return _sent(run, network_kind)


def loopback(run: LoadedRun) -> Quantity | None:
    """Bytes sent over loopback interfaces: what ranks of one host, and anything else on it, say to each other."""
    return _sent(run, lambda _: "loopback")


def network_kind(kinds: Set[str]) -> str:
    """Of the kinds of interfaces that a host shows, the one that leads to others: a container shows no physical one."""
    return "physical" if "physical" in kinds else "virtual"


def of_network(nics: pl.DataFrame) -> pl.DataFrame:
    """The samples of each host's interfaces that lead to others, by run and host (`network_kind`)."""
    physical = pl.col("kind") == "physical"
    return nics.filter(pl.when(physical.any().over("run", "host")).then(physical).otherwise(pl.col("kind") == "virtual"))


def of_loopback(nics: pl.DataFrame) -> pl.DataFrame:
    """The samples of loopback interfaces."""
    return nics.filter(pl.col("kind") == "loopback")


def _sent(run: LoadedRun, wanted: Callable[[Set[str]], str]) -> Quantity | None:
    """Bytes of the interfaces of the kind that is wanted on a host with interfaces of these kinds."""
    span = run.window
    if span is None:
        return None
    shown: dict[str, set[str]] = {}
    for host, kind, _ in run.interfaces:
        shown.setdefault(host, set()).add(kind)
    parts = [counted(seen, span) for (host, kind, _), seen in run.interfaces.items() if kind == wanted(shown[host])]
    known = [part for part in parts if part is not None]
    return Quantity(sum(known), "bytes") if known and len(known) == len(parts) else None


def counted(samples: Sequence[Seen], span: tuple[float, float]) -> float | None:
    """What one interface sent within `span`, in bytes; its counter at the edges is interpolated between samples.

    None where the counter went backwards (a reset, another boot) or the samples cover too little of the span.
    """
    known = sorted([(at, sent, boot) for at, sent, boot in samples if sent is not None], key=itemgetter(0))
    # The samples within the span and the nearest one on either side, with those of the same moment.
    moments = [at for at, _, _ in known]
    before, after = bisect_right(moments, span[0]), bisect_left(moments, span[1])
    first = bisect_left(moments, moments[before - 1]) if before else 0
    last = bisect_right(moments, moments[after]) if after < len(moments) else len(moments)
    near, times = known[first:last], moments[first:last]
    values = [sent for _, sent, _ in near]
    if len(near) < 2 or len({boot for _, _, boot in near}) > 1 or values != sorted(values):
        return None
    start, end = max(span[0], times[0]), min(span[1], times[-1])
    if end - start < LEAST_COVERAGE * (span[1] - span[0]):
        return None
    return _at(end, times, values) - _at(start, times, values)


def _at(moment: float, times: list[float], values: list[int]) -> float:
    """The counter at a moment that lies between the first and the last time."""
    for index in range(1, len(times)):
        if moment <= times[index]:
            share = (moment - times[index - 1]) / (times[index] - times[index - 1] or 1)
            return values[index - 1] + share * (values[index] - values[index - 1])
    return values[-1]


_WHILE = (
    "between the first and the last timed step, from the kernel's counters, which count everything that the host sent. The "
    "counters are interpolated between samples at both ends. Blank if a counter went backwards, or if the samples cover less "
    "than 80 % of this time."
)
METRICS = (
    Metric(
        name="network_bytes",
        column=MetricColumn("sent", 40, "All timed steps, network"),
        unit="bytes",
        direction="neither",
        definition=f"Bytes sent by all hosts on physical interfaces (virtual ones if a host has no physical one) {_WHILE}",
        of_run=network,
    ),
    Metric(
        name="loopback_bytes",
        column=MetricColumn("sent", 50, "All timed steps, loopback"),
        unit="bytes",
        direction="neither",
        definition=f"Bytes sent over the loopback interfaces of all hosts {_WHILE}",
        of_run=loopback,
    ),
)
