"""Every text that a person may read before it runs, and the one way to fill it in.

A name that is missing is an error, never an empty string; in shell templates every value goes through ``quote``, in
pages every value is escaped.
"""

from __future__ import annotations

import functools
import hashlib
import shlex
from pathlib import Path
from typing import Any

import jinja2

FOLDER = Path(__file__).parent


def render(name: str, **values: Any) -> str:
    """The template `name` (a path below this folder) filled in. Raises jinja2.UndefinedError for a missing value."""
    return _environment().get_template(name).render(**values)


def digest(name: str) -> str:
    """The SHA-256 of a template's text, so that a run can say what it was rendered from."""
    return hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.filters["comment"] = _comment
    return environment


def _comment(value: Any) -> str:
    """A value fit for a line of comment: one line, printable."""
    return "".join(char if char.isprintable() else "?" for char in str(value))
