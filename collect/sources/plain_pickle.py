"""Reads a pickle that contains only plain values: dicts, lists, tuples, texts, numbers, true, false and none.

Python's own reader executes what a pickle asks for: a pickle can name any function and call it. This reader knows only the
instructions that build plain values, so there is no function that a pickle could name. Torch writes snapshots of its allocator
as pickles of plain values.
"""

from __future__ import annotations

import struct
from typing import Any

PICKLE_MAGIC = b"\x80"  # the first byte of a pickle of protocol 2 or later, followed by the number of the protocol
NEWEST_PROTOCOL = 5
_CONSTANT_BY_OPCODE: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
_EMPTY_TYPE_BY_OPCODE: dict[int, type[Any]] = {ord("}"): dict, ord("]"): list, ord(")"): tuple}
_NUMBER_FORMATS = {ord("J"): "<i", ord("K"): "<B", ord("M"): "<H", ord("G"): ">d"}
_TEXT_LENGTH_FORMATS = {0x8C: "<B", ord("X"): "<I", 0x8D: "<Q"}
_INTEGER_LENGTH_FORMATS = {0x8A: "<B"}
_MEMO_WRITE_FORMATS, _MEMO_READ_FORMATS = {ord("q"): "<B", ord("r"): "<I"}, {ord("h"): "<B", ord("j"): "<I"}
_TUPLE_SIZE_BY_OPCODE = {0x85: 1, 0x86: 2, 0x87: 3}
_SKIPPED_BYTES_BY_OPCODE = {0x80: 1, 0x95: 8}  # the protocol, and the length of a frame: instruction -> the number of its bytes
_APPEND, _SET_ITEM, _MARK, _MEMOIZE, _STOP = ord("a"), ord("s"), ord("("), 0x94, ord(".")
_MARKED_OPCODES = frozenset(b"etlud")  # instructions that use all values since the last mark
_DAMAGE_ERRORS = (IndexError, KeyError, TypeError, AttributeError, ValueError, OverflowError, struct.error)


def read_plain_pickle(pickle_bytes: bytes) -> Any:
    """The value in a pickle. Raises ValueError, with the reason as a clause, if the pickle has anything but plain values."""
    reader = _PlainReader(pickle_bytes)
    try:
        while reader.execute_instruction():
            pass
        return reader.stack.pop()
    except _UnknownOpcode as fault:
        raise ValueError(
            f"it asks for more than plain values (instruction {fault.opcode:#04x}), which could execute code"
        ) from None
    except _DAMAGE_ERRORS:
        raise ValueError("it is damaged or cut short") from None


class _UnknownOpcode(Exception):
    """Raised for an instruction that does not build a plain value."""

    def __init__(self, opcode: int) -> None:
        self.opcode = opcode


class _PlainReader:
    """Executes the instructions of a pickle one by one."""

    def __init__(self, pickle_bytes: bytes) -> None:
        self._content, self._position = pickle_bytes, 0
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def execute_instruction(self) -> bool:
        """Execute the next instruction. Returns whether more follow. Raises one of _DAMAGE_ERRORS if it is damaged."""
        opcode = self._content[self._position]
        self._position += 1
        stack = self.stack
        if opcode in _NUMBER_FORMATS:
            stack.append(self._read_number(_NUMBER_FORMATS[opcode]))
        elif opcode in _TEXT_LENGTH_FORMATS:
            stack.append(self._read_bytes(self._read_number(_TEXT_LENGTH_FORMATS[opcode])).decode("utf-8", "replace"))
        elif opcode == _MEMOIZE:
            self._memo[len(self._memo)] = stack[-1]
        elif opcode in _MEMO_READ_FORMATS:
            stack.append(self._memo[self._read_number(_MEMO_READ_FORMATS[opcode])])
        elif opcode in _MEMO_WRITE_FORMATS:
            self._memo[self._read_number(_MEMO_WRITE_FORMATS[opcode])] = stack[-1]
        elif opcode in _CONSTANT_BY_OPCODE:
            stack.append(_CONSTANT_BY_OPCODE[opcode])
        elif opcode in _EMPTY_TYPE_BY_OPCODE:
            stack.append(_EMPTY_TYPE_BY_OPCODE[opcode]())
        elif opcode in _INTEGER_LENGTH_FORMATS:
            integer_bytes = self._read_number(_INTEGER_LENGTH_FORMATS[opcode])
            stack.append(int.from_bytes(self._read_bytes(integer_bytes), "little", signed=True))
        elif opcode == _MARK:
            self._marks.append(len(stack))
        elif opcode in _MARKED_OPCODES:
            self._use_marked(opcode)
        elif opcode == _APPEND:
            top_value = stack.pop()
            stack[-1].append(top_value)
        elif opcode == _SET_ITEM:
            top_value, dict_key = stack.pop(), stack.pop()
            stack[-1].update({dict_key: top_value})
        elif opcode in _TUPLE_SIZE_BY_OPCODE:
            stack[-_TUPLE_SIZE_BY_OPCODE[opcode] :] = [tuple(stack[-_TUPLE_SIZE_BY_OPCODE[opcode] :])]
        elif opcode in _SKIPPED_BYTES_BY_OPCODE:
            self._read_bytes(_SKIPPED_BYTES_BY_OPCODE[opcode])
        elif opcode != _STOP:
            raise _UnknownOpcode(opcode)
        return opcode != _STOP

    def _use_marked(self, opcode: int) -> None:
        """Execute an instruction that uses all values since the last mark: it adds them to a list or dict, or makes one."""
        mark_position = self._marks.pop()
        marked_values = self.stack[mark_position:]
        del self.stack[mark_position:]
        if opcode == ord("e"):
            self.stack[-1].extend(marked_values)
        elif opcode == ord("u"):
            self.stack[-1].update(zip(marked_values[::2], marked_values[1::2], strict=True))
        elif opcode == ord("d"):
            self.stack.append(dict(zip(marked_values[::2], marked_values[1::2], strict=True)))
        else:
            self.stack.append(tuple(marked_values) if opcode == ord("t") else marked_values)

    def _read_number(self, number_format: str) -> Any:
        return struct.unpack(number_format, self._read_bytes(struct.calcsize(number_format)))[0]

    def _read_bytes(self, byte_count: int) -> bytes:
        read_bytes = self._content[self._position : self._position + byte_count]
        if len(read_bytes) < byte_count:
            raise ValueError("cut short")
        self._position += byte_count
        return read_bytes
