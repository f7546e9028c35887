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
DTYPE_BY_WIDTH = {2: "<u2", 4: "<u4"}


class TokenFile:
    """A token file, mapped into memory, so that the ranks of one host share its pages. The whole file is checked first."""

    def __init__(self, path: Path) -> None:
        """Raises InputError with the file if it is not a complete and undamaged token file."""
        bytes_per_token, token_count, self.vocabulary, digest = _read_header(path)
        self.sha256 = digest.hex()
        self.tokens: np.ndarray = np.memmap(
            path, dtype=DTYPE_BY_WIDTH[bytes_per_token], mode="r", offset=HEADER.size, shape=(token_count,)
        )
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


def write_token_file(path: Path, token_arrays: Iterable[np.ndarray], vocabulary_size: int) -> int:
    """Write a token file and return its number of tokens.

    token_arrays: 1-dimensional arrays of tokens, in order. vocabulary_size: every token is smaller; up to 2^16, tokens are
    written in
    uint16, else in uint32. Raises InputError if there is no token, and WorkspaceError; after an error, `path` is unchanged.
    """
    bytes_per_token = 2 if vocabulary_size <= 2**16 else 4
    token_count, digest = 0, hashlib.sha256()
    with files.open_atomic(path) as token_file:
        token_file.write(bytes(HEADER.size))  # room for the header, whose values are known only at the end
        for token_array in token_arrays:
            token_bytes = token_array.astype(DTYPE_BY_WIDTH[bytes_per_token], copy=False).tobytes()
            digest.update(token_bytes)
            token_file.write(token_bytes)
            token_count += len(token_array)
        if not token_count:
            raise InputError(f"{path}: found no tokens to write. Allowed: texts with at least one token.")
        token_file.seek(0)
        token_file.write(HEADER.pack(MAGIC, VERSION, bytes_per_token, token_count, vocabulary_size, digest.digest()))
    return token_count


def _read_header(path: Path) -> tuple[int, int, int, bytes]:
    """Read and check the header: (bytes per token, number of tokens, vocabulary size, SHA-256).

    All checks that do not need the tokens themselves are made here. Raises InputError and WorkspaceError.
    """
    with files.as_workspace_error("read the data set"), path.open("rb") as token_file:
        file_bytes, header_bytes = os.fstat(token_file.fileno()).st_size, token_file.read(HEADER.size)
    if len(header_bytes) < HEADER.size:
        raise InputError(
            f"{path}: found {file_bytes} bytes. Allowed: a token file, whose header alone has {HEADER.size} bytes."
        )
    magic, version, bytes_per_token, token_count, vocabulary_size, digest = HEADER.unpack(header_bytes)
    if magic != MAGIC:
        raise InputError(f"{path}: is not a token file: it starts with {magic!r}, not with {MAGIC!r}.")
    if version != VERSION:
        raise InputError(f"{path}: found version {version} of the token file format. Allowed: {VERSION}.")
    if bytes_per_token not in DTYPE_BY_WIDTH:
        raise InputError(f"{path}: found {bytes_per_token} bytes per token. Allowed: {', '.join(map(str, DTYPE_BY_WIDTH))}.")
    if token_count == 0:
        raise InputError(f"{path}: found no tokens. Allowed: a file with at least one.")
    if file_bytes != HEADER.size + token_count * bytes_per_token:
        raise InputError(
            f"{path}: found {file_bytes} bytes. Allowed: {HEADER.size + token_count * bytes_per_token}, "
            f"because its header announces {token_count} tokens of {bytes_per_token} bytes."
        )
    return bytes_per_token, token_count, vocabulary_size, digest
