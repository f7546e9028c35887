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
COMPRESSED, MATRIX = 15, 14  # types of elements
NUMBER_FORMATS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d"}  # type of an element -> format of a number
UTF8 = 16
STRUCT = 2  # class of a matrix whose elements are structs


class DamagedMatFile(ValueError):
    """The bytes are not a MAT-file that this module can read."""


class MatElement(NamedTuple):
    """An element of a MAT-file."""

    kind: int
    """The number of its type."""
    data: memoryview


def read_classes(content: bytes, file_name: str) -> dict[int, str]:
    """The WNID of each ILSVRC2012_ID. content: the bytes of meta.mat. file_name: the file, for the message of an InputError."""
    try:
        return _parse_classes(content)
    except (DamagedMatFile, struct.error, zlib.error, UnicodeDecodeError) as error:
        raise InputError(
            f"{file_name}: the classes cannot be read: {error}. Allowed: meta.mat of the official development kit."
        ) from None


def _parse_classes(content: bytes) -> dict[int, str]:
    order = BYTE_ORDERS.get(content[HEADER_BYTES - 2 : HEADER_BYTES])
    if order is None:
        raise DamagedMatFile("it is no MAT-file of level 5")
    left_bytes = MOST_BYTES
    for element in _read_elements(memoryview(content)[HEADER_BYTES:], order):
        if element.kind == COMPRESSED:
            inflater = zlib.decompressobj()
            inflated = inflater.decompress(element.data, left_bytes)
            if inflater.unconsumed_tail:
                raise DamagedMatFile(f"it decompresses to more than {MOST_BYTES} bytes")
            left_bytes -= len(inflated)
            element = next(_read_elements(memoryview(inflated), order), MatElement(0, memoryview(b"")))
        if element.kind == MATRIX and (wnid_by_id := _parse_synsets(element.data, order)) is not None:
            return wnid_by_id
    raise DamagedMatFile("it has no array `synsets` with the fields ILSVRC2012_ID and WNID")


def _parse_synsets(matrix: memoryview, order: str) -> dict[int, str] | None:
    """The classes in `matrix`; None if it is not the array `synsets` with the fields ILSVRC2012_ID and WNID."""
    parts = _read_elements(matrix, order)
    flags, _, name = (next(parts, None) for _ in range(3))
    if flags is None or name is None or not len(flags.data) or bytes(name.data) != b"synsets":
        return None
    if struct.unpack_from(f"{order}I", flags.data)[0] & 0xFF != STRUCT:
        return None
    length, names = next(parts, None), next(parts, None)
    if length is None or names is None:
        raise DamagedMatFile("`synsets` ends within its header")
    size = struct.unpack_from(f"{order}i", length.data)[0]
    if size < 1 or len(names.data) % size:
        raise DamagedMatFile(f"`synsets` has field names of {size} bytes")
    fields = [bytes(names.data[begin : begin + size]).split(b"\0")[0] for begin in range(0, len(names.data), size)]
    if not {b"ILSVRC2012_ID", b"WNID"} <= set(fields):
        return None
    values = list(parts)
    if not values or len(values) % len(fields):
        raise DamagedMatFile("`synsets` ends within a struct")
    wnid_by_id: dict[int, str] = {}
    for begin in range(0, len(values), len(fields)):
        struct_fields = dict(zip(fields, values[begin : begin + len(fields)], strict=True))
        number, wnid = (_read_values(struct_fields[field].data, order) for field in (b"ILSVRC2012_ID", b"WNID"))
        if len(number) != 1 or not number[0].is_integer():
            raise DamagedMatFile("an ILSVRC2012_ID is no whole number")
        if not (0 < len(wnid) < 32 and all(0 < code < 128 for code in wnid)):
            raise DamagedMatFile("a WNID is no text")
        wnid_by_id[int(number[0])] = "".join(chr(int(code)) for code in wnid)
    return wnid_by_id


def _read_values(matrix: memoryview, order: str) -> list[float]:
    """The numbers of a matrix of numbers, or the character codes of a matrix of characters."""
    *_, data = list(_read_elements(matrix, order))[:4] or [MatElement(0, memoryview(b""))]
    form = NUMBER_FORMATS.get(2 if data.kind == UTF8 else data.kind)
    if form is None:
        raise DamagedMatFile(f"a field has data of the type {data.kind}")
    count = len(data.data) // struct.calcsize(f"{order}{form}")
    return [float(value) for value in struct.unpack_from(f"{order}{count}{form}", data.data)]


def _read_elements(data: memoryview, order: str) -> Iterator[MatElement]:
    """The elements that stand one after another in `data`."""
    offset = 0
    while len(data) - offset >= 8:
        kind, size = struct.unpack_from(f"{order}II", data, offset)
        begin = offset + 8
        if kind >> 16:  # a small element: its size and type share four bytes, and its data are the next four
            kind, size, begin = kind & 0xFFFF, kind >> 16, offset + 4
        end = begin + size
        if end > len(data) or (begin == offset + 4 and size > 4):
            raise DamagedMatFile(f"an element at byte {offset} is longer than the data around it")
        yield MatElement(kind, data[begin:end])
        offset = offset + 8 if begin == offset + 4 else end if kind == COMPRESSED else end + -end % 8
