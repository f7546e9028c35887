"""Offers this machine's Python on practice nodes with another release of Debian, because the wheels do not fit the Python of
these nodes.

The folder of this machine's Python is mounted read-only on the nodes, which load it as a module, as at a Slurm site. A program
of an older Debian release works on a newer release, whose glibc has all symbols that the program needs. Libraries that the
nodes lack are copied from this machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from provision.practice.base import PracticeNodeError, run

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PREFIX = "/opt/python"  # the folder on a node at which the folder of this machine's Python is mounted
HOME = f"/opt/python-{VERSION}"  # a folder on a node with links into PREFIX; its folder bin contains only the interpreter
COMMANDS = f"{HOME}/bin"  # the folder that the module adds to PATH
INTERPRETER = f"{COMMANDS}/python3"
LIBRARIES = "/opt/python-libraries"
MODULE = f"etc/environment-modules/modules/python/{VERSION}"
# ldconfig reads its files in alphabetical order, and uses the first of several libraries with one name. `zz` places this file
# last, so that Debian's own libraries are used.
LINKER = "etc/ld.so.conf.d/zz-python.conf"
# Tests that this machine's Python works in the base, by making an environment there as `provision` does.
# $1: the folder of this machine's Python. $2: the folder of the base.
PROOF = f"""\
mount --bind -o ro "$1" "$2{PREFIX}" && mount -t tmpfs tmpfs "$2/tmp" && exec chroot "$2" sh -ec '
{INTERPRETER} -m venv /tmp/venv
/tmp/venv/bin/python -m pip --version
/tmp/venv/bin/python -c "import ctypes, ssl, zlib"'"""


def python_folder() -> Path:
    """The folder of this machine's Python."""
    return Path(sys.base_prefix)


def offer_python(base: Path) -> None:
    """Add a module to the base that loads this machine's Python. Raises PracticeNodeError if it does not work there."""
    (base / PREFIX[1:]).mkdir(parents=True)
    home = base / HOME[1:]
    home.mkdir(parents=True)
    for name in ("include", "lib"):
        (home / name).symlink_to(f"{PREFIX}/{name}")
    commands = base / COMMANDS[1:]
    commands.mkdir()
    for name in ("python3", f"python{VERSION}"):
        (commands / name).symlink_to(f"{PREFIX}/bin/python{VERSION}")
    module = base / MODULE
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text(f'#%Module1.0\nmodule-whatis "Python {VERSION}"\nprepend-path PATH {COMMANDS}\n')
    _copy_libraries(base)
    try:
        run(["unshare", "--mount", "sh", "-c", PROOF, "proof", str(python_folder()), str(base)])
    except PracticeNodeError as error:
        raise PracticeNodeError(
            f"this machine's Python {VERSION} does not run on practice nodes of another release: {error}"
        ) from None


def _copy_libraries(base: Path) -> None:
    """Copy the shared libraries that this machine's interpreter and its modules load and that the base lacks into the base."""
    present_names = {line.split(" ")[0] for line in run(["chroot", str(base), "ldconfig", "-p"]).split("\n\t")[1:]}
    target = base / LIBRARIES[1:]
    target.mkdir()
    for name, path in _find_libraries():
        if name not in present_names:
            shutil.copy(path, target / name)
    linker = base / LINKER
    linker.parent.mkdir(parents=True, exist_ok=True)
    linker.write_text(f"{LIBRARIES}\n")
    run(["chroot", str(base), "ldconfig"])


def _find_libraries() -> Iterator[tuple[str, str]]:
    """The name and the path of each shared library that the interpreter and its modules load."""
    modules = sorted(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so"))
    for file in (python_folder() / "bin" / f"python{VERSION}", *modules):
        answer = subprocess.run(["ldd", str(file)], check=False, capture_output=True, text=True)
        for line in answer.stdout.splitlines():
            name, arrow, rest = line.strip().partition(" => ")
            if arrow and rest.startswith("/"):
                yield name, rest.split(" ")[0]
