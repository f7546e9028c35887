"""Counts the bytes that ranks send in a step, from the collectives of a real step. trainers/theory computes them instead.

Counts assume the ring algorithm, as the theory does. Some backends use other algorithms and send more bytes on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from trainers.theory.term import FACTORS, WIRE_FACTORS
from trainers.theory.term import Term as Term  # engines of workspaces import it from here


class CountedCall(msgspec.Struct, frozen=True):
    """One collective that a rank started."""

    op: str
    payload_bytes: int
    """The bytes S, as in `Term`."""
    ranks: int
    """The number n of ranks, as in `Term`."""

    @property
    def sent_bytes(self) -> float:
        return FACTORS[self.op](self.ranks) * self.payload_bytes

    def wire_bytes(self, backend: str) -> float:
        """Bytes that this rank sent for the collective over a backend, as in `Term.wire_bytes`."""
        return WIRE_FACTORS[backend][self.op](self.ranks) * self.payload_bytes


@contextmanager
def count_collectives() -> Iterator[list[CountedCall]]:
    """Count the collectives that this rank starts in the `with` block. Yields a list, to which each collective is appended.

    All collectives that go through torch's dispatcher are counted: the collectives of DDP's buckets, FSDP, tensor and pipeline
    parallelism and DeepSpeed, and direct calls of torch.distributed. Counting slows every operator down, so it must not be used
    in a timed step.
    """
    counted_calls: list[CountedCall] = []

    class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, torch_operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # DTensor has to run before this counter: it replaces the operator by operators on local tensors and collectives,
            # which the counter then sees.
            if any(tensor_class.__name__ == "DTensor" for tensor_class in types):
                return NotImplemented
            if (call := _identify_collective(torch_operator, args)) is not None and call.ranks > 1:
                counted_calls.append(call)
            return torch_operator(*args, **(kwargs or {}))

    with CollectiveCounter():  # type: ignore[no-untyped-call]
        yield counted_calls


def _identify_collective(torch_operator: Any, args: Any) -> CountedCall | None:
    """The collective that an operator starts, or None if it is not a collective."""
    namespace, _, operator_name = torch_operator._schema.name.partition("::")
    if namespace == "c10d" and operator_name in _C10D_COLLECTIVES:
        collective, argument_index = _C10D_COLLECTIVES[operator_name]
        return CountedCall(collective, _count_payload_bytes(args[argument_index]), _find_group_size(args))
    if namespace == "_c10d_functional" and operator_name in _FUNCTIONAL_COLLECTIVES:
        collective, grows_with_ranks = _FUNCTIONAL_COLLECTIVES[operator_name]
        rank_count = _find_group_size_by_name(args)
        return CountedCall(collective, _count_payload_bytes(args[0]) * (rank_count if grows_with_ranks else 1), rank_count)
    return None


# c10d operator -> (collective, index of the argument whose size is the S bytes of `FACTORS`)
_C10D_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}
# functional operator -> (collective; whether the S bytes of `FACTORS` are the size of the input times the number of ranks. If
# not, the S bytes are the size of the input)
_FUNCTIONAL_COLLECTIVES = {
    "all_reduce": ("all_reduce", False),
    "all_reduce_": ("all_reduce", False),
    "all_reduce_coalesced": ("all_reduce", False),
    "all_gather_into_tensor": ("all_gather", True),
    "all_gather_into_tensor_coalesced": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", False),
    "broadcast": ("broadcast", False),
}


def _count_payload_bytes(tensor_or_list: Any) -> int:
    if isinstance(tensor_or_list, torch.Tensor):
        return tensor_or_list.numel() * tensor_or_list.element_size()
    return sum(map(_count_payload_bytes, tensor_or_list)) if isinstance(tensor_or_list, list | tuple) else 0


def _find_group_size(args: Iterable[Any]) -> int:
    boxed_group = next(value for value in args if isinstance(value, torch.ScriptObject))
    return int(ProcessGroup.unbox(boxed_group).size())


def _find_group_size_by_name(args: Iterable[Any]) -> int:
    # The last string is the name of the group; an earlier string is the name of the reduction, such as `sum`.
    group_name = [value for value in args if isinstance(value, str)][-1]
    return int(_resolve_process_group(group_name).size())  # type: ignore[arg-type]


def bytes_of(tensors: Iterable[torch.Tensor], itemsize: int | None = None) -> int:
    """Bytes of tensors. itemsize: bytes to count for each element; None: the size in the tensor's dtype."""
    return sum(tensor.numel() * (itemsize or tensor.element_size()) for tensor in tensors)
