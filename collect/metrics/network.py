"""How much the hosts sent while steps were timed, from the kernel's interface counters."""

from __future__ import annotations

import polars as pl

from collect.metric import Measured, Metric, Quantity
from collect.sources.steps import window

LEAST_COVERAGE = 0.8  # of the timed window that has to lie between samples of an interface


def network(measured: Measured) -> Quantity | None:
    """Bytes sent on physical interfaces, or on virtual ones where a host (a container) shows no physical one."""
    return _sent(measured, of_network(measured.samples.nics))


def loopback(measured: Measured) -> Quantity | None:
    """Bytes sent over loopback interfaces: what ranks of one host, and anything else on it, say to each other."""
    return _sent(measured, of_loopback(measured.samples.nics))


def of_network(nics: pl.DataFrame) -> pl.DataFrame:
    """The samples of each host's physical interfaces, or of its virtual ones where it shows no physical one."""
    physical = pl.col("kind").eq("physical").any().over("host")
    return nics.filter(pl.col("kind") == pl.when(physical).then(pl.lit("physical")).otherwise(pl.lit("virtual")))


def of_loopback(nics: pl.DataFrame) -> pl.DataFrame:
    return nics.filter(pl.col("kind") == "loopback")


def _sent(measured: Measured, nics: pl.DataFrame) -> Quantity | None:
    span = window(measured.steps)
    if span is None:
        return None
    parts = [counted(rows, span) for _, rows in nics.group_by("host", "name", maintain_order=True)]
    known = [part for part in parts if part is not None]
    return Quantity(sum(known), "bytes") if known and len(known) == len(parts) else None


def counted(rows: pl.DataFrame, span: tuple[float, float]) -> float | None:
    """What one interface sent within `span`, in bytes; its counter at the edges is interpolated between samples.

    None where the counter went backwards (a reset, another boot) or the samples cover too little of the span.
    """
    rows = rows.drop_nulls("tx_bytes").sort("wall_s")
    near = rows.filter(_neighbours(rows, span)) if rows.height else rows
    if near.height < 2 or near["boot_id"].n_unique() > 1 or (near["tx_bytes"].diff().drop_nulls() < 0).any():
        return None
    start, end = max(span[0], near["wall_s"][0]), min(span[1], near["wall_s"][-1])
    if end - start < LEAST_COVERAGE * (span[1] - span[0]):
        return None
    times, values = near["wall_s"].to_list(), near["tx_bytes"].to_list()
    return _at(end, times, values) - _at(start, times, values)


def _neighbours(rows: pl.DataFrame, span: tuple[float, float]) -> pl.Expr:
    """The samples within the span and the nearest one on either side."""
    times = rows["wall_s"]
    before, after = times.filter(times <= span[0]).max(), times.filter(times >= span[1]).min()
    first = span[0] if before is None else before
    last = span[1] if after is None else after
    return pl.col("wall_s").is_between(pl.lit(first), pl.lit(last))


def _at(moment: float, times: list[float], values: list[int]) -> float:
    """The counter at a moment that lies between the first and the last time."""
    for index in range(1, len(times)):
        if moment <= times[index]:
            share = (moment - times[index - 1]) / (times[index] - times[index - 1] or 1)
            return values[index - 1] + share * (values[index] - values[index - 1])
    return values[-1]


_WHILE = (
    "between the first and the last timed step, by the kernel's counters, which hold everything that the host sent; "
    "interpolated between samples at the edges; unknown where a counter went backwards or samples cover less than 80 % of it."
)
METRICS = (
    Metric(
        name="network_bytes",
        unit="bytes",
        direction="neither",
        definition=f"Bytes sent by all hosts on physical interfaces (virtual ones where a host shows no physical one) {_WHILE}",
        of_run=network,
    ),
    Metric(
        name="loopback_bytes",
        unit="bytes",
        direction="neither",
        definition=f"Bytes sent over the loopback interfaces of all hosts {_WHILE}",
        of_run=loopback,
    ),
)
