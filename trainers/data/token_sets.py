"""Opens a set of token sequences by its name, so that workloads do not depend on a particular set.

Synthetic sequences, which a model can learn, need no files: a rule gives most tokens, all other tokens are random.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from pathlib import Path

import numpy as np

from shardlab.errors import InputError, UnknownName
from trainers.data import tokens
from trainers.data.data_sets import SPLITS, TOKEN_DATA_SETS, DataSource, find_token_file, make_missing_token_file_error
from trainers.data.made_once import choose_writable_path, create_file_once
from trainers.data.sequences import VALIDATION_DIVISOR, TokenSet, locate_split
from trainers.data.tokens import TokenFile

DEFAULT_VOCABULARY_SIZE, SEQUENCE_COUNT = 256, 10_000
SEED, VERSION = 10, 1  # if the rule for the tokens changes, the version must change, because it is in the checksum
# If the vocabulary is larger than 256, only its first 256 tokens are used; else a short run would hardly see any token twice.
MOST_SYMBOLS = 256
RANDOM_TOKEN_PROBABILITY = 0.1  # the probability that a token is random, with the same probability for each symbol


MOST_BYTES = 8 * 2**20  # the largest size of the text from the standard library
BYTE_VOCABULARY_SIZE = 256  # the vocabulary of a text whose tokens are its bytes
# folders whose files are not used
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def open_tokens(
    name: str, data_path: Path, split: str, *, seq_len: int, vocabulary_size: int | None, tokens_file: str | None
) -> TokenSet:
    """Open one split of a set. The last tenth of the sequences is for validation, all other sequences are for training.

    name: the data set, one of TOKEN_DATA_SETS.
    split: `train` or `validation`.
    seq_len: tokens of a sequence.
    vocabulary_size: size of the model's vocabulary. It must contain all tokens of a file; the synthetic set draws from it.
        None: no limit for a file, 256 for the synthetic set.
    tokens_file: for the data set `tokens`, a file that `python -m trainers tokenize` wrote, relative to the data path or
        absolute.

    Raises InputError if the file is missing or damaged, if a token is too large for the model, or if there are too few tokens;
    and WorkspaceError.
    """
    if name not in TOKEN_DATA_SETS:
        raise UnknownName("data set", name, TOKEN_DATA_SETS)
    if split not in SPLITS:
        raise UnknownName("split", split, SPLITS)
    if (name == "tokens") != (tokens_file is not None):
        raise InputError(f"tokens_file: found {tokens_file!r} with the data set {name}. Allowed: a path, only with tokens.")
    if name == "synthetic":
        return SyntheticTokens(split, seq_len, vocabulary_size or DEFAULT_VOCABULARY_SIZE)
    token_path = ensure_stdlib_text(data_path) if tokens_file is None else find_token_file(tokens_file, data_path)
    return FileTokens(token_path, split, seq_len, vocabulary_size)


class FileTokens(TokenSet):
    """Sequences of a token file. Two consecutive sequences share one token, so that each token is predicted once."""

    def __init__(self, path: Path, split: str, seq_len: int, vocabulary_size: int | None) -> None:
        """Raises InputError with the file if it is missing or damaged, or does not fit the model."""
        if not path.exists():
            raise make_missing_token_file_error(path)
        self._file, self._seq_len = TokenFile(path), seq_len
        self.vocabulary = self._file.vocabulary
        if vocabulary_size is not None and self.vocabulary > vocabulary_size:
            raise InputError(f"{path}: has a vocabulary of {self.vocabulary}. Allowed: at most the model's, {vocabulary_size}.")
        self._first_index, sequence_count = locate_split(self._file.count_sequences(seq_len), split)
        if sequence_count == 0:
            sizes_text = (
                f"{path}: {len(self._file.tokens)} tokens make {self._file.count_sequences(seq_len)} sequences of {seq_len}"
            )
            raise InputError(f"{sizes_text}, too few for the {split} split. Allowed: at least {VALIDATION_DIVISOR} sequences.")
        self.source = DataSource(name=path.stem, sha256=self._file.sha256, synthetic=False, items=sequence_count)

    def read(self, indices: np.ndarray) -> np.ndarray:
        return self._file.read_sequences(self._first_index + indices, self._seq_len)


def ensure_stdlib_text(data_path: Path) -> Path:
    """The path of a token file with the source code of Python's standard library, which needs no download.

    If the file does not exist, it is written into the data folder, or into the user's cache if the data folder is not writable.
    The version of Python is part of the name, because each version has a different text. Raises WorkspaceError.
    """
    text_path = choose_writable_path(data_path / make_stdlib_file_name())
    create_file_once(text_path, _write_stdlib_text)
    return text_path


def make_stdlib_file_name() -> str:
    """The name of the file with the standard library's source."""
    return f"stdlib-text-{platform.python_version()}.tokens"


def list_source_files(library: Path) -> list[Path]:
    """The library's .py files, sorted by path, without tests and without installed packages."""
    relative_paths = (path.relative_to(library) for path in library.rglob("*.py"))
    return [
        library / path for path in sorted(relative_paths, key=Path.as_posix) if not SKIPPED_FOLDERS.intersection(path.parts)
    ]


def _write_stdlib_text(path: Path) -> None:
    library_folder = Path(sysconfig.get_path("stdlib"))
    source_text = bytearray()
    for source_file in list_source_files(library_folder):
        if len(source_text) >= MOST_BYTES:
            break
        source_text += source_file.read_bytes()
    if not source_text:
        raise InputError(f"{library_folder}: has no Python source to train on; this Python was installed without .py files.")
    tokens.write_token_file(path, [np.frombuffer(source_text[:MOST_BYTES], dtype=np.uint8)], BYTE_VOCABULARY_SIZE)


class SyntheticTokens(TokenSet):
    """Sequences in which token[k + 1] = (5 token[k] + 3) mod symbols, or, with probability 0.1, any symbol.

    A sequence depends only on a fixed seed and its index. The smallest possible mean loss is the entropy of the next token:
    with V symbols and q = 0.9 + 0.1 / V, this is -q ln q - (V - 1) (0.1 / V) ln(0.1 / V) nats, which is 0.88 for 256 symbols.
    """

    def __init__(self, split: str, seq_len: int, vocabulary_size: int) -> None:
        """vocabulary_size: size of the model's vocabulary. Raises InputError if it is below 2."""
        if vocabulary_size < 2:
            raise InputError(f"vocabulary: found {vocabulary_size}. Allowed: at least 2, or there is nothing to learn.")
        self.vocabulary = vocabulary_size
        self._symbol_count = min(vocabulary_size, MOST_SYMBOLS)
        self._first_index, sequence_count = locate_split(SEQUENCE_COUNT, split)
        factors, terms = [1], [0]  # the rule applied k times is: factors[k] * token + terms[k]
        for _ in range(seq_len):
            factors.append(5 * factors[-1] % self._symbol_count)
            terms.append((5 * terms[-1] + 3) % self._symbol_count)
        self._factors, self._terms = np.array(factors), np.array(terms)
        rule = f"synthetic tokens {VERSION}, seed {SEED}, {split}, {sequence_count} of {seq_len} + 1 below {self._symbol_count}"
        self.source = DataSource(
            name=f"synthetic tokens below {self._symbol_count}",
            sha256=hashlib.sha256(rule.encode()).hexdigest(),
            synthetic=True,
            items=sequence_count,
        )

    def read(self, indices: np.ndarray) -> np.ndarray:
        token_count = len(self._factors)
        random_numbers = np.empty((len(indices), token_count), np.uint64)
        for row, index in enumerate(indices):
            random_numbers[row] = np.random.Philox(key=np.array([SEED, self._first_index + int(index)], np.uint64)).random_raw(
                token_count
            )
        # The lower 32 bits of a draw select the random symbol; the upper 32 bits decide whether the token is random.
        random_tokens = (random_numbers % 2**32 % self._symbol_count).astype(np.int64)
        positions = np.arange(token_count)
        random_positions = np.where(random_numbers >> 32 < int(RANDOM_TOKEN_PROBABILITY * 2**32), positions, 0)
        # For each position, the position of the last random token, from which the rule computes this token. The first token of
        # a sequence is always random.
        last_positions = np.maximum.accumulate(random_positions, axis=1)
        distances = positions - last_positions
        start_tokens = np.take_along_axis(random_tokens, last_positions, axis=1)
        tokens: np.ndarray = (self._factors[distances] * start_tokens + self._terms[distances]) % self._symbol_count
        return tokens
