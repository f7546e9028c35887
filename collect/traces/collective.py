"""Identifies a collective in a trace: its name, process group, number of elements, and type of elements.

For a kernel, this information comes from the arguments that Kineto writes for the kernel. If a kernel has no arguments, only
the name of the collective is known, from the name of the kernel. For a span of gloo, the information comes from the name and
the inputs of the span.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, NamedTuple

import msgspec

from shardlab.files.decoders import DECODE_FAULTS

# Name of a scalar type of PyTorch (c10/core/ScalarType.h) -> size of an element of this type in bytes.
ELEMENT_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e5m2", "Float8_e4m3fn", "Float8_e5m2fnuz", "Float8_e4m3fnuz"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16", "UInt16"), 2),
    **dict.fromkeys(("Int", "Float", "UInt32", "ComplexHalf"), 4),
    **dict.fromkeys(("Long", "Double", "UInt64", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
# Name that traces give a type of input tensors -> name of the same type in ELEMENT_BYTES.
_ELEMENT_TYPES = {
    "unsigned char": "Byte",
    "signed char": "Char",
    "bool": "Bool",
    "short": "Short",
    "short int": "Short",
    "int": "Int",
    "long": "Long",
    "long int": "Long",
    "float": "Float",
    "double": "Double",
    "c10::Half": "Half",
    "c10::BFloat16": "BFloat16",
    "c10::complex<float>": "ComplexFloat",
}
GLOO_PREFIX = "gloo:"  # the prefix of the names of gloo's spans
_TORCH_NAME_PAIRS = (  # (start of the name of a collective, without underscores; its name in torch.distributed)
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("send", "send"),
    ("recv", "recv"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("barrier", "barrier"),
)
# a kernel, such as ncclDevKernel_AllReduce_Sum_f32_RING_LL
_NCCL_NAME = re.compile(r"[nr]ccl\w*?Kernel_([A-Za-z]+)", re.IGNORECASE)
_OLD_NCCL_NAME = re.compile(
    r"[nr]ccl(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv|AllToAll)\w*Kernel", re.IGNORECASE
)
_WORD_BOUNDARY = re.compile(r"(?<=[a-z])(?=[A-Z])")
# The name of a C++ function in a trace: its return type, its namespaces, and the name itself.
_FUNCTION_NAME = re.compile(r"(?:\w+ )?((?:\w+::|\(anonymous namespace\)::)*)(\w+)")
# Kernels of collectives without NCCL: symmetric memory of PyTorch, own all-reduces of vLLM, SGLang, TensorRT-LLM and AITER.
_CUSTOM_COLLECTIVE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce", re.IGNORECASE)
_DEEP_EP_COLLECTIVE = re.compile(r"\A(?:dispatch|combine)\b")  # the kernels of DeepEP that communicate
# The prefix of the names of kernels that Inductor generates. Inductor names a kernel after the operators that it replaces, so
# the name may contain the name of a collective, although the kernel is no collective.
_TRITON_PREFIX = "triton_"
_DIGITS = re.compile(r"\d{1,18}")


_Dimension = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class CollectiveOperation(NamedTuple):
    """A collective. A field is None if the trace does not say it."""

    name: str
    """The name in torch.distributed, such as all_reduce; an unknown name is not changed."""
    group: str | None = None
    """The name of the process group, which is unique on a rank."""
    description: str | None = None
    """The description that the user or c10d gave the group."""
    group_size: int | None = None
    """The number of ranks in the group."""
    ranks: tuple[int, ...] | None = None
    """The global ranks of the group, in the order of the group."""
    in_elements: int | None = None
    """The number of elements in the input of this rank."""
    out_elements: int | None = None
    """The number of elements in the output of this rank."""
    dtype: str | None = None
    """The type of the elements in the words of c10, such as BFloat16."""
    in_splits: tuple[int, ...] = ()
    """For an all_to_all, how much of the input this rank sends to each rank of the group, in elements or in rows; empty if the
    parts are equal. Kineto cuts a long list short."""
    first_ranks: tuple[int, ...] = ()
    """The ranks that the trace names if it cuts the list of ranks short."""

    @property
    def input_bytes(self) -> int | None:
        """The input of this rank in bytes; None if the elements or the size of their type are not known."""
        return _compute_size_bytes(self.in_elements, self.dtype)

    @property
    def output_bytes(self) -> int | None:
        """The output of this rank in bytes; None if the elements or the size of their type are not known."""
        return _compute_size_bytes(self.out_elements, self.dtype)


class CollectiveArguments(NamedTuple):
    """The arguments that Kineto writes for the kernel of a collective, each as the JSON text in the file; b"" if absent."""

    name: bytes
    group: bytes
    description: bytes
    group_size: bytes
    ranks: bytes
    in_elements: bytes
    out_elements: bytes
    dtype: bytes
    in_split: bytes = b""


def parse_operation(texts: CollectiveArguments) -> CollectiveOperation | None:
    """Parse the arguments that Kineto writes for the kernel of a collective. None if the arguments name no collective.

    If an argument has an unexpected type, the field of the result is None.
    """
    collective_name = _parse_string(texts.name)
    if not collective_name:
        return None
    group_size = parse_count(texts.group_size)
    ranks = _parse_integers(texts.ranks)
    return CollectiveOperation(
        name=find_torch_name(collective_name),
        group=_parse_string(texts.group) or (str(number) if (number := parse_count(texts.group)) is not None else None),
        description=_parse_string(texts.description) or None,
        group_size=group_size,
        ranks=ranks if ranks and len(ranks) == group_size else None,  # for a large group, Kineto writes only a part of the list
        in_elements=parse_count(texts.in_elements),
        out_elements=parse_count(texts.out_elements),
        dtype=_parse_string(texts.dtype) or None,
        in_splits=_parse_integers(texts.in_split),
        first_ranks=_parse_integers(texts.ranks.partition(b"...")[0]) if b"..." in texts.ranks else (),
    )


def parse_gloo_span(span_name: str, dimensions: bytes, types: bytes) -> CollectiveOperation | None:
    """The collective of a span of gloo, with the number of elements in its input.

    None if the inputs are not tensors of one known type.

    span_name: the name of the span, such as gloo:all_reduce. dimensions, types: the inputs as JSON texts, such as [[1000, 4]]
    and ["float"]."""
    try:
        shapes = msgspec.json.decode(dimensions, type=list[list[_Dimension]])
        type_names = msgspec.json.decode(types, type=list[str])
    except DECODE_FAULTS:
        return None
    if not shapes or len(shapes) != len(type_names) or len(set(type_names)) != 1 or type_names[0] not in _ELEMENT_TYPES:
        return None
    element_count = sum(map(math.prod, shapes))
    if element_count >= 1 << 62:
        return None
    return CollectiveOperation(
        find_torch_name(span_name[len(GLOO_PREFIX) :]), in_elements=element_count, dtype=_ELEMENT_TYPES[type_names[0]]
    )


def find_torch_name(name: str) -> str:
    """The name of a collective in torch.distributed: `_allgather_base` is an all_gather. An unknown name is not changed."""
    plain_name = name.replace("_", "").lower()
    return next((torch_name for name_start, torch_name in _TORCH_NAME_PAIRS if plain_name.startswith(name_start)), name)


def find_kernel_collective(kernel_name: str) -> str | None:
    """The collective that a kernel carries out, by the name of the kernel alone; None if the kernel is not a collective.

    For example, ncclDevKernel_AllReduce_Sum_f32_RING_LL(...) is an all_reduce. ncclDevKernel_Generic(...) of RCCL may be any
    collective, so the result is `generic`.
    """
    if match := _OLD_NCCL_NAME.match(kernel_name) or _NCCL_NAME.match(kernel_name):
        return find_torch_name(_WORD_BOUNDARY.sub("_", match[1]).lower())
    library_name = kernel_name[:5].lower()
    if library_name.startswith(("nccl", "rccl")):
        return kernel_name if "kernel" in kernel_name.lower() else None
    # MSCCL and MSCCL++ run programs, so the name does not say which collective the kernel is
    if library_name == "msccl":
        return "generic"
    match = _FUNCTION_NAME.match(kernel_name)
    if match is None or kernel_name.startswith(_TRITON_PREFIX):
        return None
    if "deep_ep::" in match[1] and (deep_ep_match := _DEEP_EP_COLLECTIVE.match(match[2])):
        return deep_ep_match[0]
    if custom_match := _CUSTOM_COLLECTIVE.search(match[2]):
        return "all_reduce" if custom_match[0] == "cross_device_reduce" else find_torch_name(custom_match[0])
    return None


def is_gloo_name(event_name: str) -> bool:
    """Whether an event with this name is a span of gloo, in letters of any case."""
    return event_name[: len(GLOO_PREFIX)].lower() == GLOO_PREFIX


def parse_count(json_text: bytes) -> int | None:
    """Parse a JSON text as a count, an integer of at least 0. None if the text is anything else."""
    parsed_value = _parse_json(json_text)
    return parsed_value if type(parsed_value) is int and 0 <= parsed_value < 1 << 62 else None


def _parse_integers(list_text: bytes) -> tuple[int, ...]:
    """The integers in a JSON list or in a text such as "[0, 1, ...]"."""
    return tuple(int(digits) for digits in _DIGITS.findall(list_text.decode("latin-1")))


def _compute_size_bytes(element_count: int | None, dtype: str | None) -> int | None:
    element_bytes = ELEMENT_BYTES.get(dtype or "")
    return None if element_count is None or element_bytes is None else element_count * element_bytes


def _parse_string(json_text: bytes) -> str:
    parsed_value = _parse_json(json_text)
    return parsed_value if isinstance(parsed_value, str) else ""


def _parse_json(json_text: bytes) -> object:
    try:
        return msgspec.json.decode(json_text)
    except DECODE_FAULTS:
        return None
