"""Parses the inputs of an operator as Kineto records them with `record_shapes=True`: shapes, types and sizes of tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from collect.traces.trace import InputTexts
from shardlab.files.decoders import DECODE_FAULTS

_BYTES_BY_TYPE = {
    "double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "long": 8, "int": 4, "short int": 2, "short": 2,
    "signed char": 1, "unsigned char": 1, "char": 1, "bool": 1, "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip
_INTEGER = re.compile(r"-?\d{1,9}")


class InputTensor(NamedTuple):
    """A tensor among the inputs of an operator."""

    shape: Sequence[int]
    type_name: str
    """The type as torch writes it, such as `c10::Half`."""

    @property
    def item_bytes(self) -> int | None:
        """The size of an element; None: the type is not known."""
        return 1 if self.type_name.startswith("c10::Float8") else _BYTES_BY_TYPE.get(self.type_name)


def read_input_tensors(input_texts: InputTexts) -> dict[int, InputTensor]:
    """The tensors among the inputs, by the position of the input. Inputs without dimensions, which may be numbers, are left
    out."""
    type_names = parse_list(input_texts.types)
    return {
        position: InputTensor(shape, type_name)
        for position, (shape, type_name) in enumerate(zip(parse_list(input_texts.shapes), type_names, strict=False))
        if shape and is_shape(shape) and isinstance(type_name, str)
    }


def has_tensor_lists(input_texts: InputTexts) -> bool:
    """Whether an input is a list of tensors, whose types are not recorded."""
    return b"TensorList" in input_texts.types or any(
        isinstance(shape, list) and any(isinstance(size, list) for size in shape) for shape in parse_list(input_texts.shapes)
    )


def sum_tensor_bytes(tensors: Sequence[InputTensor]) -> int | None:
    """The size of these tensors together; None if a type is not known."""
    sizes = [(math.prod(tensor.shape), tensor.item_bytes) for tensor in tensors]
    known_tensor_bytes = [element_count * item_bytes for element_count, item_bytes in sizes if item_bytes is not None]
    return sum(known_tensor_bytes) if len(known_tensor_bytes) == len(sizes) else None


def read_input_integers(input_texts: InputTexts, position: int) -> list[int] | None:
    """The integers of an input that is not a tensor, such as a stride; true counts as 1. None: not recorded."""
    input_values = parse_list(input_texts.values)
    if position >= len(input_values) or not isinstance(input_values[position], str) or not input_values[position]:
        return None
    integers_text = input_values[position].replace("True", "1").replace("False", "0")
    return [int(number) for number in _INTEGER.findall(integers_text)]


def parse_list(json_text: bytes) -> list[Any]:
    """The JSON list in a text; empty if the text is damaged or not a list."""
    try:
        parsed_value = msgspec.json.decode(json_text)
    except DECODE_FAULTS:
        return []
    return parsed_value if isinstance(parsed_value, list) else []


def is_shape(value: Any) -> bool:
    """Whether a value is the shape of a tensor: a list of sizes."""
    return isinstance(value, list) and len(value) <= 64 and all(type(size) is int and 0 <= size < 1 << 48 for size in value)
