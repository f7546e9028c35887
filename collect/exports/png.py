"""Exports each figure of the report as a PNG image, with twice the resolution that the figure has on the page."""

from __future__ import annotations

from collect.report import pictures

EXPORT = pictures.make_picture_export("png", "every figure of the report, as an image in pixels")
