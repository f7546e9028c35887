"""Renders the templates (jinja2) of scripts, configuration files and pages of the report, which are in this folder.

If a template uses a name that has no value, rendering fails; the name never becomes an empty string. Templates of scripts pass
every value through the filter ``quote``, or ``option`` in a line #SBATCH; in pages, every value is cleaned and escaped. A
workspace may contain its own templates of scripts, which another person may have written. Scripts are therefore rendered in
jinja2's sandbox, in which a template cannot execute Python code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import shlex
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup, escape

FOLDER = Path(__file__).parent
_PLAIN = (str, int, float, bool, list, tuple, dict, set, frozenset, type(None))

_CODE = re.compile(r"`([^`\n]+)`")  # a command or a name in a sentence

_FAULTS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip  # the exceptions that jinja2 raises for a faulty template


class TemplateFault(Exception):
    """A template of a workspace cannot be rendered. The message names the file and line of the template and the reason."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, made stricter: a template may call only functions of jinja2 and methods of plain values.

    jinja2's own sandbox would allow every public method of a value that is passed to a template, such as `write_text` of a
    path.
    """

    def is_safe_callable(self, obj: Any) -> bool:
        # jinja2 wraps str.format; `__wrapped__` is the real method
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", obj)
        of_jinja = type(owner).__module__.startswith("jinja2.") or any(obj is known for known in self.globals.values())
        return super().is_safe_callable(obj) and (of_jinja or isinstance(owner, _PLAIN))


def render(name: str, own: Path | None = None, **values: Any) -> str:
    """Render the template of a script or configuration file.

    name: the path of the template below the folder templates. own: a folder with templates of the user; a template with the
    same name in it is used instead of ours. values: the values of the names in the template.
    Raises TemplateFault if the user's template cannot be rendered; an error in our template keeps its own exception.
    """
    try:
        return _scripts(own).get_template(name).render(**values)
    except _FAULTS as error:
        if own is None or not (own / name).exists():
            raise
        raise TemplateFault(f"{_place(error, own, own / name)}: the template cannot be rendered: {_why(error)}.") from error


def render_page(name: str, clean: Callable[[str], str], **values: Any) -> str:
    """Render the template of a page. Every text in the values is cleaned by `clean` and escaped.

    The template is always ours, never the user's: pages are rendered without a sandbox, because we pass functions to them.
    Raises jinja2.TemplateError.
    """
    return _pages(clean).get_template(name).render(**values)


def parts(name: str, own: Path | None = None) -> list[str]:
    """The names of the template `name` and of all templates that it includes, imports or extends, directly or indirectly.

    A template is found only if another template names it as a text in quotes. Missing templates are left out. A template with a
    syntax error is listed, but the templates that it names are not; `render` reports both errors. own: as in `render`.
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
    """The SHA-256 of the file of a template, which run.json records. own: as in `render`."""
    mine = own / name if own is not None else None
    return hashlib.sha256((mine if mine is not None and mine.is_file() else FOLDER / name).read_bytes()).hexdigest()


@functools.cache
def _scripts(own: Path | None) -> jinja2.Environment:
    loader = jinja2.FileSystemLoader([*([own] if own is not None else []), FOLDER])
    environment = _Sandbox(loader=loader, autoescape=False, **_COMMON)
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.filters["comment"] = _comment
    environment.filters["option"] = _option
    environment.filters["yaml"] = lambda value: json.dumps(str(value))  # a JSON string is also a YAML string
    return environment


@functools.cache
def _pages(clean: Callable[[str], str]) -> jinja2.Environment:
    def finalize(value: Any) -> Any:
        return clean(value) if type(value) is str else value  # Markup, a subclass of str, is already escaped

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        # the pages' CSS and JavaScript insert no text of records, so they are not escaped
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        finalize=finalize,
        **_COMMON,
    )
    environment.filters["with_code"] = lambda text: _with_code(clean(text))
    return environment


_COMMON: dict[str, Any] = {
    "undefined": jinja2.StrictUndefined,
    "trim_blocks": True,
    "lstrip_blocks": True,
    "keep_trailing_newline": True,
    "auto_reload": False,  # a template is read once, so that one command renders all scripts from the same version of it
}


def _place(error: BaseException, own: Path, file: Path) -> str:
    """The place of an error as FILE:LINE, or as FILE if the line is not known.

    FILE is the template `file`, or a template in the folder `own` that this template includes.
    """
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
    """A value as text for a comment line: every character that is not printable, such as a line break, becomes "?"."""
    text = str(value)
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def _option(value: Any) -> str:
    """An option of sbatch, for a line that begins with #SBATCH. Raises TemplateFault if the option is not one printable line: a
    second line would be a command of the script."""
    text = str(value)
    if not text or not text.replace("\t", " ").isprintable():
        raise TemplateFault(f"an option of sbatch must be one line of printable characters, found {text[:80]!r}.")
    return text


def _with_code(text: str) -> Markup:
    """The text as HTML, in which each part between two backticks is shown as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))
