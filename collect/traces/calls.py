"""Lists the calls of collectives on one rank. Each call says how much of its time is hidden by compute and how much is
exposed, and how many bytes the rank sends.

The sizes of messages are those of the tensors that the communication backend received, as the profiler recorded them. So the
sent bytes are an independent check of the theory of the strategy and of the bytes that the same-work proof counts. This is also
why the factors of the ring algorithm are defined here again, although `trainers.communication` has them for the theory: if a
factor in one of the two tables is wrong, the results disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from collect.traces import gloo, intervals
from collect.traces.activities import Activities
from collect.traces.collective import CollectiveOperation
from collect.traces.head import NamedGroup
from collect.traces.intervals import Intervals
from collect.traces.trace import Trace

# Collective -> function that gives for a number of ranks n the bytes that a rank sends, as a share of the size of the message
# (`calls.compute_message_bytes`), by the ring algorithm (Thakur, Rabenseifner and Gropp, 2005, sections 4.1 to 4.5). For
# broadcast and reduce it gives the mean over the ranks.
SENT_SHARE_BY_COLLECTIVE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (1 - 1 / n),  # the ring algorithm does a reduce_scatter, then an all_gather
    "all_gather": lambda n: 1 - 1 / n,
    "reduce_scatter": lambda n: 1 - 1 / n,
    "all_to_all": lambda n: 1 - 1 / n,
    "broadcast": lambda n: 1 - 1 / n,
    "reduce": lambda n: 1 - 1 / n,
    "send": lambda n: 1.0,
    "recv": lambda n: 0.0,
}


_MOST_LISTED_RANKS = 8  # the most ranks that a label lists


class ProcessGroup(msgspec.Struct, frozen=True):
    """A process group in a trace."""

    name: str = ""
    """The name in the trace; "" if the trace does not name the group."""
    ranks: tuple[int, ...] = ()
    """The global ranks of the group; empty if the trace does not list them."""
    size: int | None = None
    """The number of ranks in the group; None if the trace does not say it."""
    description: str = ""
    """The description that the user or c10d gave the group."""
    first_ranks: tuple[int, ...] = ()
    """The first ranks of the group, if the trace cuts the list of ranks short."""
    mixed: bool = False
    """Whether the calls are from several groups that the trace does not distinguish."""

    @property
    def label(self) -> str:
        """The text that tables show for the group: its name, description and size."""
        if self.mixed:
            return "several, not told apart"
        full_name = f"{self.name} {self.description}".strip() or "not named"
        return f"{full_name} ({self.size} {'rank' if self.size == 1 else 'ranks'})" if self.size else full_name

    @property
    def label_with_ranks(self) -> str:
        """The label, with the ranks of the group: it tells groups of one name apart."""
        ranks = [str(rank) for rank in self.ranks or self.first_ranks]
        ending = ", ..." if len(ranks) > _MOST_LISTED_RANKS or self.first_ranks else ""
        return f"{self.label}: {', '.join(ranks[:_MOST_LISTED_RANKS])}{ending}" if ranks else self.label


def label_groups(groups: Iterable[ProcessGroup]) -> dict[ProcessGroup, str]:
    """The text that tables show for each group. Groups of the same name and size are told apart by their ranks."""
    distinct_groups = dict.fromkeys(groups)
    count_by_label = Counter(group.label for group in distinct_groups)
    return {group: group.label if count_by_label[group.label] == 1 else group.label_with_ranks for group in distinct_groups}


class CollectiveCall(msgspec.Struct, frozen=True, array_like=True):
    """One call of a collective on one rank. Times are in ns."""

    name: str
    """The name in torch.distributed, such as all_reduce."""
    group: int
    """The index of the process group in the list of groups of the rank."""
    step: int
    """The number of the profiler step in which the call was launched; -1 if it was launched in no step."""
    duration_ns: int
    message_bytes: int | None
    """The size of the message as nccl-tests counts it; None if the trace does not say it."""
    hidden_ns: int
    """How long compute runs during the call."""
    exposed: list[int]
    """The pieces of the call during which nothing computes and no collective that started earlier runs, as a flat list (offset
    from the start of the call, length, offset, length ...). Over all calls of a rank, the pieces are disjoint, and their sum is
    the exposed communication of the rank."""
    sent_bytes: float | None = None
    """The bytes that the rank sends to other ranks (collect/traces/sent_bytes.py); None if they are not known."""

    @property
    def exposed_ns(self) -> int:
        """How much longer the call makes the step, in ns: the sum of the pieces in `exposed`."""
        return sum(self.exposed[1::2])

    def measure_exposed_within(self, first_ns: int) -> int:
        """The exposed time (see `exposed_ns`) in the first `first_ns` nanoseconds of the call, in ns."""
        piece_bounds = zip(self.exposed[::2], self.exposed[1::2], strict=True)
        return sum(max(0, min(offset + piece_length, first_ns) - offset) for offset, piece_length in piece_bounds)


def list_calls(trace: Trace, activities: Activities) -> tuple[list[ProcessGroup], list[CollectiveCall]]:
    """Returns (process groups of a rank, calls of collectives on this rank, sorted by start)."""
    call_rows = activities.event_rows[activities.is_collective]
    launch_rows = activities.launch_row[activities.is_collective]
    sole_group = _find_sole_group(trace)
    number_by_group: dict[ProcessGroup, int] = {}
    group_by_operation = [
        number_by_group.setdefault(
            sole_group if operation.group is None else _build_group(operation, trace.head.groups or ()), len(number_by_group)
        )
        for operation in activities.operations
    ]
    operation_index_by_call = activities.operation_index[activities.is_collective].tolist()
    message_sizes = [compute_message_bytes(operation) for operation in activities.operations]
    groups = list(number_by_group)
    sent_bytes_by_operation = [
        compute_sent_bytes(operation.name, message_bytes, groups[group_number].size)
        if operation.name != "all_to_all" or not operation.in_splits
        else compute_uneven_sent_bytes(operation, groups[group_number].ranks or groups[group_number].first_ranks, trace.rank)
        for operation, message_bytes, group_number in zip(activities.operations, message_sizes, group_by_operation, strict=True)
    ]
    call_starts_ns, call_ends_ns = trace.start_ns[call_rows], trace.end_ns[call_rows]
    step_by_call = gloo.find_steps_at(trace, np.where(launch_rows >= 0, trace.start_ns[launch_rows], call_starts_ns))
    call_columns = (
        [activities.operations[operation_index].name for operation_index in operation_index_by_call],
        [group_by_operation[operation_index] for operation_index in operation_index_by_call],
        step_by_call,
        (call_ends_ns - call_starts_ns).tolist(),
        [message_sizes[operation_index] for operation_index in operation_index_by_call],
        compute_hidden_ns(call_starts_ns, call_ends_ns, activities.compute),
        find_exposed_pieces(call_starts_ns, call_ends_ns, activities),
        [sent_bytes_by_operation[operation_index] for operation_index in operation_index_by_call],
    )
    return groups, [CollectiveCall(*call_values) for call_values in zip(*call_columns, strict=True)]


def compute_message_bytes(operation: CollectiveOperation) -> int | None:
    """The size of the message of a collective as nccl-tests counts it, in bytes: the output of the rank for all_gather and
    recv, and its input for other collectives.

    None if the size is not known, as for gather, scatter and barrier.
    """
    if operation.name in ("gather", "scatter", "barrier"):
        return None  # for gather and scatter, only the root has the size in its trace; a barrier sends no message
    return operation.output_bytes if operation.name in ("all_gather", "recv") else operation.input_bytes


def _build_group(operation: CollectiveOperation, head_groups: Sequence[NamedGroup]) -> ProcessGroup:
    """The process group of a call. head_groups: the groups that the head of the trace lists, with all their ranks."""
    name, group_size = operation.group or "", operation.group_size
    listed_ranks = (tuple(group.ranks) for group in head_groups if group.pg_name == name and len(group.ranks) == group_size)
    ranks = operation.ranks or next(listed_ranks, ())
    return ProcessGroup(name, ranks, group_size, operation.description or "", () if ranks else operation.first_ranks)


def _find_sole_group(trace: Trace) -> ProcessGroup:
    """The process group of calls that do not name their group: the only group of the rank, if the trace lists exactly one
    group.

    If the trace lists several groups, the result is `mixed`, and its size is known only if all groups have the same size.
    """
    head_groups = trace.head.groups
    if head_groups is None:
        return ProcessGroup()
    if len(head_groups) > 1:
        return ProcessGroup(size=gloo.find_sole_group_size(trace), mixed=True)
    return ProcessGroup(head_groups[0].pg_name, tuple(head_groups[0].ranks), head_groups[0].pg_size, head_groups[0].pg_desc)


def compute_hidden_ns(call_starts_ns: NDArray[np.int64], call_ends_ns: NDArray[np.int64], compute: Intervals) -> list[int]:
    """For each call of a collective, how long compute runs during the call, in ns. call_starts_ns, call_ends_ns: start and end
    of each call."""
    before_end_ns = intervals.measure_length_before(compute, call_ends_ns)
    return (before_end_ns - intervals.measure_length_before(compute, call_starts_ns)).tolist()  # type: ignore[no-any-return]


def find_exposed_pieces(start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], activities: Activities) -> list[list[int]]:
    """For each call of a collective, the pieces during which nothing computes, in the format of `CollectiveCall.exposed`.

    start_ns, end_ns: start and end of each call; the calls must be sorted by start.

    If several collectives run at a moment, the moment belongs to the collective that started first; if they started together,
    to the collective that is first in the file. So the pieces of all calls are disjoint, and their union is the communication
    without compute.
    """
    pieces_by_call: list[list[int]] = [[] for _ in start_ns]
    if not pieces_by_call:
        return pieces_by_call
    clipped_starts_ns = np.clip(start_ns, activities.start_ns, activities.end_ns)
    end = np.clip(end_ns, activities.start_ns, activities.end_ns)
    earlier_ends_ns = np.concatenate([[activities.start_ns], np.maximum.accumulate(end)[:-1]])
    owned_starts_ns = np.maximum(clipped_starts_ns, earlier_ends_ns)
    is_owner = end > owned_starts_ns
    owner_calls = np.flatnonzero(is_owner)
    exposed_time = intervals.subtract_intervals(activities.communication, activities.compute)
    # `bare`: the times of communication without compute. `owned`: the part of each call that belongs to this call and to no
    # earlier call. The intervals of each list are disjoint and sorted, and the owned intervals cover all communication.
    edges_ns = np.unique(np.concatenate([owned_starts_ns[is_owner], end[is_owner], exposed_time.start, exposed_time.end]))
    is_exposed = np.searchsorted(exposed_time.start, edges_ns[:-1], side="right") > np.searchsorted(
        exposed_time.end, edges_ns[:-1], side="right"
    )
    piece_indexes = np.flatnonzero(is_exposed)
    call_by_piece = owner_calls[np.searchsorted(owned_starts_ns[is_owner], edges_ns[piece_indexes], side="right") - 1]
    start_ns_by_call = start_ns.tolist()
    for call_index, piece_start_ns, piece_end_ns in zip(
        call_by_piece.tolist(), edges_ns[piece_indexes].tolist(), edges_ns[piece_indexes + 1].tolist(), strict=True
    ):
        pieces_by_call[call_index] += (piece_start_ns - start_ns_by_call[call_index], piece_end_ns - piece_start_ns)
    return pieces_by_call


def compute_sent_bytes(collective: str, message_bytes: int | None, group_size: int | None) -> float | None:
    """The bytes that a rank sends for one message of a collective. 0 for a barrier, because a barrier sends no data.

    group_size: the number of ranks in the process group. None if the size of the message or the number of ranks is not known.
    """
    if collective == "barrier":
        return 0.0
    get_share = SENT_SHARE_BY_COLLECTIVE.get(collective)
    return None if get_share is None or message_bytes is None or not group_size else get_share(group_size) * message_bytes


def compute_uneven_sent_bytes(operation: CollectiveOperation, group_ranks: Sequence[int], rank: int | None) -> int | None:
    """The bytes that this rank sends to other ranks in an all_to_all whose parts differ in size; None if they are not known.

    The trace says the parts in elements, or in rows that have the same number of elements. group_ranks: the ranks of the group,
    in the order of the group; the last may be missing. rank: the rank itself."""
    splits = operation.in_splits
    if not splits or len(splits) != operation.group_size or rank not in group_ranks or operation.input_bytes is None:
        return None
    split_total = sum(splits)
    if not split_total:
        return None if operation.in_elements else 0
    if (operation.in_elements or 0) % split_total:
        return None
    return operation.input_bytes * (split_total - splits[group_ranks.index(rank)]) // split_total
