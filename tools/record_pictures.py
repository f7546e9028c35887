"""Makes the pictures of docs/images from real runs on this machine. Usage: python tools/record_pictures.py [DIR]

DIR keeps three workspaces: the matrix of README.md, quickstart, and a rehearsal of study 1. If a workspace has no report yet,
its runs are trained first, which takes up to an hour. If all have reports, only the pictures are made. `make pictures` calls
this program.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import support_browser
from PIL import Image
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
IMAGES = ROOT / "docs" / "images"
PROGRAMS = Path(sys.executable).parent
MOST_BYTES = 200_000
COLOURS = 128  # in the palette of a page's picture; a page has few, and the file is a third as large
# Maps the name of a workspace to the options of `jobs submit` that make its runs.
WORKSPACES = {
    "mine": ["--matrix", "./mine.yaml"],
    "quickstart": ["--matrix", "quickstart"],
    "paper1": ["--matrix", "paper1", "--scale", "tiny"],
}
# Maps the name of a picture of a report to (workspace, CSS selector of the part of the page, greatest height in px).
PAGES = {
    "report": ("mine", "body", 1060),
    "verdicts": ("paper1", "#verdicts", 900),
    "study-tables": ("paper1", "#reported", 650),
}
OPENED = "30% less memory"  # words of a claim; the picture shows the line of this claim expanded
ABOVE = {"verdicts": 96}  # px above the part of the page that the picture includes; 24 if not listed
# Maps the name of a picture of a terminal to (columns, command).
TERMINALS = {
    "plan": (142, "jobs plan --matrix quickstart"),
    "status": (108, "jobs status --where \"workload == 'gpt2-tiny'\""),
}
LIGHT = TerminalTheme(
    (255, 255, 255),
    (36, 41, 47),
    [(36, 41, 47), (179, 38, 30), (26, 112, 52), (138, 92, 0), (9, 84, 166), (120, 60, 150), (13, 110, 120), (100, 108, 118)],
)
# The template of a terminal's picture: it loads no font from the web and uses the reader's own monospaced font.
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font: 18px system-ui, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#ffffff" stroke="#d0d7de" stroke-width="2"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">
{matrix}</g>
</g>
</svg>
"""


def make(workspace: Path, options: list[str]) -> None:
    """Train the runs of a workspace and write its report, unless it has one."""
    if (workspace / "report" / "index.html").exists():
        return
    place = ["--workspace", str(workspace)]
    workspace.mkdir(parents=True, exist_ok=True)
    if "./mine.yaml" in options:
        (matrix,) = re.findall(r"^```yaml\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
        (workspace / "mine.yaml").write_text(matrix)
    for words in (
        ["provision", str(ROOT / "examples/local.yaml")],
        ["jobs", "submit", *options, "--wait"],
        ["collect", "fetch"],
        ["collect", "summarize"],
    ):  # a run may fail
        subprocess.run([PROGRAMS / words[0], *words[1:], *place], cwd=workspace, check=words[0] == "collect")


def pages(folder: Path) -> None:
    """The pictures of reports, light and dark, at the width of a small laptop."""
    with support_browser.browser() as started:
        for name, (workspace, what, most) in PAGES.items():
            report = (folder / workspace / "report" / "index.html").absolute()
            for scheme, ending in (("light", ""), ("dark", "-dark")):
                with support_browser.opened(started, report, color_scheme=scheme) as found:
                    if what == "#verdicts":
                        found.page.get_by_text(OPENED).first.click()
                        found.found("() => scrollTo(0, 0)")
                    found.page.evaluate("(id) => { location.hash = id; }", what)  # unfolds the part of the report that has it
                    found.found("() => scrollTo(0, 0)")
                    box = found.page.locator(what).bounding_box()
                    assert box is not None, f"{report} has no {what}"
                    top = max(box["y"] - ABOVE.get(name, 24), 0)
                    clip = {"x": 0, "y": top, "width": support_browser.WIDTH, "height": min(box["height"] + 2 * 24, most)}
                    path = IMAGES / f"{name}{ending}.png"
                    found.page.screenshot(path=path, clip=clip, full_page=True)
                    Image.open(path).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
                    assert path.stat().st_size < MOST_BYTES, f"{path}: {path.stat().st_size} bytes"


def terminals(folder: Path) -> None:
    """The pictures of commands, as a terminal shows them."""
    for name, (columns, command) in TERMINALS.items():
        words = shlex.split(command)
        said = on_terminal([str(PROGRAMS / words[0]), *words[1:], "--workspace", str(folder / "quickstart")], columns)
        typed = Text(f"$ {command}\n", style="bold")
        lines = said.replace("\r", "").rstrip("\n").split("\n")
        console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
        console.print(typed, end="")
        console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
        path = IMAGES / f"{name}.svg"
        path.write_text(console.export_svg(theme=LIGHT, code_format=SVG, unique_id=name))
        assert path.stat().st_size < MOST_BYTES, f"{path}: {path.stat().st_size} bytes"


def on_terminal(words: list[str], columns: int) -> str:
    """What a command writes to a terminal of this width, with its escape sequences."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "LINES": "60", "TERM": "xterm-256color", "TZ": "UTC"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux raises this after the program ended
            break
        said += part
    process.wait()
    os.close(ours)
    return said.decode()


if __name__ == "__main__":
    made = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".pictures").absolute()
    for name, options in WORKSPACES.items():
        make(made / name, options)
    terminals(made)
    pages(made)
