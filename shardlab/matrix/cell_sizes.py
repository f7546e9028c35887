"""Computes the batch sizes of a cell from what a matrix file states, and reads and writes its durations."""

from __future__ import annotations

import re

from shardlab.matrix.cell import Draft


class BatchError(ValueError):
    """The batch sizes of a cell contradict each other. key: the name of the cell key whose value has to change."""

    def __init__(self, key: str, sentence: str) -> None:
        super().__init__(sentence)
        self.key = key


def compute_batch_sizes(draft: Draft, dp: int) -> tuple[int, int, int]:
    """Compute (global_batch_size, micro_batch_size, gradient_accumulation_steps) of a draft on `dp` data-parallel ranks.

    Raises BatchError if the sizes contradict each other, or if a size cannot be divided evenly.
    """
    if (draft.global_batch_size is None) == (draft.gpu_batch_size is None):
        given_keys = "neither" if draft.global_batch_size is None else "both"
        raise BatchError(
            "global_batch_size",
            "exactly one of global_batch_size (strong scaling) and gpu_batch_size (weak scaling) is needed, "
            f"found {given_keys}.",
        )
    if draft.global_batch_size is not None:
        if draft.global_batch_size % dp:
            raise BatchError(
                "global_batch_size",
                f"{draft.global_batch_size} cannot be divided among {dp} data-parallel ranks. Allowed: a multiple of {dp}.",
            )
        rank_batch_size = draft.global_batch_size // dp
    else:
        assert draft.gpu_batch_size is not None
        rank_batch_size = draft.gpu_batch_size
    size_key, divisor = "micro_batch_size", draft.micro_batch_size or rank_batch_size
    if draft.microbatches is not None:
        if draft.micro_batch_size is not None:
            raise BatchError("microbatches", "found micro_batch_size as well. Allowed: one of the two; it implies the other.")
        size_key, divisor = "microbatches", draft.microbatches
    if rank_batch_size % divisor:
        raise BatchError(
            size_key,
            f"{divisor} does not divide a rank's batch: {rank_batch_size} items, the global batch of {rank_batch_size * dp} "
            f"divided among {dp} "
            f"data-parallel ranks. Allowed: a divisor of {rank_batch_size}.",
        )
    micro_batch_size = rank_batch_size // divisor if size_key == "microbatches" else divisor
    return rank_batch_size * dp, micro_batch_size, rank_batch_size // micro_batch_size


def parse_seconds(duration_text: str) -> int:
    """The number of seconds in a duration ``[D-]HH:MM:SS``. Raises ValueError for text in another format, and for 0 seconds."""
    duration_match = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,2}):([0-5]\d):([0-5]\d)", duration_text)
    if not duration_match:
        raise ValueError(f'found {duration_text!r}. Allowed: a time as "HH:MM:SS" or "D-HH:MM:SS", in quotes.')
    days, hours, minutes, rest_seconds = (int(duration_part or 0) for duration_part in duration_match.groups())
    total_s = ((days * 24 + hours) * 60 + minutes) * 60 + rest_seconds
    if total_s == 0:
        raise ValueError("found a limit of 0 seconds. Allowed: one second or more.")
    return total_s


def format_seconds(duration_s: int) -> str:
    """A duration as `parse_seconds` reads it, and as Slurm does."""
    day_count, rest_seconds = divmod(duration_s, 86_400)
    clock_text = f"{rest_seconds // 3600:02}:{rest_seconds // 60 % 60:02}:{rest_seconds % 60:02}"
    return f"{day_count}-{clock_text}" if day_count else clock_text
