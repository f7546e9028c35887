"""JSON decoders that are safe with several threads, and the exceptions that they raise.

msgspec builds what it knows of a type when that type is first decoded, and it does so without a lock: two threads that decode
the same type for the first time crash the interpreter (SIGSEGV). Here each decoder is built once, by one thread at a time.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

# The exceptions for a damaged or hostile file: it is not such a document, its bytes are not text, or it is nested too deeply.
DECODE_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_LOCK = threading.Lock()
_BUILT: dict[Any, msgspec.json.Decoder[Any]] = {}


def decoder(shape: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of a type. Once it is built, `msgspec.convert` to that type is safe in threads as well."""
    built = _BUILT.get(shape)
    if built is None:
        with _LOCK:
            built = _BUILT.get(shape)
            if built is None:
                built = _BUILT[shape] = msgspec.json.Decoder(shape)
    return built
