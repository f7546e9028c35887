"""Opens a report in headless Chromium, and looks for faults that a browser, a keyboard or a screen reader meets."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Request, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needed = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: the report is not opened in a browser")
CLOSING_S = 60  # far more than closing a browser takes on a busy machine
WIDTH, HEIGHT, PHONE = 1280, 900, 390
PATIENCE_MS = 300_000  # time limit for opening a page; long, because a report of a whole study may load on a busy machine


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start headless Chromium. It is closed at the end of the block.

    Once, Chromium had ended and playwright waited for its answer forever. So the driver of playwright, a child process of this
    process, is killed after CLOSING_S; then nothing waits for it.
    """
    others = {child.pid for child in psutil.Process().children()}
    with sync_playwright() as playwright:
        drivers = [child for child in psutil.Process().children() if child.pid not in others]
        started = playwright.chromium.launch(executable_path=CHROMIUM)
        yield started
        killers = [threading.Timer(CLOSING_S, _kill, [driver]) for driver in drivers]
        for killer in killers:
            killer.start()
        started.close()
    for killer in killers:
        killer.cancel()


def _kill(driver: psutil.Process) -> None:
    for process in (*driver.children(recursive=True), driver):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class Opened:
    """An open page, every address that the page requested (`asked`), and every message of its console (`complaints`)."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page, self.asked, self.complaints = page, [], []
        page.on("request", self._note)
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_function(DRAWN)

    def _note(self, request: Request) -> None:
        if not request.url.startswith("blob:"):  # a file that the page itself made, which the user saves
            self.asked.append(request.url)

    def leave(self) -> None:
        """Take the focus from the page, so that the Tab key begins at its top, whatever a test did on the page before."""
        self.found("""() => {
          document.querySelectorAll('[data-reached]').forEach((one) => delete one.dataset.reached);
          document.body.tabIndex = -1;
          document.body.focus();
          document.body.removeAttribute('tabindex');
        }""")

    def fold(self, folded: bool) -> None:
        self.page.evaluate("(open) => document.querySelectorAll('details').forEach((one) => { one.open = open; })", not folded)
        self.page.wait_for_function(DRAWN)  # a figure is drawn when a reader unfolds it

    def fold_inside(self) -> None:
        """Unfold the parts of a report, and fold all that can be folded inside them."""
        self.fold(True)
        self.page.evaluate("() => document.querySelectorAll('.part').forEach((one) => { one.open = true; })")
        self.page.wait_for_function(DRAWN)

    def found(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)


@contextlib.contextmanager
def opened(started: Browser, path: Path, width: int = WIDTH, **options: Any) -> Iterator[Opened]:
    """Open a report in a new page.

    width: the width of the window in pixels. options: options of the browser context, such as color_scheme.
    """
    context = started.new_context(viewport={"width": width, "height": HEIGHT}, **options)
    context.set_default_timeout(PATIENCE_MS)
    try:
        yield Opened(context.new_page(), path)
    finally:
        context.close()


def find_serious_violations(page: Page) -> list[str]:
    """What axe-core finds on a page that is serious or critical: the name of each rule, and the elements that break it."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{violation['id']}: {[node['html'][:120] for node in violation['nodes'][:3]]}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
    ]


def check(report: Path) -> None:
    """Check that a report loads no other file, prints nothing to the console, draws every figure, and is not too wide."""
    with browser() as started, opened(started, report) as found:
        assert found.asked == [report.as_uri()]
        assert found.complaints == [], found.complaints
        found.fold(False)
        assert found.found(UNDRAWN) == []
        assert found.found(OVERFLOW) <= WIDTH


# JavaScript: whether every figure is drawn that is not folded away.
DRAWN = """() => [...document.querySelectorAll('.plot')].every((plot) =>
  plot.closest('details:not([open])') || plot.querySelector('svg.main-svg'))"""

# JavaScript: the titles of the figures in which nothing is drawn.
UNDRAWN = """() => [...document.querySelectorAll('figure')].filter((figure) =>
  ![...figure.querySelectorAll('.plot svg.main-svg :is(.trace, .cartesianlayer .plot) :is(path, text)')]
    .some((mark) => mark.tagName === 'text' ? mark.textContent : mark.getAttribute('d')?.length > 6))
  .map((figure) => figure.querySelector('h3').textContent)"""

OVERFLOW = "() => document.documentElement.scrollWidth"

# JavaScript: lists every text whose contrast with its background is below 4.5, as WCAG 2.2 (1.4.3) defines contrast. Example
# of an entry in the list: `3.9 to 1: text`.
FAINT = """() => {
  const parts = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  function ground(node) {
    for (; node; node = node.parentElement) {
      const found = parts(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
  }
  const faint = [];
  for (const node of document.querySelectorAll('body *')) {
    const text = [...node.childNodes].filter((child) => child.nodeType === 3).map((child) => child.textContent.trim()).join('');
    if (!text || !node.checkVisibility() || node.closest('script, style, .legend')) continue;
    const style = getComputedStyle(node);
    const lights = [light(parts(node.closest('svg') ? style.fill : style.color)), light(ground(node))].sort((a, b) => b - a);
    const ratio = (lights[0] + .05) / (lights[1] + .05);
    if (ratio < 4.5) faint.push(`${ratio.toFixed(1)} to 1: ${text}`);
  }
  return faint;
}"""
