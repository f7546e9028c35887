"""Scripts of jobs, rendered from the shipped templates or from those of the workspace, which stand before them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import templates
from shardlab.errors import InputError


def render(template: str, own: Path | None, **values: Any) -> str:
    """The template filled in. own: the workspace's folder of templates. Raises InputError if the workspace's is faulty."""
    try:
        return templates.render(template, own, **values)
    except templates.TemplateFault as fault:
        raise InputError(f"{fault} Correct the file, or remove it to use the shipped template.") from None
