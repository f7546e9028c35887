"""Which passes of a step exchange gradients among ranks, if a step has several passes (gradient accumulation)."""

from __future__ import annotations

from collections.abc import Iterable

LAST_PASS, SHARD_EVERY_PASS, EVERY_PASS = "last_pass", "shard_every_pass", "every_pass"
IN_WORDS = {
    LAST_PASS: "once a step",
    SHARD_EVERY_PASS: "in each pass within a group of shards and once a step among replicas",
    EVERY_PASS: "in each pass",
}


def describe_sync_difference(strategy_syncs: Iterable[tuple[str, object]]) -> str | None:
    """A remark if cells with several passes per step exchange gradients in different passes; None if not.

    strategy_syncs: for each of these cells, the name of its strategy and a key of IN_WORDS (any other value: not known).
    """
    strategies_by_phrase: dict[str, set[str]] = {}
    for strategy, sync_option in strategy_syncs:
        if isinstance(sync_option, str) and sync_option in IN_WORDS:
            strategies_by_phrase.setdefault(IN_WORDS[sync_option], set()).add(strategy)
    clauses = "; ".join(f"{when}: {', '.join(sorted(strategies_by_phrase[when]))}" for when in sorted(strategies_by_phrase))
    return f"gradients are exchanged {clauses}; so sent bytes and memory differ" if len(strategies_by_phrase) > 1 else None
