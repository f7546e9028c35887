"""Writes the pictures of docs/images from reports of real runs. Usage: python tests/record_pictures.py DIR

DIR has three workspaces whose reports are written: quickstart (`make quickstart WORKSPACE=DIR/quickstart`), paper1 and paper3
(`jobs submit --matrix paper3 --scale tiny --wait --workspace DIR/paper3 && collect summarize --workspace DIR/paper3`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import support_browser

IMAGES = Path(__file__).parent.parent / "docs" / "images"
MOST_BYTES = 300_000
# Maps the name of a picture to (workspace, CSS selector of the part of the report, greatest height in px).
PICTURES = {
    "report": ("quickstart", "body", 1640),
    "verdicts": ("paper1", "#verdicts", 900),
    "study-tables": ("paper3", "#reported", 690),
}


def record(folder: Path) -> None:
    with support_browser.browser() as started:
        for name, (workspace, what, most) in PICTURES.items():
            report = (folder / workspace / "report" / "index.html").absolute()
            with support_browser.opened(started, report) as found:
                if what == "#verdicts":
                    found.page.get_by_text("30% less memory").first.click()
                    found.found("() => scrollTo(0, 0)")
                box = found.page.locator(what).bounding_box()
                assert box is not None
                clip = {
                    "x": 0,
                    "y": max(box["y"] - 24, 0),
                    "width": support_browser.WIDTH,
                    "height": min(box["height"] + 48, most),
                }
                path = IMAGES / f"{name}.png"
                found.page.screenshot(path=path, clip=clip, full_page=True)
                assert path.stat().st_size < MOST_BYTES, f"{path}: {path.stat().st_size} bytes"


if __name__ == "__main__":
    record(Path(sys.argv[1]))
