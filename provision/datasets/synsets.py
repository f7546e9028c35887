"""Reads the classes of ImageNet from `meta.mat` of its development kit.

The file is a MAT-file of level 5 (MathWorks, "MAT-File Format"): a header, then elements of a type, a size and data. It has an
array of structs `synsets`, whose fields ILSVRC2012_ID and WNID are read. The file may be malicious: every size is checked.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from shardlab.errors import InputError

MOST_BYTES = 2**26  # most bytes of the decompressed elements; the official file has less than 1 MiB
HEADER_BYTES = 128
BYTE_ORDERS = {b"IM": "<", b"MI": ">"}  # the last bytes of the header -> the byte order in the format strings of `struct`
COMPRESSED_TYPE, MATRIX_TYPE = 15, 14  # types of elements
NUMBER_FORMATS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d"}  # type of an element -> format of a number
UTF8_TYPE = 16
STRUCT_CLASS = 2  # class of a matrix whose elements are structs


class DamagedMatFile(ValueError):
    """The bytes are not a MAT-file that this module can read."""


class MatElement(NamedTuple):
    """An element of a MAT-file."""

    kind: int
    """The number of its type."""
    data: memoryview


def read_classes(mat_bytes: bytes, file_name: str) -> dict[int, str]:
    """The WNID of each ILSVRC2012_ID. mat_bytes: the bytes of meta.mat. file_name: the file, for the message of an
    InputError."""
    try:
        return _parse_classes(mat_bytes)
    except (DamagedMatFile, struct.error, zlib.error, UnicodeDecodeError) as error:
        raise InputError(
            f"{file_name}: the classes cannot be read: {error}. Allowed: meta.mat of the official development kit."
        ) from None


def _parse_classes(mat_bytes: bytes) -> dict[int, str]:
    byte_order = BYTE_ORDERS.get(mat_bytes[HEADER_BYTES - 2 : HEADER_BYTES])
    if byte_order is None:
        raise DamagedMatFile("it is no MAT-file of level 5")
    left_bytes = MOST_BYTES
    for file_element in _read_elements(memoryview(mat_bytes)[HEADER_BYTES:], byte_order):
        if file_element.kind == COMPRESSED_TYPE:
            decompressor = zlib.decompressobj()
            inflated_bytes = decompressor.decompress(file_element.data, left_bytes)
            if decompressor.unconsumed_tail:
                raise DamagedMatFile(f"it decompresses to more than {MOST_BYTES} bytes")
            left_bytes -= len(inflated_bytes)
            file_element = next(_read_elements(memoryview(inflated_bytes), byte_order), MatElement(0, memoryview(b"")))
        if file_element.kind == MATRIX_TYPE and (wnid_by_id := _parse_synsets(file_element.data, byte_order)) is not None:
            return wnid_by_id
    raise DamagedMatFile("it has no array `synsets` with the fields ILSVRC2012_ID and WNID")


def _parse_synsets(matrix: memoryview, byte_order: str) -> dict[int, str] | None:
    """The classes in `matrix`; None if it is not the array `synsets` with the fields ILSVRC2012_ID and WNID."""
    matrix_elements = _read_elements(matrix, byte_order)
    flags_element, _, name_element = (next(matrix_elements, None) for _ in range(3))
    if flags_element is None or name_element is None or not len(flags_element.data) or bytes(name_element.data) != b"synsets":
        return None
    if struct.unpack_from(f"{byte_order}I", flags_element.data)[0] & 0xFF != STRUCT_CLASS:
        return None
    length_element, names_element = next(matrix_elements, None), next(matrix_elements, None)
    if length_element is None or names_element is None:
        raise DamagedMatFile("`synsets` ends within its header")
    name_bytes = struct.unpack_from(f"{byte_order}i", length_element.data)[0]
    if name_bytes < 1 or len(names_element.data) % name_bytes:
        raise DamagedMatFile(f"`synsets` has field names of {name_bytes} bytes")
    field_names = [
        bytes(names_element.data[name_start : name_start + name_bytes]).split(b"\0")[0]
        for name_start in range(0, len(names_element.data), name_bytes)
    ]
    if not {b"ILSVRC2012_ID", b"WNID"} <= set(field_names):
        return None
    field_elements = list(matrix_elements)
    if not field_elements or len(field_elements) % len(field_names):
        raise DamagedMatFile("`synsets` ends within a struct")
    wnid_by_id: dict[int, str] = {}
    for name_start in range(0, len(field_elements), len(field_names)):
        struct_fields = dict(zip(field_names, field_elements[name_start : name_start + len(field_names)], strict=True))
        synset_id, wnid = (_read_values(struct_fields[field].data, byte_order) for field in (b"ILSVRC2012_ID", b"WNID"))
        if len(synset_id) != 1 or not synset_id[0].is_integer():
            raise DamagedMatFile("an ILSVRC2012_ID is no whole number")
        if not (0 < len(wnid) < 32 and all(0 < character_code < 128 for character_code in wnid)):
            raise DamagedMatFile("a WNID is no text")
        wnid_by_id[int(synset_id[0])] = "".join(chr(int(character_code)) for character_code in wnid)
    return wnid_by_id


def _read_values(matrix: memoryview, byte_order: str) -> list[float]:
    """The numbers of a matrix of numbers, or the character codes of a matrix of characters."""
    *_, data_element = list(_read_elements(matrix, byte_order))[:4] or [MatElement(0, memoryview(b""))]
    number_format = NUMBER_FORMATS.get(2 if data_element.kind == UTF8_TYPE else data_element.kind)
    if number_format is None:
        raise DamagedMatFile(f"a field has data of the type {data_element.kind}")
    count = len(data_element.data) // struct.calcsize(f"{byte_order}{number_format}")
    return [float(value) for value in struct.unpack_from(f"{byte_order}{count}{number_format}", data_element.data)]


def _read_elements(element_bytes: memoryview, byte_order: str) -> Iterator[MatElement]:
    """The elements that stand one after another in `element_bytes`."""
    element_offset = 0
    while len(element_bytes) - element_offset >= 8:
        element_type, data_bytes = struct.unpack_from(f"{byte_order}II", element_bytes, element_offset)
        data_begin = element_offset + 8
        if element_type >> 16:  # a small element: its size and type share four bytes, and its data are the next four
            element_type, data_bytes, data_begin = element_type & 0xFFFF, element_type >> 16, element_offset + 4
        data_end = data_begin + data_bytes
        if data_end > len(element_bytes) or (data_begin == element_offset + 4 and data_bytes > 4):
            raise DamagedMatFile(f"an element at byte {element_offset} is longer than the data around it")
        yield MatElement(element_type, element_bytes[data_begin:data_end])
        element_offset = (
            element_offset + 8
            if data_begin == element_offset + 4
            else data_end
            if element_type == COMPRESSED_TYPE
            else data_end + -data_end % 8
        )
