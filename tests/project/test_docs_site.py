"""The documentation: the site is built without errors, its links have targets, and it loads no file from the web."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import record_pictures
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# Maps the words of a question to the how-to that a search for these words must find first.
FOUND_BY = {
    "out of memory": "out-of-memory",
    "has a run failed": "understand-a-failed-run",
    "resume a run": "continue-from-a-checkpoint",
}


class Addresses(HTMLParser):
    """The addresses in an HTML page: the files that it loads, the targets of its links, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.anchors |= {named[key] for key in ("id", "name") if named.get(key)}
        if tag in ("script", "img", "iframe", "source") and named.get("src"):
            self.loaded.append(named["src"])
        if tag == "link" and named.get("href") and named.get("rel") != "canonical":
            self.loaded.append(named["href"])
        if tag == "a" and named.get("href"):
            self.linked.append(named["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Builds the site of the documentation. Maps the path of each page to the addresses in the page."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    program = Path(sys.executable).parent / "zensical"
    built = subprocess.run(
        [program, "build", "--strict", "--config-file", "mkdocs.yml"], cwd=folder, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {}
    for path in (folder / "site").rglob("*.html"):
        pages[path] = Addresses()
        pages[path].feed(path.read_text())
    assert {path.stem for path in pages} > {"index", "tutorial-laptop", "same-work"}
    return pages


def test_links_lead_to_pages_and_headings(site):
    dead = []
    for page, found in site.items():
        for address in [*found.linked, *found.loaded]:
            parts = urlsplit(address)
            if parts.scheme in ("http", "https", "mailto") or page.name == "404.html":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchors = site[target].anchors if target in site else None
            if not target.exists() or (parts.fragment and anchors is not None and unquote(parts.fragment) not in anchors):
                dead.append(f"{page.name}: {address}")
    assert dead == []


def test_pages_load_nothing_from_the_web(site):
    loaded = {
        f"{page.name}: {one}"
        for page, found in site.items()
        for one in found.loaded
        if urlsplit(one).scheme or one.startswith("//")
    }
    assert loaded == set()


def test_the_search_finds_how_tos_and_no_lists_of_json_keys(site):
    """A title counts three times as much as a text, so the how-to whose title has all words of a question comes first."""
    root = next(page.parent for page in site if page.name == "index.html" and page.parent.name == "site")
    entries = json.loads((root / "search.json").read_text())["items"]
    assert [entry["location"] for entry in entries if entry["location"].startswith("reference/json-")] == []
    for question, page in FOUND_BY.items():
        titled = {entry["location"] for entry in entries if question in entry["title"].lower()}
        assert f"how-to/{page}.html" in titled, question
        assert len(titled) <= 2, question


def test_each_page_is_in_the_menu():
    menu = re.findall(r"[\w/-]+\.md", yaml.dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(menu) == [str(page.relative_to(DOCS)) for page in PAGES]


def test_the_menu_has_the_order_in_which_a_newcomer_reads():
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert [next(iter(part)) for part in menu] == ["Start", "Tutorials", "How-to", "Reference", "Explanation", "Contributing"]
    tutorials = [next(iter(page.values())) for page in menu[1]["Tutorials"]]
    assert tutorials[:2] == ["tutorial-laptop.md", "first-site.md"]
    assert tutorials[-2:] == ["own-models.md", "own-strategies.md"]


def test_each_page_has_one_title_and_each_guide_asks_one_question():
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        titles = re.findall(r"^# (.*)", text, re.MULTILINE)
        assert len(titles) == 1, page
        if page.parent.name in ("how-to", "contributing"):
            assert titles[0].endswith("?"), page


def test_the_readme_has_at_most_100_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_pictures_are_those_of_the_script_small_and_complete_in_themselves():
    images = {path.name: path for path in (DOCS / "images").iterdir()}
    pages = {f"{name}{scheme}.png" for name in record_pictures.PAGES for scheme in ("", "-dark")}
    assert set(images) == pages | {f"{name}.svg" for name in record_pictures.TERMINALS}
    assert max(path.stat().st_size for path in images.values()) < record_pictures.MOST_BYTES
    for path in images.values():
        if path.suffix == ".svg":
            assert set(re.findall(r"https?://[^\"' )]+", path.read_text())) == {"http://www.w3.org/2000/svg"}


def test_each_picture_is_on_a_page():
    texts = "".join(page.read_text() for page in PAGES)
    assert [path.name for path in (DOCS / "images").iterdir() if f"images/{path.name}" not in texts] == []


def test_lines_wrap_at_120_columns():
    """Lines of documentation have at most 120 columns. Only tables, output and generated pages may have longer lines."""
    long = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]:
        if page.name == "menus.md" or page.parent.name == "reference":
            continue
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        prose = [line for line in text.splitlines() if not line.startswith(("|", "    "))]
        long += [f"{page.name}: {line[:60]}" for line in prose if len(line) > 120]
    assert long == []
