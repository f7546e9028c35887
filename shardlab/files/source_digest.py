"""Computes digests of shardlab's source and of the installed packages.

A run refuses to start if shardlab's source or the installed packages changed after the run was submitted. To find this out, the
run compares the digests from its submission with the present digests.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardlab import PACKAGES

ROOT = Path(__file__).parents[2]
RUN_PACKAGES = tuple(name for name in PACKAGES if name != "provision")  # packages of shardlab that a run may use
# The beginning of the name of shardlab's own .dist-info folder. The digest of the installed packages leaves shardlab out,
# because a run uses a copy of shardlab's source.
OWN_PREFIX = "shardlab-"
BYTECODE_FOLDER = "__pycache__"  # the folders in which Python keeps bytecode


def digest_source(source_root: Path = ROOT) -> str:
    """The digest of all files of shardlab that a run may use: 12 hexadecimal digits. source_root: the folder that contains
    shardlab's packages."""
    return digest_packages(RUN_PACKAGES, source_root)


def is_complete_copy(copy_path: Path) -> bool:
    """Whether a copy of the source, whose name is its digest, has exactly the files of the digest, apart from bytecode."""
    present_files = {path for path in copy_path.rglob("*") if not path.is_dir() and BYTECODE_FOLDER not in path.parts}
    return present_files == set(list_source_files(RUN_PACKAGES, copy_path)) and digest_source(copy_path) == copy_path.name


def digest_packages(package_names: Iterable[str], source_root: Path = ROOT) -> str:
    """The digest of all files of some of shardlab's packages: 12 hexadecimal digits.

    package_names: the names of the packages. source_root: the folder that contains them.
    """
    sha256 = hashlib.sha256()
    for path in list_source_files(package_names, source_root):
        sha256.update(path.relative_to(source_root).as_posix().encode() + b"\n")
        sha256.update(path.read_bytes())
    return sha256.hexdigest()[:12]


def digest_installed_packages() -> str:
    """The digest of the names and versions of the installed packages without shardlab: 12 hexadecimal digits."""
    package_names = sorted(package_name for package_name in _list_installed() if not package_name.startswith(OWN_PREFIX))
    return hashlib.sha256("".join(f"{package_name}\n" for package_name in package_names).encode()).hexdigest()[:12]


def list_source_files(package_names: Iterable[str], source_root: Path = ROOT) -> Iterator[Path]:
    """The files of some of shardlab's packages, package by package, sorted by path within a package.

    package_names: the names of the packages. source_root: the folder that contains them. Folders with bytecode are not looked
    into, because another process may write or remove them at any time.
    """
    for package in package_names:
        package_files = []
        for folder, subfolders, file_names in os.walk(source_root / package):
            subfolders[:] = [folder_name for folder_name in subfolders if folder_name != BYTECODE_FOLDER]
            package_files += [
                path for name in file_names if not name.startswith(".") and (path := Path(folder, name)).is_file()
            ]
        yield from sorted(package_files)


def _list_installed() -> set[str]:
    """The names of the .dist-info folders of the installed packages. Each name contains the name and version of a package.

    The files in these folders are not read, because that takes seconds on slow storage.
    """
    # When a process imports setuptools, setuptools adds its folder `_vendor`, with its own copies of packages, to sys.path.
    search_folders = (Path(search_path) for search_path in sys.path if search_path and Path(search_path).name != "_vendor")
    return {info_folder.name for folder in search_folders if folder.is_dir() for info_folder in folder.glob("*.dist-info")}
