"""Reads and writes token files. A header describes the content, so that a wrong or damaged file is refused before training.

The format is little-endian: 64 bytes of header, then the tokens.

====== ===== =====================================================
offset bytes
====== ===== =====================================================
0      8     ``SHLTOKEN``
8      4     version, 1
12     4     bytes per token: 2 or 4 (uint16 or uint32)
16     8     tokens in the file
24     8     vocabulary size; every token is below it
32     32    SHA-256 of the tokens' bytes
====== ===== =====================================================
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from shardlab.errors import InputError
from shardlab.files import files

MAGIC = b"SHLTOKEN"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ32s")
DTYPES = {2: "<u2", 4: "<u4"}


class TokenFile:
    """A token file, mapped into memory, so that the ranks of one host share its pages. The whole file is checked first."""

    def __init__(self, path: Path) -> None:
        """Raises InputError with the file if it is not a complete and undamaged token file."""
        width, count, self.vocabulary, digest = _read_header(path)
        self.sha256 = digest.hex()
        self.tokens: np.ndarray = np.memmap(path, dtype=DTYPES[width], mode="r", offset=HEADER.size, shape=(count,))
        if hashlib.sha256(self.tokens.data).digest() != digest:
            raise InputError(f"{path}: the tokens do not match the checksum in the header (SHA-256 differs).")
        if (largest := int(self.tokens.max())) >= self.vocabulary:
            raise InputError(f"{path}: found the token {largest}. Allowed: below its vocabulary size {self.vocabulary}.")

    def count_sequences(self, seq_len: int) -> int:
        """The number of samples of seq_len + 1 tokens in the file. Consecutive samples share one token, so that each token is
        predicted once."""
        return max(0, (len(self.tokens) - 1) // seq_len)

    def read_sequences(self, indices: np.ndarray, seq_len: int) -> np.ndarray:
        """The samples with these indices, (n,), as an array (n, seq_len + 1) in int64."""
        offsets = indices[:, None] * seq_len + np.arange(seq_len + 1)
        return self.tokens[offsets].astype(np.int64)


def write(path: Path, pieces: Iterable[np.ndarray], vocabulary: int) -> int:
    """Write a token file and return its number of tokens.

    pieces: 1-dimensional arrays of tokens, in order. vocabulary: every token is smaller; up to 2^16, tokens are written in
    uint16, else in uint32. Raises InputError if there is no token, and WorkspaceError; after an error, `path` is unchanged.
    """
    width = 2 if vocabulary <= 2**16 else 4
    count, digest = 0, hashlib.sha256()
    with files.open_atomic(path) as handle:
        handle.write(bytes(HEADER.size))  # room for the header, whose values are known only at the end
        for piece in pieces:
            token_bytes = piece.astype(DTYPES[width], copy=False).tobytes()
            digest.update(token_bytes)
            handle.write(token_bytes)
            count += len(piece)
        if not count:
            raise InputError(f"{path}: found no tokens to write. Allowed: texts with at least one token.")
        handle.seek(0)
        handle.write(HEADER.pack(MAGIC, VERSION, width, count, vocabulary, digest.digest()))
    return count


def _read_header(path: Path) -> tuple[int, int, int, bytes]:
    """Read and check the header: (bytes per token, number of tokens, vocabulary size, SHA-256).

    All checks that do not need the tokens themselves are made here. Raises InputError and WorkspaceError.
    """
    with files.as_workspace_error("read the data set"), path.open("rb") as handle:
        size, raw = os.fstat(handle.fileno()).st_size, handle.read(HEADER.size)
    if len(raw) < HEADER.size:
        raise InputError(f"{path}: found {size} bytes. Allowed: a token file, whose header alone has {HEADER.size} bytes.")
    magic, version, width, count, vocabulary, digest = HEADER.unpack(raw)
    if magic != MAGIC:
        raise InputError(f"{path}: is not a token file: it starts with {magic!r}, not with {MAGIC!r}.")
    if version != VERSION:
        raise InputError(f"{path}: found version {version} of the token file format. Allowed: {VERSION}.")
    if width not in DTYPES:
        raise InputError(f"{path}: found {width} bytes per token. Allowed: {', '.join(map(str, DTYPES))}.")
    if count == 0:
        raise InputError(f"{path}: found no tokens. Allowed: a file with at least one.")
    if size != HEADER.size + count * width:
        raise InputError(
            f"{path}: found {size} bytes. Allowed: {HEADER.size + count * width}, "
            f"because its header announces {count} tokens of {width} bytes."
        )
    return width, count, vocabulary, digest
