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


def render(name: str, own: Path | None = None, **values: Any) -> str:
    """The template `name` (a path below this folder) filled in. own: a folder whose file of that name is taken instead.

    Raises jinja2.TemplateError, as for a missing value.
    """
    return _environment(own).get_template(name).render(**values)


def digest(name: str, own: Path | None = None) -> str:
    """The SHA-256 of a template's text, so that a run can say what it was rendered from."""
    mine = own / name if own is not None else None
    return hashlib.sha256((mine if mine is not None and mine.exists() else FOLDER / name).read_bytes()).hexdigest()


@functools.cache
def _environment(own: Path | None) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*([own] if own is not None else []), FOLDER]),
        undefined=jinja2.StrictUndefined,
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,  # all of what one command renders is of the same text
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.filters["comment"] = _comment
    return environment


def _comment(value: Any) -> str:
    """A value fit for a line of comment: one line, printable."""
    text = str(value)
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
