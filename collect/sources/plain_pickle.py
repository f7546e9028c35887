"""Reads a pickle that contains only plain values: dicts, lists, tuples, texts, numbers, true, false and none.

Python's own reader executes what a pickle asks for: a pickle can name any function and call it. This reader knows only the
instructions that build plain values, so there is no function that a pickle could name. Torch writes snapshots of its allocator
as pickles of plain values.
"""

from __future__ import annotations

import struct
from typing import Any

MAGIC = b"\x80"  # the first byte of a pickle of protocol 2 or later, followed by the number of the protocol
NEWEST_PROTOCOL = 5
_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
_EMPTY_VALUES: dict[int, type[Any]] = {ord("}"): dict, ord("]"): list, ord(")"): tuple}
_NUMBER_FORMATS = {ord("J"): "<i", ord("K"): "<B", ord("M"): "<H", ord("G"): ">d"}
_TEXT_LENGTH_FORMATS = {0x8C: "<B", ord("X"): "<I", 0x8D: "<Q"}
_INTEGER_LENGTH_FORMATS = {0x8A: "<B"}
_MEMO_WRITES, _MEMO_READS = {ord("q"): "<B", ord("r"): "<I"}, {ord("h"): "<B", ord("j"): "<I"}
_TUPLE_SIZES = {0x85: 1, 0x86: 2, 0x87: 3}
_SKIPPED_BYTES = {0x80: 1, 0x95: 8}  # the protocol, and the length of a frame: instruction -> the number of its bytes
_APPEND, _SET_ITEM, _MARK, _MEMOIZE, _STOP = ord("a"), ord("s"), ord("("), 0x94, ord(".")
_MARKED_OPCODES = frozenset(b"etlud")  # instructions that use all values since the last mark
_FAULTS = (IndexError, KeyError, TypeError, AttributeError, ValueError, OverflowError, struct.error)


def read_plain_pickle(content: bytes) -> Any:
    """The value in a pickle. Raises ValueError, with the reason as a clause, if the pickle has anything but plain values."""
    reader = _PlainReader(content)
    try:
        while reader.execute_instruction():
            pass
        return reader.stack.pop()
    except _UnknownOpcode as fault:
        raise ValueError(
            f"it asks for more than plain values (instruction {fault.opcode:#04x}), which could execute code"
        ) from None
    except _FAULTS:
        raise ValueError("it is damaged or cut short") from None


class _UnknownOpcode(Exception):
    """Raised for an instruction that does not build a plain value."""

    def __init__(self, opcode: int) -> None:
        self.opcode = opcode


class _PlainReader:
    """Executes the instructions of a pickle one by one."""

    def __init__(self, content: bytes) -> None:
        self._content, self._position = content, 0
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def execute_instruction(self) -> bool:
        """Execute the next instruction. Returns whether more instructions follow. Raises one of _FAULTS if it is damaged."""
        opcode = self._content[self._position]
        self._position += 1
        stack = self.stack
        if opcode in _NUMBER_FORMATS:
            stack.append(self._read_number(_NUMBER_FORMATS[opcode]))
        elif opcode in _TEXT_LENGTH_FORMATS:
            stack.append(self._read_bytes(self._read_number(_TEXT_LENGTH_FORMATS[opcode])).decode("utf-8", "replace"))
        elif opcode == _MEMOIZE:
            self._memo[len(self._memo)] = stack[-1]
        elif opcode in _MEMO_READS:
            stack.append(self._memo[self._read_number(_MEMO_READS[opcode])])
        elif opcode in _MEMO_WRITES:
            self._memo[self._read_number(_MEMO_WRITES[opcode])] = stack[-1]
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _EMPTY_VALUES:
            stack.append(_EMPTY_VALUES[opcode]())
        elif opcode in _INTEGER_LENGTH_FORMATS:
            length = self._read_number(_INTEGER_LENGTH_FORMATS[opcode])
            stack.append(int.from_bytes(self._read_bytes(length), "little", signed=True))
        elif opcode == _MARK:
            self._marks.append(len(stack))
        elif opcode in _MARKED_OPCODES:
            self._use_marked(opcode)
        elif opcode == _APPEND:
            value = stack.pop()
            stack[-1].append(value)
        elif opcode == _SET_ITEM:
            value, key = stack.pop(), stack.pop()
            stack[-1].update({key: value})
        elif opcode in _TUPLE_SIZES:
            stack[-_TUPLE_SIZES[opcode] :] = [tuple(stack[-_TUPLE_SIZES[opcode] :])]
        elif opcode in _SKIPPED_BYTES:
            self._read_bytes(_SKIPPED_BYTES[opcode])
        elif opcode != _STOP:
            raise _UnknownOpcode(opcode)
        return opcode != _STOP

    def _use_marked(self, opcode: int) -> None:
        """Execute an instruction that uses all values since the last mark: it adds them to a list or dict, or makes one."""
        mark = self._marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        if opcode == ord("e"):
            self.stack[-1].extend(values)
        elif opcode == ord("u"):
            self.stack[-1].update(zip(values[::2], values[1::2], strict=True))
        elif opcode == ord("d"):
            self.stack.append(dict(zip(values[::2], values[1::2], strict=True)))
        else:
            self.stack.append(tuple(values) if opcode == ord("t") else values)

    def _read_number(self, number_format: str) -> Any:
        return struct.unpack(number_format, self._read_bytes(struct.calcsize(number_format)))[0]

    def _read_bytes(self, count: int) -> bytes:
        part = self._content[self._position : self._position + count]
        if len(part) < count:
            raise ValueError("cut short")
        self._position += count
        return part
