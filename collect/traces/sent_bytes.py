"""Computes the bytes that a rank sends, from the sizes of the collectives in its trace.

The sizes are those of the tensors that the communication backend received, as the profiler recorded them. So the bytes are an
independent check of the theory of the strategy and of the bytes that the same-work proof counts. This is also why the factors
of the ring algorithm are defined here again, although `trainers.communication` has them for the theory: if a factor in one of
the two tables is wrong, the results disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from collect.traces.collective import CollectiveOperation

# Collective -> function that gives for a number of ranks n the bytes that a rank sends, as a share of the size of the message
# (`calls.compute_message_bytes`), by the ring algorithm (Thakur, Rabenseifner and Gropp, 2005, sections 4.1 to 4.5). For
# broadcast and reduce it gives the mean over the ranks.
SENT_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (1 - 1 / n),  # the ring algorithm does a reduce_scatter, then an all_gather
    "all_gather": lambda n: 1 - 1 / n,
    "reduce_scatter": lambda n: 1 - 1 / n,
    "all_to_all": lambda n: 1 - 1 / n,
    "broadcast": lambda n: 1 - 1 / n,
    "reduce": lambda n: 1 - 1 / n,
    "send": lambda n: 1.0,
    "recv": lambda n: 0.0,
}


def bytes_sent_for_message(collective: str, message_bytes: int | None, group_size: int | None) -> float | None:
    """The bytes that a rank sends for one message of a collective. 0 for a barrier, because a barrier sends no data.

    group_size: the number of ranks in the process group. None if the size of the message or the number of ranks is not known.
    """
    if collective == "barrier":
        return 0.0
    get_share = SENT_SHARES.get(collective)
    return None if get_share is None or message_bytes is None or not group_size else get_share(group_size) * message_bytes


def bytes_sent_in_all_to_all(operation: CollectiveOperation, ranks: Sequence[int], rank: int | None) -> int | None:
    """The bytes that this rank sends to other ranks in an all_to_all whose parts differ in size; None if they are not known.

    The trace says the parts in elements, or in rows that have the same number of elements. ranks: the ranks of the group, in
    the order of the group; the last may be missing. rank: the rank itself.
    """
    splits = operation.in_splits
    if not splits or len(splits) != operation.group_size or rank not in ranks or operation.input_bytes is None:
        return None
    total = sum(splits)
    if not total:
        return None if operation.in_elements else 0
    if (operation.in_elements or 0) % total:
        return None
    return operation.input_bytes * (total - splits[ranks.index(rank)]) // total
