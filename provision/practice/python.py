"""This machine's Python on practice nodes of another release, whose own Python is another version than the wheels are for.

The nodes see its folder read-only, and load it as a module, as on a site. Programs of an older release run on a newer one,
whose glibc knows their symbols; libraries that the node lacks are copied from here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from provision.practice.base import NoBase, run

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PREFIX = "/opt/python"  # on a node: the folder of this machine's Python
HOME = f"/opt/python-{VERSION}"  # the same, but with nothing but the interpreter in bin
COMMANDS = f"{HOME}/bin"  # what the module adds to PATH
INTERPRETER = f"{COMMANDS}/python3"
LIBRARIES = "/opt/python-libraries"
MODULE = f"etc/environment-modules/modules/python/{VERSION}"
# ldconfig takes these files in their order, and a library from the first folder that has it: Debian's own come first.
LINKER = "etc/ld.so.conf.d/zz-python.conf"
# $1: the folder of this machine's Python. $2: the base, in which an environment is made as provisioning does.
PROOF = f"""\
mount --bind -o ro "$1" "$2{PREFIX}" && mount -t tmpfs tmpfs "$2/tmp" && exec chroot "$2" sh -ec '
{INTERPRETER} -m venv /tmp/venv
/tmp/venv/bin/python -m pip --version
/tmp/venv/bin/python -c "import ctypes, ssl, zlib"'"""


def folder() -> Path:
    """The folder of this machine's Python."""
    return Path(sys.base_prefix)


def offer(base: Path) -> None:
    """Make a module of this machine's Python in the base. Raises NoBase if it does not run there."""
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
        run(["unshare", "--mount", "sh", "-c", PROOF, "proof", str(folder()), str(base)])
    except NoBase as error:
        raise NoBase(f"this machine's Python {VERSION} does not run on practice nodes of another release: {error}") from None


def _copy_libraries(base: Path) -> None:
    """Copy the shared libraries of the interpreter and its modules that the base does not have."""
    there = {line.split(" ")[0] for line in run(["chroot", str(base), "ldconfig", "-p"]).split("\n\t")[1:]}
    target = base / LIBRARIES[1:]
    target.mkdir()
    for name, path in _libraries():
        if name not in there:
            shutil.copy(path, target / name)
    linker = base / LINKER
    linker.parent.mkdir(parents=True, exist_ok=True)
    linker.write_text(f"{LIBRARIES}\n")
    run(["chroot", str(base), "ldconfig"])


def _libraries() -> Iterator[tuple[str, str]]:
    """The name and the path of each shared library that the interpreter and its modules load."""
    modules = sorted(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so"))
    for file in (folder() / "bin" / f"python{VERSION}", *modules):
        answer = subprocess.run(["ldd", str(file)], check=False, capture_output=True, text=True)
        for line in answer.stdout.splitlines():
            name, arrow, rest = line.strip().partition(" => ")
            if arrow and rest.startswith("/"):
                yield name, rest.split(" ")[0]
