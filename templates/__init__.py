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

TEMPLATES_FOLDER = Path(__file__).parent
_PLAIN_TYPES = (str, int, float, bool, list, tuple, dict, set, frozenset, type(None))

_CODE_PATTERN = re.compile(r"`([^`\n]+)`")  # a command or a name in a sentence

_TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip  # the exceptions that jinja2 raises for a faulty template


class TemplateFault(Exception):
    """A template of a workspace cannot be rendered. The message names the file and line of the template and the reason."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, made stricter: a template may call only functions of jinja2 and methods of plain values.

    jinja2's own sandbox would allow every public method of a value that is passed to a template, such as `write_text` of a
    path.
    """

    def is_safe_callable(self, called_object: Any) -> bool:
        # jinja2 wraps str.format; `__wrapped__` is the real method
        method_owner = getattr(getattr(called_object, "__wrapped__", called_object), "__self__", called_object)
        is_jinja_function = type(method_owner).__module__.startswith("jinja2.") or any(
            called_object is jinja_global for jinja_global in self.globals.values()
        )
        return super().is_safe_callable(called_object) and (is_jinja_function or isinstance(method_owner, _PLAIN_TYPES))


def render(template_name: str, user_folder: Path | None = None, **template_values: Any) -> str:
    """Render the template of a script or configuration file.

    template_name: the path of the template below the folder templates. user_folder: a folder with templates of the user; a
    template with the same name in it is used instead of ours. template_values: the values of the names in the template. Raises
    TemplateFault if the user's template cannot be rendered; an error in our template keeps its own exception."""
    try:
        return _script_environment(user_folder).get_template(template_name).render(**template_values)
    except _TEMPLATE_ERRORS as error:
        if user_folder is None or not (user_folder / template_name).exists():
            raise
        raise TemplateFault(
            f"{_error_location(error, user_folder, user_folder / template_name)}: the template cannot be rendered: "
            f"{_error_reason(error)}."
        ) from error


def render_page(template_name: str, clean_text: Callable[[str], str], **template_values: Any) -> str:
    """Render the template of a page. Every text in the values is cleaned by `clean_text` and escaped.

    The template is always ours, never the user's: pages are rendered without a sandbox, because we pass functions to them.
    Raises jinja2.TemplateError.
    """
    return _page_environment(clean_text).get_template(template_name).render(**template_values)


def list_template_names(name: str, user_folder: Path | None = None) -> list[str]:
    """The names of the template `name` and of all templates that it includes, imports or extends, directly or indirectly.

    A template is found only if another template names it as a text in quotes. Missing templates are left out. A template with a
    syntax error is listed, but the templates that it names are not; `render` reports both errors. user_folder: as in `render`.
    """
    environment, template_names, names_left = _script_environment(user_folder), list[str](), [name]
    while names_left:
        template_name = names_left.pop(0)
        try:
            source = environment.loader.get_source(environment, template_name)[0] if environment.loader is not None else ""
        except (jinja2.TemplateNotFound, OSError):
            continue
        except UnicodeDecodeError:
            template_names.append(template_name)
            continue
        template_names.append(template_name)
        with contextlib.suppress(jinja2.TemplateSyntaxError):
            referenced_names = meta.find_referenced_templates(environment.parse(source))
            names_left += [
                other for other in referenced_names if other is not None and other not in (*template_names, *names_left)
            ]
    return template_names


def template_digest(template_name: str, user_folder: Path | None = None) -> str:
    """The SHA-256 of the file of a template, which run.json records. user_folder: as in `render`."""
    user_file = user_folder / template_name if user_folder is not None else None
    return hashlib.sha256(
        (user_file if user_file is not None and user_file.is_file() else TEMPLATES_FOLDER / template_name).read_bytes()
    ).hexdigest()


@functools.cache
def _script_environment(user_folder: Path | None) -> jinja2.Environment:
    loader = jinja2.FileSystemLoader([*([user_folder] if user_folder is not None else []), TEMPLATES_FOLDER])
    environment = _Sandbox(loader=loader, autoescape=False, **_COMMON_OPTIONS)
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.filters["comment"] = _comment_text
    environment.filters["option"] = _check_sbatch_option
    environment.filters["yaml"] = lambda value: json.dumps(str(value))  # a JSON string is also a YAML string
    return environment


@functools.cache
def _page_environment(clean_text: Callable[[str], str]) -> jinja2.Environment:
    def finalize(value: Any) -> Any:
        return clean_text(value) if type(value) is str else value  # Markup, a subclass of str, is already escaped

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES_FOLDER),
        # the pages' CSS and JavaScript insert no text of records, so they are not escaped
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        finalize=finalize,
        **_COMMON_OPTIONS,
    )
    environment.filters["with_code"] = lambda text: _mark_code(clean_text(text))
    return environment


_COMMON_OPTIONS: dict[str, Any] = {
    "undefined": jinja2.StrictUndefined,
    "trim_blocks": True,
    "lstrip_blocks": True,
    "keep_trailing_newline": True,
    "auto_reload": False,  # a template is read once, so that one command renders all scripts from the same version of it
}


def _error_location(error: BaseException, user_folder: Path, template_path: Path) -> str:
    """The place of an error as FILE:LINE, or as FILE if the line is not known.

    FILE is the template `template_path`, or a template in the folder `user_folder` that this template includes.
    """
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.filename or template_path}:{error.lineno}"
    for stack_frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(stack_frame.filename).is_relative_to(user_folder):
            return f"{stack_frame.filename}:{stack_frame.lineno}"
    return str(template_path)


def _error_reason(error: BaseException) -> str:
    if isinstance(error, jinja2.exceptions.SecurityError):
        return f"{str(error).rstrip('.')}; a template may only use the values that it is given; it cannot call Python"
    return str(error).rstrip(".") or type(error).__name__


def _comment_text(any_value: Any) -> str:
    """A value as text for a comment line: every character that is not printable, such as a line break, becomes "?"."""
    value_text = str(any_value)
    return value_text if value_text.isprintable() else "".join(char if char.isprintable() else "?" for char in value_text)


def _check_sbatch_option(option_value: Any) -> str:
    """An option of sbatch, for a line that begins with #SBATCH. Raises TemplateFault if the option is not one printable line: a
    second line would be a command of the script."""
    option_text = str(option_value)
    if not option_text or not option_text.replace("\t", " ").isprintable():
        raise TemplateFault(f"an option of sbatch must be one line of printable characters, found {option_text[:80]!r}.")
    return option_text


def _mark_code(text: str) -> Markup:
    """The text as HTML, in which each part between two backticks is shown as code."""
    return Markup(_CODE_PATTERN.sub(r"<code>\1</code>", str(escape(text))))
