"""SVG: the report's figures as drawings that keep their lines at any size, one file each."""

from __future__ import annotations

from collect.report import pictures

EXPORT = pictures.export("svg", "every figure of the report, as a vector image")
