"""Parses the inputs of an operator as Kineto records them with `record_shapes=True`: shapes, types and sizes of tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from collect.traces.trace import InputTexts
from shardlab.files.decoders import DECODE_FAULTS

_BYTES_OF_TYPE = {
    "double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "long": 8, "int": 4, "short int": 2, "short": 2,
    "signed char": 1, "unsigned char": 1, "char": 1, "bool": 1, "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip
_INTEGER = re.compile(r"-?\d{1,9}")


class Tensor(NamedTuple):
    """A tensor among the inputs of an operator."""

    shape: Sequence[int]
    type_name: str
    """The type as torch writes it, such as `c10::Half`."""

    @property
    def item_bytes(self) -> int | None:
        """The size of an element; None: the type is not known."""
        return 1 if self.type_name.startswith("c10::Float8") else _BYTES_OF_TYPE.get(self.type_name)


def read_tensors(texts: InputTexts) -> dict[int, Tensor]:
    """The tensors among the inputs, by the position of the input. Inputs without dimensions, which may be numbers, are left
    out."""
    types = parse_list(texts.types)
    return {
        index: Tensor(shape, type_name)
        for index, (shape, type_name) in enumerate(zip(parse_list(texts.shapes), types, strict=False))
        if shape and is_shape(shape) and isinstance(type_name, str)
    }


def has_lists(texts: InputTexts) -> bool:
    """Whether an input is a list of tensors, whose types are not recorded."""
    return b"TensorList" in texts.types or any(
        isinstance(shape, list) and any(isinstance(size, list) for size in shape) for shape in parse_list(texts.shapes)
    )


def count_bytes(tensors: Sequence[Tensor]) -> int | None:
    """The size of these tensors together; None if a type is not known."""
    sizes = [(math.prod(tensor.shape), tensor.item_bytes) for tensor in tensors]
    known_sizes = [count * item_bytes for count, item_bytes in sizes if item_bytes is not None]
    return sum(known_sizes) if len(known_sizes) == len(sizes) else None


def read_values(texts: InputTexts, index: int) -> list[int] | None:
    """The integers of an input that is not a tensor, such as a stride; true counts as 1. None: not recorded."""
    values = parse_list(texts.values)
    if index >= len(values) or not isinstance(values[index], str) or not values[index]:
        return None
    text = values[index].replace("True", "1").replace("False", "0")
    return [int(number) for number in _INTEGER.findall(text)]


def parse_list(text: bytes) -> list[Any]:
    """The JSON list in a text; empty if the text is damaged or not a list."""
    try:
        parsed = msgspec.json.decode(text)
    except DECODE_FAULTS:
        return []
    return parsed if isinstance(parsed, list) else []


def is_shape(value: Any) -> bool:
    """Whether a value is the shape of a tensor: a list of sizes."""
    return isinstance(value, list) and len(value) <= 64 and all(type(size) is int and 0 <= size < 1 << 48 for size in value)
