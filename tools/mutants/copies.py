"""Makes copies of the repository, each with a virtual environment. Mutants (small changes of the code) are put only into these
copies, never into the working tree."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".mutants"
# The packages of the product, from which mutants are drawn.
PACKAGES = ("shardlab", "jobs", "collect", "provision", "trainers")
# The folders of the product. A change in any of them may change the result of a test.
PRODUCT = (*PACKAGES, "templates", "matrices")


@cache
def tracked() -> list[str]:
    """The names of all files of the repository that git does not ignore. They are read once, at the first call in this
    process."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted(name for name in names if name and (ROOT / name).is_file())


def digest(names: Iterable[str]) -> str:
    """A digest of 12 characters of the files `names`. It changes if the name or the content of a file changes."""
    found = hashlib.sha256()
    for name in names:
        found.update(f"{name}\n".encode() + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return found.hexdigest()[:12]


def sources() -> list[str]:
    """The Python files from which mutants are drawn."""
    return [name for name in tracked() if name.split("/")[0] in PACKAGES and name.endswith(".py")]


@cache
def product_digest() -> str:
    """The digest of the product's files. The result of a mutant is valid only as long as this digest does not change."""
    return digest(name for name in tracked() if name.split("/")[0] in PRODUCT)


@cache
def tests_digest() -> str:
    """The digest of the tests. The result "survived" of a mutant is valid only as long as this digest does not change."""
    return digest(name for name in tracked() if name.startswith("tests/"))


@dataclass(frozen=True)
class Copy:
    """A copy of the repository, with a virtual environment whose `python` imports the product only from the copy.

    path: the folder of the copy. scratch: a folder for the files that tests write.
    """

    path: Path
    scratch: Path

    @staticmethod
    def make(name: str) -> Copy:
        """Makes a copy of the repository. If a copy of this name is left from an earlier run, it is deleted first, because it
        may contain a mutant."""
        path = WORK / name
        shutil.rmtree(path, ignore_errors=True)
        for file in tracked():
            there = path / file
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, there)
        _environment(path)
        # The path of the scratch folder must be short, because tests make sockets in it and the path of a socket may have at
        # most 107 characters.
        return Copy(path, Path(tempfile.mkdtemp(prefix="mutants-")))

    def command(self, plugin: str, *test_files: str) -> list[str]:
        """The command that runs the tests of some files, except tests with the marker `e2e`.

        plugin: the pytest plugin in tools/mutants/plugins to use. The seed of Hypothesis is fixed.
        """
        python = str(self.path / ".venv" / "bin" / "python")
        words = [
            "-q",
            "--no-header",
            "--tb=no",
            "-m",
            "not e2e",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:anyio",
            "-p",
            plugin,
            "--hypothesis-seed=14",
        ]
        return [python, "-m", "pytest", *words, f"--basetemp={self.scratch / 'tests'}", *test_files]

    def variables(self, **more: str) -> dict[str, str]:
        """The environment variables of a test process. The storage of Hypothesis is in the scratch folder, so that examples
        found with one mutant are not used for the next one."""
        return {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(self.scratch / "hypothesis"), **more}

    def end_processes(self) -> None:
        """Ends the processes that tests left behind: all processes whose command line contains the path of this copy."""
        mark = str(self.path) + "/"
        for process in psutil.process_iter(["cmdline"]):
            if process.pid != os.getpid() and any(mark in word for word in process.info["cmdline"] or ()):
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue

    def clean(self) -> None:
        """Removes the files that tests wrote into the scratch folder."""
        for name in ("tests", "hypothesis"):
            shutil.rmtree(self.scratch / name, ignore_errors=True)

    def remove(self) -> None:
        """Removes the copy and its scratch folder."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)


def _environment(path: Path) -> None:
    """Makes a virtual environment without packages of its own in a copy of the repository.

    The import path of the environment contains the copy, and after it the packages of the environment that runs this file.
    Python does not read the `.pth` files of these packages, so it never imports the product from the working tree.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path / ".venv"], check=True)
    (packages,) = (path / ".venv" / "lib").glob("python3*/site-packages")
    (original,) = (Path(sys.prefix) / "lib").glob("python3*/site-packages")
    lines = [str(path), str(original), str(path / "tools" / "mutants" / "plugins"), "import start_coverage"]
    (packages / "copy.pth").write_text("\n".join(lines) + "\n")
    for script in sorted((Path(sys.prefix) / "bin").iterdir()):
        there = path / ".venv" / "bin" / script.name
        if there.exists() or not script.is_file():
            continue
        body = script.read_bytes()
        if body.startswith(b"#!") and b"python" in body.split(b"\n")[0]:
            there.write_bytes(f"#!{path}/.venv/bin/python\n".encode() + body.split(b"\n", 1)[1])
            there.chmod(0o755)
        else:
            there.symlink_to(script)


def end_group(process: subprocess.Popen[bytes], copy: Copy) -> None:
    """Ends a test process and the processes that it started."""
    process.kill()
    copy.end_processes()
    process.wait()


def now() -> str:
    """The time of day, for messages about progress."""
    return time.strftime("%H:%M:%S")
