"""Reports what the recordings of a run lack: as sentences for the terminal, and as a part of the JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from collect.traces.file_figures import FileFigures
from collect.traces.lacks import SPOILING, Lack
from collect.traces.run_answers import RunAnswers

_MOST_FILES = 8  # the most files for which a sentence is printed for each kind of lack


def describe_lacks(figures: Sequence[FileFigures], names: Mapping[str, str], answers: RunAnswers) -> list[str]:
    """A sentence for each file and kind of lack, and one about ranks that were not profiled. names: the name of each path."""
    lacks_of_kind: dict[str, list[tuple[str, Lack]]] = {}
    for entry in figures:
        for lack in entry.lacks:
            lacks_of_kind.setdefault(lack.kind, []).append((names[entry.path], lack))
    sentences = []
    for lacks in lacks_of_kind.values():
        sentences += [f"{name}: {lack.text}" for name, lack in lacks[:_MOST_FILES]]
        if rest := lacks[_MOST_FILES:]:
            sentences.append(f"{len(rest):,} more files lack the same: {sum(lack.count for _, lack in rest):,} in all.")
    return [*sentences, *([answers.missing_ranks] if answers.missing_ranks else [])]


def lack_documents(figures: Sequence[FileFigures], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """What each file lacks, as JSON values."""
    return [
        {"file": names[entry.path], "rank": entry.rank} | msgspec.to_builtins(lack, str_keys=True)
        for entry in figures
        for lack in entry.lacks
    ]


def why_not_compared(figures: Sequence[FileFigures]) -> str:
    """A sentence that says why runs with these traces are not compared; "" if they are."""
    lacking = {lack.kind: entry.path for entry in figures for lack in entry.lacks if lack.kind in SPOILING}
    if not lacking:
        return ""
    return (
        f"not compared, because a recording is incomplete ({', '.join(f'{path}: {kind}' for kind, path in lacking.items())})."
    )
