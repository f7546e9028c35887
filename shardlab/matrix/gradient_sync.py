"""Which passes of a step exchange gradients among ranks, if a step has several passes (gradient accumulation)."""

from __future__ import annotations

from collections.abc import Iterable

LAST_PASS, SHARD_EVERY_PASS, EVERY_PASS = "last_pass", "shard_every_pass", "every_pass"
IN_WORDS = {
    LAST_PASS: "once a step",
    SHARD_EVERY_PASS: "in each pass within a group of shards and once a step among replicas",
    EVERY_PASS: "in each pass",
}


def describe_difference(strategies: Iterable[tuple[str, object]]) -> str | None:
    """A remark if cells with several passes per step exchange gradients in different passes; None if not.

    strategies: for each of these cells, the name of its strategy and a key of IN_WORDS (any other value: not known).
    """
    names: dict[str, set[str]] = {}
    for name, sync in strategies:
        if isinstance(sync, str) and sync in IN_WORDS:
            names.setdefault(IN_WORDS[sync], set()).add(name)
    clauses = "; ".join(f"{when}: {', '.join(sorted(names[when]))}" for when in sorted(names))
    return f"gradients are exchanged {clauses}; so sent bytes and memory differ" if len(names) > 1 else None
