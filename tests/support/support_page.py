"""Follows a page of docs/ as a reader does: writes the files that the page shows into a workspace, then runs its commands."""

import re
import shlex
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def files_of(name):
    """The text of each file on a page of docs/, by its path in the workspace."""
    return {path: text for _, path, text in _blocks(name) if path}


def follow(bench, name):
    """Write the files of a page into the workspace and run its commands in order. Returns the output of each command line."""
    printed = {}
    for kind, path, text in _blocks(name):
        if kind == "sh":
            printed |= {line: bench.run(*shlex.split(line), cwd=bench.path).stdout for line in text.splitlines()}
        elif path:
            (bench.path / path).parent.mkdir(exist_ok=True)
            (bench.path / path).write_text(text)
    return printed


def _blocks(name):
    page = (DOCS / name).read_text()
    return re.findall(r"^```(\w+)(?: title=\"(.*?)\")?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
