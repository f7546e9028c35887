"""A text that needs no download: the source of Python's standard library. A token is a byte."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

from shardlab.errors import InputError
from trainers.data import tokens
from trainers.data.once import make_once

MOST_BYTES = 8 * 2**20
VOCABULARY = 256  # a token is a byte
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}  # folders


def ready(data_path: Path) -> Path:
    """The token file in this data folder, made if it does not exist. Raises WorkspaceError.

    Python's version is part of the name: another version has another text.
    """
    path = data_path / f"stdlib-text-{platform.python_version()}.tokens"
    make_once(path, _make)
    return path


def sources(library: Path) -> list[Path]:
    """The library's .py files, sorted by path, without tests and without installed packages."""
    found = (path.relative_to(library) for path in library.rglob("*.py"))
    return [library / path for path in sorted(found, key=Path.as_posix) if not LEFT_OUT.intersection(path.parts)]


def _make(path: Path) -> None:
    import numpy as np

    library = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for source in sources(library):
        if len(text) >= MOST_BYTES:
            break
        text += source.read_bytes()
    if not text:
        raise InputError(f"{library}: has no Python source to train on; this Python was installed without .py files.")
    tokens.write(path, [np.frombuffer(text[:MOST_BYTES], dtype=np.uint8)], VOCABULARY)
