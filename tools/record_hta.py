"""Prints, as JSON, the figures that HolisticTraceAnalysis computes from the traces rank-*.json[.gz] in each folder.

Usage, with a Python that has HolisticTraceAnalysis:

    python tools/record_hta.py FOLDER...

HolisticTraceAnalysis is not in the project's own environment, because it needs about a hundred packages, among them jupyterlab
and pandas.
"""

import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path

logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis  # noqa: E402


def figures_of(folder: Path) -> dict:
    paths = {int(path.name[5:10]): str(path) for path in sorted(folder.glob("rank-*.json*"))}
    analysis = TraceAnalysis(trace_files=paths, trace_dir=str(folder))
    breakdown = analysis.get_temporal_breakdown(visualize=False)
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    _, kernels = analysis.get_gpu_kernel_breakdown(
        visualize=False, duration_ratio=1.0, num_kernels=1_000_000, include_memory_kernels=True
    )
    ranks = {}
    for rank in paths:
        times = breakdown[breakdown["rank"] == rank].iloc[0]
        by_name = kernels[kernels["rank"] == rank]
        ranks[rank] = {
            "idle_us": int(times["idle_time(us)"]),
            "compute_us": int(times["compute_time(us)"]),
            "non_compute_us": int(times["non_compute_time(us)"]),
            "span_us": int(times["kernel_time(us)"]),
            "overlap_pct": float(overlap[overlap["rank"] == rank].iloc[0]["comp_comm_overlap_pctg"]),
            "kernels_us": {name: int(total) for name, total in zip(by_name["name"], by_name["sum (us)"], strict=True)},
        }
    return {"hta": version("HolisticTraceAnalysis"), "ranks": ranks}


if __name__ == "__main__":
    json.dump([figures_of(Path(name)) for name in sys.argv[1:]], sys.stdout, indent=1)
