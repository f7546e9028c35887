"""Exports each figure of the report as an SVG vector image, which stays sharp at any size."""

from __future__ import annotations

from collect.report import pictures

EXPORT = pictures.make_picture_export("svg", "every figure of the report, as a vector image")
