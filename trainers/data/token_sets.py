"""Opens a set of token sequences by its name. Workloads do not depend on a particular set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.errors import InputError, UnknownName
from trainers.data import stdlib_text
from trainers.data.sequences import VALIDATION, TokenSet, part
from trainers.data.synthetic_tokens import VOCABULARY, SyntheticTokens
from trainers.data.tokens import TokenFile
from trainers.workload import DataSource

if TYPE_CHECKING:
    import numpy as np

NAMES = ("stdlib-text", "synthetic", "tokens")
SPLITS = ("train", "validation")


def open_tokens(
    name: str, data_path: Path, split: str, *, seq_len: int, vocabulary: int | None, tokens_file: str | None
) -> TokenSet:
    """One split of a set: the last tenth of its sequences is for validation, the others are for training.

    vocabulary: of the model; it must contain all tokens, and the synthetic set draws from it (None: 256). tokens_file: for
    `tokens`, a file that `python -m trainers tokenize` wrote, relative to the data path or absolute. Raises InputError if the
    file is missing or damaged, or has too large tokens or too few tokens, and WorkspaceError.
    """
    if name not in NAMES:
        raise UnknownName("data set", name, NAMES)
    if split not in SPLITS:
        raise UnknownName("split", split, SPLITS)
    if (name == "tokens") != (tokens_file is not None):
        raise InputError(f"tokens_file: found {tokens_file!r} with the data set {name}. Allowed: a path, only with tokens.")
    if name == "synthetic":
        return SyntheticTokens(split, seq_len, vocabulary or VOCABULARY)
    path = stdlib_text.ready(data_path) if tokens_file is None else path_of(tokens_file, data_path)
    return FileTokens(path, split, seq_len, vocabulary)


def path_of(tokens_file: str, data_path: Path) -> Path:
    """The token file that a cell names: within the data path, unless the name is absolute."""
    return data_path / Path(tokens_file).expanduser()


def no_such_file(path: Path) -> InputError:
    return InputError(f"{path}: no such file. `python -m trainers tokenize TEXT --out {path}` makes it from a text file.")


class FileTokens(TokenSet):
    """Sequences of a token file; neighbours share one token, so that each token is predicted once."""

    def __init__(self, path: Path, split: str, seq_len: int, vocabulary: int | None) -> None:
        """Raises InputError, naming the file."""
        if not path.exists():
            raise no_such_file(path)
        self._file, self._seq_len = TokenFile(path), seq_len
        self.vocabulary = self._file.vocabulary
        if vocabulary is not None and self.vocabulary > vocabulary:
            raise InputError(f"{path}: has a vocabulary of {self.vocabulary}. Allowed: at most the model's, {vocabulary}.")
        self._first, items = part(self._file.sequences(seq_len), split)
        if items == 0:
            few = f"{path}: {len(self._file.tokens)} tokens make {self._file.sequences(seq_len)} sequences of {seq_len}"
            raise InputError(f"{few}, too few for the {split} split. Allowed: at least {VALIDATION} sequences.")
        self.source = DataSource(name=path.stem, sha256=self._file.sha256, synthetic=False, items=items)

    def read(self, indices: np.ndarray) -> np.ndarray:
        return self._file.sample(self._first + indices, self._seq_len)
