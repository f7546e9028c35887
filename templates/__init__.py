"""The templates of scripts, configuration files and pages, and the functions that render them.

A missing name is an error, never an empty string. In scripts every value goes through ``quote``; in pages every value is
cleaned and escaped. A workspace may hold its own templates, which somebody else may have written: scripts are rendered in
jinja2's sandbox, so that rendering runs no Python of a template.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import shlex
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

FOLDER = Path(__file__).parent
_PLAIN = (str, int, float, bool, list, tuple, dict, set, frozenset, type(None))

_FAULTS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip  # what a faulty template makes jinja2 raise


class TemplateFault(Exception):
    """A template of a workspace cannot be rendered. The message names its file, its line and the reason."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, in which a template may call only methods of plain values, and what jinja2 itself offers.

    jinja2 alone would allow every public method of a value that we pass in, such as the `write_text` of a path.
    """

    def is_safe_callable(self, obj: Any) -> bool:
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", obj)  # jinja2 wraps str.format
        of_jinja = type(owner).__module__.startswith("jinja2.") or any(obj is known for known in self.globals.values())
        return super().is_safe_callable(obj) and (of_jinja or isinstance(owner, _PLAIN))


def render(name: str, own: Path | None = None, **values: Any) -> str:
    """The script or configuration file `name` (a path below this folder) filled in.

    own: a folder whose file of that name is used instead. Raises TemplateFault if that file cannot be rendered; a fault in a
    shipped template keeps its own exception.
    """
    try:
        return _scripts(own).get_template(name).render(**values)
    except _FAULTS as error:
        if own is None or not (own / name).exists():
            raise
        raise TemplateFault(f"{_place(error, own, own / name)}: the template cannot be rendered: {_why(error)}.") from error


def render_page(name: str, clean: Callable[[str], str], **values: Any) -> str:
    """The page `name` filled in: every text among the values goes through `clean` and is escaped. It is one of ours, as only we
    pass functions to it. Raises jinja2.TemplateError."""
    return _pages(clean).get_template(name).render(**values)


def parts(name: str, own: Path | None = None) -> list[str]:
    """The template `name` and every template that it includes, imports or extends by a name in quotes, directly or not.

    A template that is missing or that jinja2 cannot parse has no parts: `render` says what is wrong with it.
    """
    environment, found, left = _scripts(own), list[str](), [name]
    while left:
        one = left.pop(0)
        try:
            source = environment.loader.get_source(environment, one)[0] if environment.loader is not None else ""
        except (jinja2.TemplateNotFound, OSError):
            continue
        except UnicodeDecodeError:
            found.append(one)
            continue
        found.append(one)
        with contextlib.suppress(jinja2.TemplateSyntaxError):
            names = meta.find_referenced_templates(environment.parse(source))
            left += [other for other in names if other is not None and other not in (*found, *left)]
    return found


def digest(name: str, own: Path | None = None) -> str:
    """The SHA-256 of a template's text, so that a run can say what it was rendered from."""
    mine = own / name if own is not None else None
    return hashlib.sha256((mine if mine is not None and mine.exists() else FOLDER / name).read_bytes()).hexdigest()


@functools.cache
def _scripts(own: Path | None) -> jinja2.Environment:
    loader = jinja2.FileSystemLoader([*([own] if own is not None else []), FOLDER])
    environment = _Sandbox(loader=loader, autoescape=False, **_COMMON)
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.filters["comment"] = _comment
    environment.filters["yaml"] = lambda value: json.dumps(str(value))  # a text in JSON is a text in YAML
    return environment


@functools.cache
def _pages(clean: Callable[[str], str]) -> jinja2.Environment:
    def finalize(value: Any) -> Any:
        return clean(value) if type(value) is str else value  # Markup is a subclass: it holds what was escaped before

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),  # the parts in CSS and JavaScript hold no text
        finalize=finalize,
        **_COMMON,
    )


_COMMON: dict[str, Any] = {
    "undefined": jinja2.StrictUndefined,
    "trim_blocks": True,
    "lstrip_blocks": True,
    "keep_trailing_newline": True,
    "auto_reload": False,  # one command renders all scripts from the same text
}


def _place(error: BaseException, own: Path, file: Path) -> str:
    """FILE:LINE of the template, or of another one in `own` that it includes; FILE alone if nothing says the line."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.filename or file}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(own):
            return f"{frame.filename}:{frame.lineno}"
    return str(file)


def _why(error: BaseException) -> str:
    if isinstance(error, jinja2.exceptions.SecurityError):
        return f"{str(error).rstrip('.')}; a template may only use the values that it is given; it cannot call Python"
    return str(error).rstrip(".") or type(error).__name__


def _comment(value: Any) -> str:
    """A value fit for a line of comment: one line, printable."""
    text = str(value)
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
