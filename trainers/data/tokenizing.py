"""Writes a token file from text files. The texts may be larger than memory, because they are read in pieces."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.errors import InputError, MissingExtra
from shardlab.files import files
from trainers.data import tokens

if TYPE_CHECKING:
    import numpy as np

PIECE_BYTES = 2**20  # bytes read at a time
LONGEST_LINE = 2**24  # characters; a longer line is cut at any place
# A place where a text may be cut: a line end before a character that is not a space. A tokenizer may join line ends and spaces
# with the characters after them, but it never joins such a character with the line before.
LINE_END = re.compile(r"\n(?=\S)")


def tokenize_texts(text_files: list[Path], token_file: Path, tokenizer: str) -> str:
    """Write the tokens of the texts to `token_file` and return a sentence about the file. There is no separator between the
    texts.

    tokenizer: `bytes`, or the path of a tokenizer.json of the tokenizers library. The library gets a text in pieces of about
    1 MiB that end at a line end. Raises InputError if a text is missing, empty or not UTF-8, or if the tokenizer cannot be
    read; and WorkspaceError.
    """
    for text_file in text_files:
        if not text_file.is_file():
            raise InputError(f"{text_file}: no such file. Allowed: text files.")
        if token_file.exists() and token_file.samefile(text_file):
            raise InputError(f"--out: {token_file} is also one of the input texts. Allowed: another file.")
    if tokenizer == "bytes":
        vocabulary_size, token_arrays = 256, _read_byte_tokens(text_files)
    else:
        vocabulary_size, encode = _load_tokenizer(Path(tokenizer))
        token_arrays = (encode(piece) for text_file in text_files for piece in _split_at_line_ends(text_file))
    token_count = tokens.write_token_file(token_file, token_arrays, vocabulary_size)
    return f"{token_file}: {token_count} tokens, with ids from 0 to {vocabulary_size - 1}"


def _read_byte_tokens(text_files: Iterable[Path]) -> Iterator[np.ndarray]:
    import numpy as np

    return (np.frombuffer(piece, np.uint8) for text_file in text_files for piece in _read_pieces(text_file))


def _load_tokenizer(path: Path) -> tuple[int, Callable[[str], np.ndarray]]:
    """Load a tokenizer.json. Returns (size of its vocabulary, function that turns a text into tokens)."""
    import numpy as np

    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise MissingExtra(f"the tokenizer {path}", "tokenizers") from None
    if not path.is_file():
        raise InputError(f"--tokenizer: {path}: no such file. Allowed: bytes, or a tokenizer.json.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  # the library raises no other type
        raise InputError(f"--tokenizer: {path}: cannot be read: {error}. Allowed: bytes, or a tokenizer.json.") from None
    vocabulary_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if not vocabulary_size:
        raise InputError(f"--tokenizer: {path}: its vocabulary is empty.")
    return vocabulary_size, lambda piece: np.array(tokenizer.encode(piece, add_special_tokens=False).ids, np.uint32)


def _split_at_line_ends(text_file: Path) -> Iterator[str]:
    """Read a text file in pieces. A piece ends at the last line end that was read; the text after it is in the next piece."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    pending_text, bytes_read = "", 0
    try:
        for piece in _read_pieces(text_file):
            bytes_read += len(piece)
            pending_text += decoder.decode(piece)
            line_ends = [match.end() for match in LINE_END.finditer(pending_text)]
            if line_ends:
                yield pending_text[: line_ends[-1]]
                pending_text = pending_text[line_ends[-1] :]
            elif len(pending_text) > LONGEST_LINE:
                yield pending_text
                pending_text = ""
        pending_text += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        byte_offset = bytes_read - len(error.object) + error.start
        allowed = "Allowed: UTF-8, or --tokenizer bytes"
        raise InputError(f"{text_file}: byte {byte_offset} is not UTF-8 text: {error.reason}. {allowed}.") from None
    if pending_text:
        yield pending_text


def _read_pieces(text_file: Path) -> Iterator[bytes]:
    is_empty = True
    with files.as_workspace_error("read the text"), text_file.open("rb") as opened_file:
        while piece := opened_file.read(PIECE_BYTES):
            is_empty = False
            yield piece
    if is_empty:
        raise InputError(f"{text_file}: the file is empty. Allowed: text files.")
