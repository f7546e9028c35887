"""The report in a real browser: what the page loads and draws, how it works with a keyboard and a screen reader, and what it
saves as a file."""

import contextlib
import itertools
import struct

import pytest
import support_browser
import support_collect as support
import support_report

from collect.cli import main
from shardlab.workspace.workspace import Workspace

pytestmark = support_browser.needed
FIGURES = 8
REACHABLE = "a[href], button, summary, input, select, [tabindex='0']"
FAST = "throughput_per_s(strategy='{}') > throughput_per_s(strategy='{}')"
STUDY = {
    "claims": [
        {"id": "c1", "says": "DDP is faster.", "where": "table 1", "test": FAST.format("ddp", "single")},
        {"id": "c2", "says": "FSDP is faster still.", "where": "section 2", "test": FAST.format("fsdp2", "ddp")},
    ],
    "reported": [
        {"where": "table 1", "metric": metric, "cell": {"strategy": strategy}, "printed": printed}
        for strategy, seconds, memory in (("single", "1.02 s", "315 MB"), ("ddp", "0.2 s", "12 GB"), ("fsdp2", "soon", "9 GB"))
        for metric, printed in (("train_time_s", seconds), ("peak_memory_bytes", memory))
    ]
    + [{"where": "section 2", "metric": "final_accuracy_pct", "cell": {"strategy": "ddp"}, "printed": "98 %"}],
    "assumed": [{"key": "precision", "value": "fp32", "why": "not stated"}],
    "notes": [{"where": "table 1", "says": "two figures of one thing"}],
}
FOCUSED = """(what) => {
  const one = document.activeElement;
  const { outlineStyle, outlineWidth } = getComputedStyle(one);
  const seen = 'reached' in one.dataset;
  one.dataset.reached = 'yes';
  return { reachable: one.matches(what), again: seen, outlined: outlineStyle !== 'none' && parseFloat(outlineWidth) >= 2 };
}"""
# LOST counts the links that the Tab key skips although no other link in their table row has the same target. DEAD counts the
# links whose target does not exist.
LOST = """() => [...document.querySelectorAll('a[tabindex="-1"]')].filter((link) =>
  !link.closest('tr').querySelector(`a[href="${link.getAttribute('href')}"]:not([tabindex])`)).length"""
DEAD = """() => [...document.querySelectorAll('a[href^="#"]')].filter((link) => !document.querySelector(link.hash)).length"""
# OUTSIDE lists the buttons that reach over the right edge of their table, so that the table scrolls although all is visible.
OUTSIDE = """() => [...document.querySelectorAll('.sort')].filter((button) =>
  button.getBoundingClientRect().right > button.closest('table').getBoundingClientRect().right + 1)
  .map((button) => button.ariaLabel)"""
# UNREACHABLE lists the areas that scroll sideways although neither they nor anything inside can have the focus, or that have
# the focus but no name.
UNREACHABLE = """() => [...document.querySelectorAll('main *, nav *')].filter((one) =>
  getComputedStyle(one).overflowX === 'auto' && one.scrollWidth > one.clientWidth && (one.tabIndex < 0
    ? !one.querySelector('a[href]:not([tabindex="-1"]), button') : !one.ariaLabel && !one.getAttribute('aria-labelledby')))
  .map((one) => one.outerHTML.slice(0, 90))"""


@pytest.fixture(scope="module")
def browser():
    with support_browser.browser() as started:
        yield started


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """A report in which runs ended in every possible way. Its cells use two strategies and two launchers."""
    workspace = support.matrix(tmp_path_factory.mktemp("it's <a> #1 matrix"))
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    return workspace.report / "index.html"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A report with the title, reported numbers and claims of a study. It compares three strategies, and no run is a
    rehearsal."""
    workspace = Workspace(tmp_path_factory.mktemp("study"))
    cells = [support.cell(), support.cell("ddp", 2), support.cell("fsdp2", 2)]
    support.keep(workspace, cells, **STUDY)
    for what, seconds in zip(cells, (1.0, 0.6, 0.7), strict=True):
        for repeat in (1, 2, 3):
            support.completed(workspace, what, repeat, rehearsal=False, found={"train_time_s": seconds + 0.01 * repeat})
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    return workspace.report / "index.html"


@pytest.fixture(params=["failing", "study"])
def report(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def show(browser):
    """Returns a function that opens a report in a color scheme. Opening is slow, so each page is opened once and the tests
    share it. Each test must leave the page as it found it."""
    with contextlib.ExitStack() as stack:
        known = {}

        def shown(report, scheme="light"):
            if (report, scheme) not in known:
                known[report, scheme] = stack.enter_context(support_browser.opened(browser, report, color_scheme=scheme))
            return known[report, scheme]

        yield shown


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_loads_only_itself_draws_every_figure_and_is_readable(show, report, scheme):
    """The report loads no other file, draws every figure, and has no text with too little contrast."""
    found = show(report, scheme)
    assert found.asked == [report.as_uri()]
    assert found.complaints == []
    assert found.page.locator(".plot").count() == FIGURES
    found.fold(False)
    assert found.found(support_browser.UNDRAWN) == []
    assert found.found(support_browser.FAINT) == []


def test_the_checks_of_the_report_notice_requests_missing_figures_and_faint_text(browser, study):
    """Shows that the checks of the test above can fail: they find a missing figure and faint text. It also shows that the
    page's security policy stops a script that requests an image from the network."""
    with support_browser.opened(browser, study) as found:
        found.found("() => { new Image().src = 'https://example.invalid/x.png'; }")
        found.fold(False)
        found.found("() => document.querySelector('.plot .cartesianlayer').remove()")
        assert found.found(support_browser.UNDRAWN) == ["Throughput"]
        found.found("() => { document.querySelector('h1').style.color = '#999'; }")
        assert [said.partition(":")[0] for said in found.found(support_browser.FAINT)] == ["2.8 to 1"]
        assert any("Content Security Policy" in complaint for complaint in found.complaints)


def test_no_button_of_a_heading_makes_its_table_wider(show, report):
    found = show(report)
    found.fold(False)
    assert found.page.locator(".sort").count() > 5
    assert found.found(OUTSIDE) == []


def test_a_figure_has_a_name_and_says_in_words_what_it_shows(show, report):
    found = show(report)
    found.fold(False)
    for figure in found.page.locator("figure").all():
        title = figure.locator("h3").text_content()
        assert figure.get_by_role("img", name=title, exact=True).count() == 1
        caption = figure.locator(".plot").get_attribute("aria-describedby")
        assert len(found.page.locator(f"[id='{caption}']").text_content()) > 20
        labels = [button.get_attribute("aria-label") for button in figure.get_by_role("button").all()]
        assert labels == [f"{title} as SVG", f"{title} as PNG"]


def test_headings_tables_and_links_are_in_order(show, report):
    found = show(report)
    levels = found.found("() => [...document.querySelectorAll('h1, h2, h3, h4')].map((heading) => Number(heading.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    heads = found.found("() => [...document.querySelectorAll('th')].map((head) => [head.scope, head.textContent.trim()])")
    assert {scope for scope, _ in heads} == {"row", "col"}
    assert all(text for _, text in heads)
    ids = found.found("() => [...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))
    assert found.found(DEAD) == 0
    contents = found.page.get_by_role("navigation", name="Contents").get_by_role("link").all_inner_texts()
    assert contents == found.page.locator("h2").all_inner_texts()
    assert contents[:2] == ["In short", "All cells"]


def test_every_control_is_reachable_by_key_with_a_visible_focus(show, report):
    found = show(report)
    found.fold(True)
    visible = (
        "(what) => [...document.querySelectorAll(what)].filter((one) => one.tabIndex >= 0 && one.checkVisibility()).length"
    )
    wanted = found.found(visible, REACHABLE)
    assert wanted > 30
    found.leave()
    for _ in range(wanted):
        found.page.keyboard.press("Tab")
        assert found.found(FOCUSED, REACHABLE) == {"reachable": True, "again": False, "outlined": True}
    assert found.found(LOST) == 0


def test_details_open_by_key_and_by_links(show, study):
    """The details of a cell open by the Enter key and by links to them."""
    found = show(study)
    found.fold_inside()
    summary, details = found.page.locator("#runs-1 > summary"), found.page.locator("#runs-1")
    for opened in (True, False):
        summary.press("Enter")
        assert (details.get_attribute("open") is not None) is opened
    for _ in range(2):  # at the second click, the browser is already at the address of the link
        found.page.locator("#reported a[href='#runs-1']").first.click()
        found.page.wait_for_function("() => document.querySelector('#runs-1').open")
        run = details.locator("tbody tr").first
        assert "node0" in run.inner_text()
        summary.click()
    files = {link.get_attribute("href").rpartition("-r1/")[2] for link in run.locator("a").all()}
    assert files == {"", "run.json", "result.json", "steps/", "samples/"}
    assert f"configuration {support.cell('ddp', 2).hash()}" in details.locator(".note").nth(1).text_content()
    found.page.locator("#reported a.footnote").first.click()
    found.page.wait_for_function("() => document.querySelector('.notes').open")


def test_each_figure_leads_to_the_runs_of_its_cells(show, report):
    found = show(report)
    found.fold_inside()
    for figure in found.page.locator("figure").all():
        links = figure.locator("a[data-cell]").all()
        assert links
        for link in links:
            runs = found.page.locator(link.get_attribute("href"))
            assert runs.locator("summary").text_content().startswith(link.text_content())
            assert link.get_attribute("data-cell") in runs.locator("code").first.text_content()
    found.fold(False)
    links[-1].press("Enter")
    runs = links[-1].get_attribute("href")
    assert found.found("() => location.hash") == runs
    found.fold_inside()
    links[-1].evaluate("(link) => link.click()")
    found.page.wait_for_function("(runs) => document.querySelector(runs).open", arg=runs)
    found.fold_inside()


def test_a_click_on_a_point_opens_the_runs_of_its_cell(show, study):
    found = show(study)
    found.fold_inside()
    found.page.locator("#figure-throughput-per-s .plot").scroll_into_view_if_needed()
    box = found.page.locator("#figure-throughput-per-s .scatterlayer path.point").last.bounding_box()
    found.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    found.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    found.page.wait_for_function("() => document.querySelector('#runs-2').open")  # the cell in the last row
    assert found.found("() => location.hash") == "#runs-2"
    assert found.page.locator("#runs details[open]").count() == 1
    found.fold_inside()


def test_the_studys_table_has_both_numbers_and_says_which_agree(show, study):
    found = show(study)
    found.fold_inside()
    rows = found.page.locator("#reported table.study").first.locator("tbody tr")
    times = [row.locator("td").first.text_content() for row in rows.all()]
    assert times[0].startswith("1.02 s")
    assert "✓agrees" in times[0]
    assert times[1].startswith("0.2 s")
    assert "≠differs" in times[1]
    assert times[2].startswith("soon")
    assert not {"agrees", "differs"} & set(times[2].split())
    doubt = found.page.locator(".notes").first.get_by_text("Note on this place in the study: two figures of one thing.")
    assert not doubt.is_visible()
    found.fold(False)
    assert doubt.is_visible()


def test_on_a_phone_only_tables_scroll_sideways(show, report):
    found = show(report)
    found.fold(False)
    found.page.set_viewport_size({"width": support_browser.PHONE, "height": support_browser.HEIGHT})
    # The browser needs a moment to make the figures narrower.
    found.page.wait_for_function(f"() => document.documentElement.scrollWidth <= {support_browser.PHONE}")
    found.page.set_viewport_size({"width": support_browser.WIDTH, "height": support_browser.HEIGHT})


def test_the_report_prints_in_light_colours_with_all_details(show, report):
    found = show(report, "dark")
    found.fold(True)
    assert found.page.pdf().startswith(b"%PDF")
    assert found.found("() => [...document.querySelectorAll('details')].every((details) => details.open)")
    colour = "() => getComputedStyle(document.body).color"
    dark = found.found(colour)
    found.page.emulate_media(media="print")
    assert found.found(colour) != dark
    assert not found.page.locator(".pictures").first.is_visible()
    found.page.emulate_media(media="screen")
    assert found.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_figure_is_saved_in_light_colours_whatever_the_page_has(show, study, scheme):
    found = show(study, scheme)
    saved = {}
    for format_ in ("SVG", "PNG"):
        with found.page.expect_download() as download:
            found.page.get_by_role("button", name=f"Throughput as {format_}").press("Enter")
        assert download.value.suggested_filename == f"throughput-per-s.{format_.lower()}"
        saved[format_] = download.value.path().read_bytes()
    text = saved["SVG"].decode()
    assert text.startswith("<svg")
    assert "var(" not in text
    assert "rgb(27, 29, 31)" in text  # the color of text in the light color scheme
    assert "Throughput" in text
    assert saved["PNG"].startswith(b"\x89PNG")
    assert struct.unpack(">I", saved["PNG"][16:20]) == (2 * 640,)
    assert found.complaints == []


def test_the_page_without_plotly_has_at_most_400_kilobytes(report):
    text = report.read_text()
    assert len(text.encode()) - len(support_report.packed_plotly()) < 400_000
    assert len(text.encode()) < 2_500_000


def test_the_answer_and_all_cells_come_first_and_eight_screens_show_the_page(browser, report):
    with support_browser.opened(browser, report, width=1440) as found:
        heads = found.found("() => [...document.querySelectorAll('h2, #summary table')].map((one) => one.textContent.trim())")
        assert heads[:2] == ["In short", "All cells"]
        assert heads[2].startswith("Strategy")
        assert found.found("() => document.querySelector('#answer .lead').getBoundingClientRect().bottom") < 900
        assert found.found("() => document.documentElement.scrollHeight") <= 8 * 900
        assert found.found("() => [...document.querySelectorAll('details')].every((one) => !one.open)")


def test_contents_stay_visible_and_open_the_part_that_a_reader_chooses(browser, report):
    with support_browser.opened(browser, report) as found:
        contents = found.page.get_by_role("navigation", name="Contents")
        for title, part in (("Memory", "memory"), ("What ran where", "ran"), ("Definitions", "terms")):
            contents.get_by_role("link", name=title).click()
            found.page.wait_for_function("(id) => document.getElementById(id).open", arg=f"part-{part}")
            found.page.wait_for_function(support_browser.DRAWN)
            bar, head = contents.bounding_box(), found.page.locator(f"#part-{part} > summary").bounding_box()
            assert bar["y"] == 0
            assert head["y"] >= bar["height"]
        widths = """() => [...document.querySelectorAll('.part[open] .plot')].map((plot) =>
          [plot.clientWidth, plot.querySelector('svg').clientWidth])"""
        assert all(abs(place - drawn) <= 1 for place, drawn in found.found(widths))
        found.page.goto(f"{report.as_uri()}#metric-throughput_per_s")
        found.page.reload()
        assert found.page.locator("#metric-throughput_per_s").is_visible()


def test_a_page_that_is_printed_as_soon_as_it_has_loaded_has_all_its_figures(browser, report):
    with contextlib.closing(browser.new_context()) as context:
        context.add_init_script(f"""addEventListener('load', () => {{
          dispatchEvent(new Event('beforeprint'));
          window.undrawn = ({support_browser.UNDRAWN})();
        }})""")
        page = context.new_page()
        page.goto(report.as_uri())
        page.wait_for_function("() => window.undrawn")
        assert page.evaluate("() => window.undrawn") == []
        assert page.locator("iframe").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [support_browser.PHONE, 1440])
@pytest.mark.parametrize("cells", [8, 16])
def test_axe_finds_no_serious_violation_in_a_report(browser, tmp_path, cells, width, scheme):
    workspace = Workspace(tmp_path)
    strategies = ("ddp", "fsdp2", "fsdp2-zero2", "zero1", "zero2", "zero3", "fsdp1-full-shard")
    compared = [support.cell(strategies[number % 7], 2 + number // 7) for number in range(cells)]
    support.keep(workspace, compared)
    for cell in compared:
        support.completed(workspace, cell, 1)
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    with support_browser.opened(browser, workspace.report / "index.html", width, color_scheme=scheme) as found:
        assert support_browser.find_serious_violations(found.page) == []
        found.found("() => document.querySelectorAll('.part').forEach((part) => { part.open = true; })")
        found.page.wait_for_function(support_browser.DRAWN)
        assert support_browser.find_serious_violations(found.page) == []


def test_the_first_tab_stop_skips_to_the_answer(browser, report):
    with support_browser.opened(browser, report) as found:
        skip = found.page.get_by_role("link", name="Skip to the answer")
        assert skip.bounding_box()["x"] < 0
        found.page.keyboard.press("Tab")
        assert skip.bounding_box()["x"] >= 0
        found.page.keyboard.press("Enter")
        assert found.found("() => document.activeElement.id") == "main"


def test_a_browser_that_cannot_decompress_is_told_so_and_has_the_tables(browser, report):
    with contextlib.closing(browser.new_context()) as context:
        context.add_init_script("delete window.DecompressionStream")
        page = context.new_page()
        complaints = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(report.as_uri())
        assert page.locator("#undrawn").is_visible()
        assert "DecompressionStream" in page.locator("#undrawn").inner_text()
        assert page.locator("#summary table").is_visible()
        page.locator("#part-memory > summary").click()
        assert complaints == []


def test_a_keyboard_reaches_what_scrolls_and_lists_hold_only_items(show, report):
    """Rules of axe-core whose violation is serious: `scrollable-region-focusable`, `list`, and names of regions."""
    found = show(report)
    found.fold(False)
    found.page.set_viewport_size({"width": support_browser.PHONE, "height": support_browser.HEIGHT})
    assert found.found(UNREACHABLE) == []
    assert found.found("() => [...document.querySelectorAll(':is(ul, ol) > :not(li)')].map((one) => one.outerHTML)") == []
    assert found.found("() => [...document.querySelectorAll('li[role]')].map((one) => one.outerHTML)") == []
    found.page.set_viewport_size({"width": support_browser.WIDTH, "height": support_browser.HEIGHT})
    found.fold(True)
