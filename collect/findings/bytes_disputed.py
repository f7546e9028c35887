"""Compares the bytes that cells should send by theory with the bytes that the kernel's counters and profiler records show."""

from __future__ import annotations

from collections.abc import Iterable

from collect.findings.row import CellRow
from collect.metrics import traced_bytes, wire

MEASURED = {  # metric -> (its tolerance in percent, what was measured)
    "wire_difference_pct": (wire.TOLERANCE_PCT, "the kernel's counters"),
    "traced_difference_pct": (traced_bytes.TOLERANCE_PCT, "the sizes in profiler records"),
}


def find_disputes(rows: Iterable[CellRow]) -> list[str]:
    """A clause for each cell and measurement whose number of bytes differs from the theory by more than the tolerance."""
    clauses = []
    for row in rows:
        for name, (tolerance_pct, measured) in MEASURED.items():
            gap = row.metrics.get(name)
            if gap is not None and abs(gap.value) > tolerance_pct:
                direction = "more" if gap.value > 0 else "fewer"
                clauses.append(f"{row.id} ({measured} have {abs(gap.value):.1f} % {direction}, tolerance {tolerance_pct:g} %)")
    return clauses
