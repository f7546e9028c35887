"""Checks the result folder of `make gpu-proof`; needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from collect.sources import snapshot
from collect.traces import trace
from collect.traces.breakdown import compute_breakdown
from shardlab.hardware.host import Host

VERDICTS = {"holds", "fails", "dropped"}


def problems(folder: Path) -> list[str]:
    """The problems of a result folder; an empty list if its files are complete and no check failed."""
    found = []
    host = msgspec.json.decode((folder / "HOST.json").read_bytes(), type=Host)
    if not host.gpus:
        found.append("HOST.json names no GPU")
    records = [json.loads(line) for line in (folder / "proof.jsonl").read_text().splitlines()]
    found += [f"{record['name']}: {record.get('why', '')}" for record in records if record["verdict"] == "fails"]
    found += [f"{record['name']}: {record['verdict']}" for record in records if record["verdict"] not in VERDICTS]
    held = {record["stage"] for record in records if record["verdict"] == "holds"}
    found += [f"nothing of stage {stage} holds" for stage in ("A", "C", "D") if stage not in held]
    counts = {verdict: sum(record["verdict"] == verdict for record in records) for verdict in ("holds", "fails", "dropped")}
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    if (folder / "table.txt").read_text().splitlines()[-1] != said:
        found.append(f"table.txt does not end with: {said}")
    for record in records:
        found += [f"{record['name']}: {why}" for name in record.get("files", []) if (why := _unread(folder / name))]
    return found


def _unread(file: Path) -> str:
    """Why a file is not a trace with GPU kernels, or not a memory snapshot with memory segments; '' if the file is good."""
    if not file.exists():
        return f"{file.name} is not there"
    if file.name.endswith("-trace.json.gz"):
        told = compute_breakdown(trace.read_trace(file))
        return "" if told is not None and told.source == "gpu" and told.kernels else f"{file.name} has no kernels of a GPU"
    taken = snapshot.read_snapshot(file)
    if taken is None or not taken.segments:
        return f"{file.name} has no segments"
    followed = snapshot.replay_history(taken)
    within = all(0 <= used <= reserved for used, reserved in zip(followed.in_use_bytes, followed.reserved_bytes, strict=True))
    return "" if within else f"{file.name}: its history does not lead to its segments"
