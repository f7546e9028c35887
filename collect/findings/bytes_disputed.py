"""Compares the bytes that cells should send by theory with the bytes that the kernel's counters and profiler records show."""

from __future__ import annotations

from collections.abc import Iterable

from collect.findings.row import CellRow
from collect.metrics import traced_bytes, wire

SOURCE_BY_METRIC = {  # metric -> (its tolerance in percent, what was measured)
    "wire_difference_pct": (wire.TOLERANCE_PCT, "the kernel's counters"),
    "traced_difference_pct": (traced_bytes.TOLERANCE_PCT, "the sizes in profiler records"),
}


def list_disputes(rows: Iterable[CellRow]) -> list[str]:
    """A clause for each cell and measurement whose number of bytes differs from the theory by more than the tolerance."""
    clauses = []
    for row in rows:
        for metric_name, (tolerance_pct, byte_source) in SOURCE_BY_METRIC.items():
            difference = row.metrics.get(metric_name)
            if difference is not None and abs(difference.value) > tolerance_pct:
                difference_text = f"{abs(difference.value):.1f} % {'more' if difference.value > 0 else 'fewer'}"
                clauses.append(f"{row.id} ({byte_source} have {difference_text}, tolerance {tolerance_pct:g} %)")
    return clauses
