"""Follows a page of docs/contributing as a contributor does, in a copy of the repository."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from support_e2e import HANG_S
from support_page import DOCS, files_of

ROOT = DOCS.parent
PAGES = sorted(path.stem for path in (DOCS / "contributing").glob("*.md") if path.stem != "index")
COPIED = ("collect", "docs", "examples", "jobs", "matrices", "provision", "shardlab", "templates", "tests", "trainers")
BLOCK = re.compile(r"^```(\w+)(?: title=\"(.*?)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOVED = re.compile(r"^\| `(\S+)` \| `(\S+)` \|$", re.MULTILINE)


def text_of(name: str) -> str:
    """The text of a page of docs/contributing."""
    return (DOCS / "contributing" / f"{name}.md").read_text()


def copied(folder: Path) -> Path:
    """Copy the repository, without its virtual environment, into a folder."""
    for part in COPIED:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.png", "*.svg"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def change(name: str, folder: Path) -> None:
    """Make the changes that a page describes in a copy of the repository.

    A block whose title is a path is a new file, or a diff of an existing file. Each row of a table `file of that page |
    becomes` names a file of docs/own-strategies.md and the path to which its text is copied.
    """
    page = text_of(name)
    for source, target in MOVED.findall(page):
        (folder / target).write_text(files_of("own-strategies.md")[source])
    for kind, path, text in BLOCK.findall(page):
        if kind == "diff":
            (folder / path).write_text(applied((folder / path).read_text(), text, path))
        elif path:
            assert not (folder / path).exists(), f"{path} exists"
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)


def shown(name: str) -> list[str]:
    """The lines that a page shows as output of its commands."""
    return [line for kind, path, text in BLOCK.findall(text_of(name)) if kind == "text" for line in text.splitlines()]


def applied(content: str, diff: str, path: str) -> str:
    """The content of a file after applying a diff without line numbers. The lines of the diff must fit at one place only."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    count = content.count(before)
    assert count == 1, f"{path} has this text {count} times:\n{before}"
    return content.replace(before, after)


def run(line: str | list[str], folder: Path) -> str:
    """Run a command in a copy of the repository. Returns what it printed on standard output."""
    words, programs = shlex.split(line) if isinstance(line, str) else line, Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "SHARDLAB_WORKSPACE": str(folder / "workspace"),
    }
    done = subprocess.run(
        [programs / words[0], *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}: exit {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout
