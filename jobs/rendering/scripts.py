"""Renders the scripts of jobs from templates. A template of the workspace replaces the shipped template of the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import templates
from shardlab.errors import InputError


def render_template(template_name: str, own_templates: Path | None, **values: Any) -> str:
    """The text of a template with its values filled in.

    template_name: the name of the template. own_templates: the workspace's folder of templates. values: the values, by name.
    Raises InputError if the workspace's own template is faulty."""
    try:
        return templates.render(template_name, own_templates, **values)
    except templates.TemplateFault as fault:
        raise InputError(f"{fault} Correct the file, or remove it to use the shipped template.") from None
