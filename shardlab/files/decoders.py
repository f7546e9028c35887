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

_DECODERS_LOCK = threading.Lock()
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}


def get_decoder(target_type: type[T]) -> msgspec.json.Decoder[T]:
    """The JSON decoder of the type `target_type`. Once it exists, `msgspec.convert` to this type is also safe in several
    threads."""
    json_decoder = _DECODERS.get(target_type)
    if json_decoder is None:
        with _DECODERS_LOCK:
            json_decoder = _DECODERS.get(target_type)
            if json_decoder is None:
                json_decoder = _DECODERS[target_type] = msgspec.json.Decoder(target_type)
    return json_decoder
