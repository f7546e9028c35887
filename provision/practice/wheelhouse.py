"""A folder of wheels, downloaded once by this machine, from which practice nodes install without a network."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from provision import software
from provision.practice.base import cache, run
from shardlab import files


def folder() -> Path:
    """The folder, which may not exist yet; there is one for each set of packages and release of Python."""
    return cache() / f"wheels-{software.digest()}-{sys.version_info.major}.{sys.version_info.minor}"


def make(tell: Callable[[str], None]) -> Path:
    """The folder, which is made and filled if it does not exist. Raises NoBase."""
    made = folder()
    if made.is_dir():
        return made
    files.make_folder(made.parent)
    growing = made.with_name(f".{made.name}.{os.getpid()}")
    try:
        tell(f"downloading the Python packages of nodes, which is needed only once: {made}")
        growing.mkdir()
        constraints = growing / "constraints.txt"
        constraints.write_bytes(software.constraints())
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--wheel-dir", str(growing)]
        run([*pip, "--constraint", str(constraints), *software.requirements()])
        growing.rename(made)
    finally:
        shutil.rmtree(growing, ignore_errors=True)
    return made
