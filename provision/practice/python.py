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

from provision.practice.base import PracticeNodeError, run_here

PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON_PREFIX = "/opt/python"  # the folder on a node at which the folder of this machine's Python is mounted
# A folder on a node with links into PYTHON_PREFIX; its folder bin contains only the interpreter
PYTHON_HOME = f"/opt/python-{PYTHON_VERSION}"
PYTHON_COMMANDS = f"{PYTHON_HOME}/bin"  # the folder that the module adds to PATH
PYTHON_INTERPRETER = f"{PYTHON_COMMANDS}/python3"
PYTHON_LIBRARIES = "/opt/python-libraries"
PYTHON_MODULE = f"etc/environment-modules/modules/python/{PYTHON_VERSION}"
# ldconfig reads its files in alphabetical order, and uses the first of several libraries with one name. `zz` places this file
# last, so that Debian's own libraries are used.
LINKER_CONF = "etc/ld.so.conf.d/zz-python.conf"
# Tests that this machine's Python works in the base, by making an environment there as `provision` does.
# $1: the folder of this machine's Python. $2: the folder of the base.
PROOF_SCRIPT = f"""\
mount --bind -o ro "$1" "$2{PYTHON_PREFIX}" && mount -t tmpfs tmpfs "$2/tmp" && exec chroot "$2" sh -ec '
{PYTHON_INTERPRETER} -m venv /tmp/venv
/tmp/venv/bin/python -m pip --version
/tmp/venv/bin/python -c "import ctypes, ssl, zlib"'"""


def find_python_folder() -> Path:
    """The folder of this machine's Python."""
    return Path(sys.base_prefix)


def offer_python(base_folder: Path) -> None:
    """Add a module to the base that loads this machine's Python. Raises PracticeNodeError if it does not work there."""
    (base_folder / PYTHON_PREFIX[1:]).mkdir(parents=True)
    home_path = base_folder / PYTHON_HOME[1:]
    home_path.mkdir(parents=True)
    for folder_name in ("include", "lib"):
        (home_path / folder_name).symlink_to(f"{PYTHON_PREFIX}/{folder_name}")
    commands_path = base_folder / PYTHON_COMMANDS[1:]
    commands_path.mkdir()
    for folder_name in ("python3", f"python{PYTHON_VERSION}"):
        (commands_path / folder_name).symlink_to(f"{PYTHON_PREFIX}/bin/python{PYTHON_VERSION}")
    module_path = base_folder / PYTHON_MODULE
    module_path.parent.mkdir(parents=True, exist_ok=True)
    module_path.write_text(f'#%Module1.0\nmodule-whatis "Python {PYTHON_VERSION}"\nprepend-path PATH {PYTHON_COMMANDS}\n')
    _copy_libraries(base_folder)
    try:
        run_here(["unshare", "--mount", "sh", "-c", PROOF_SCRIPT, "proof", str(find_python_folder()), str(base_folder)])
    except PracticeNodeError as error:
        raise PracticeNodeError(
            f"this machine's Python {PYTHON_VERSION} does not run on practice nodes of another release: {error}"
        ) from None


def _copy_libraries(base_folder: Path) -> None:
    """Copy the shared libraries that this machine's interpreter and its modules load and that the base lacks into the base."""
    present_names = {line.split(" ")[0] for line in run_here(["chroot", str(base_folder), "ldconfig", "-p"]).split("\n\t")[1:]}
    library_folder = base_folder / PYTHON_LIBRARIES[1:]
    library_folder.mkdir()
    for library_name, library_path in _find_libraries():
        if library_name not in present_names:
            shutil.copy(library_path, library_folder / library_name)
    linker_path = base_folder / LINKER_CONF
    linker_path.parent.mkdir(parents=True, exist_ok=True)
    linker_path.write_text(f"{PYTHON_LIBRARIES}\n")
    run_here(["chroot", str(base_folder), "ldconfig"])


def _find_libraries() -> Iterator[tuple[str, str]]:
    """The name and the path of each shared library that the interpreter and its modules load."""
    module_files = sorted(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so"))
    for binary_path in (find_python_folder() / "bin" / f"python{PYTHON_VERSION}", *module_files):
        ldd_process = subprocess.run(["ldd", str(binary_path)], check=False, capture_output=True, text=True)
        for ldd_line in ldd_process.stdout.splitlines():
            library_name, arrow, library_target = ldd_line.strip().partition(" => ")
            if arrow and library_target.startswith("/"):
                yield library_name, library_target.split(" ")[0]
