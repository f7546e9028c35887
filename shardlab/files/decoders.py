"""JSON decoders that several threads can use safely, and the exceptions that they raise.

msgspec prepares its internal data about a type when the type is first decoded, without a lock. If two threads decode the same
type for the first time at the same moment, the interpreter crashes (SIGSEGV). Here each decoder is built once, under a lock.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

# The exceptions that a decoder raises for a damaged or malicious file: the document is not JSON of the expected type, its bytes
# are not UTF-8, or its values are nested too deeply.
DECODE_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_LOCK = threading.Lock()
_BUILT: dict[Any, msgspec.json.Decoder[Any]] = {}


def decoder(shape: type[T]) -> msgspec.json.Decoder[T]:
    """The JSON decoder of the type `shape`. Once it exists, `msgspec.convert` to this type is also safe in several threads."""
    built = _BUILT.get(shape)
    if built is None:
        with _LOCK:
            built = _BUILT.get(shape)
            if built is None:
                built = _BUILT[shape] = msgspec.json.Decoder(shape)
    return built
