"""PNG: the report's figures as pictures, two pixels for each of the page, one file each."""

from __future__ import annotations

from collect.report import pictures

EXPORT = pictures.export("png", "every figure of the report, as an image in pixels")
