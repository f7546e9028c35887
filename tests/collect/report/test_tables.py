"""The tools of the report's tables: what a reader sorts, searches, filters and groups, and the runs that a row opens."""

import json
import re

import pytest
import support_browser
import support_collect as support

from collect import summary
from collect.cli import main
from collect.findings import columns
from collect.reading import load
from collect.report import page
from shardlab.workspace.workspace import Workspace

STRATEGIES, RANKS, BATCHES = ("single", "ddp", "fsdp2"), (1, 2), (8, 16)
SLOWEST = {"fsdp2": 1, "ddp": 2, "single": 3}  # the throughput on one rank rises in this order, see support_collect.step_ms


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a matrix of 12 cells. The last cell, fsdp2 on 2 ranks with batch 16, never ran."""
    workspace = Workspace(tmp_path_factory.mktemp("tables"))
    cells = [
        support.cell(strategy, ranks, global_batch_size=batch, micro_batch_size=batch // ranks)
        for strategy in STRATEGIES
        for ranks in RANKS
        for batch in BATCHES
    ]
    support.keep(workspace, cells, repeats=1)
    for what in cells[:-1]:
        support.completed(workspace, what)
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    return workspace.report / "index.html"


@pytest.fixture(scope="module")
def browser():
    with support_browser.browser() as started:
        yield started


@pytest.fixture(scope="module")
def opened(browser, report):
    """The open report. The tests share it; `table` resets the tools before each test."""
    with support_browser.opened(browser, report) as found:
        yield found


@pytest.fixture
def table(opened):
    section = opened.page.locator("#summary")
    section.get_by_role("button", name="Show all").click()
    opened.page.wait_for_function("() => document.querySelector('#summary .said').textContent === '12 cells'")
    yield section
    assert opened.complaints == []


def rows(section):
    """(strategy, ranks, batch) of the rows of the table, from top to bottom."""
    cells = section.locator("tr[data-facets]").evaluate_all("(rows) => rows.map((row) => row.dataset.facets)")
    return [(strategy, int(ranks), int(batch)) for strategy, ranks, batch, _ in map(json.loads, cells)]


def said(section):
    return section.get_by_role("status").inner_text()


ALL = [(strategy, ranks, batch) for strategy in STRATEGIES for ranks in RANKS for batch in BATCHES]


def test_a_table_of_cells_comes_with_hidden_tools_and_the_facets_of_each_row(report):
    page = report.read_text()
    tools = re.search(r'<form class="tools" aria-label="Rows of the table: Cells" hidden>.*?</form>', page, re.DOTALL)[0]
    assert re.findall("<legend>(.*?)</legend>", tools) == ["Strategy", "Ranks", "Batch", "State"]
    boxes = ["single", "ddp", "fsdp2", "1", "2", "8", "16", "completed", "planned"]
    assert re.findall('type="checkbox" value="(.*?)"', tools) == boxes
    assert '<tr data-runs="runs-1" data-facets="[&#34;single&#34;,&#34;1&#34;,&#34;16&#34;,&#34;completed&#34;]">' in page


def test_a_key_with_many_values_or_with_one_has_no_check_boxes(summarized_of):
    keys, shown = summarized_of([support.cell("ddp", 1, seed=seed) for seed in range(page.MOST_FACET_VALUES + 1)])
    assert [column.name for column in keys][:3] == ["strategy", "gpus", "seed"]
    assert page.make_facets(keys, shown) == []
    of_batch_16 = [support.cell("ddp", ranks, global_batch_size=16, micro_batch_size=16 // ranks) for ranks in (16, 2, 8)]
    keys, shown = summarized_of(of_batch_16)
    assert [facet.choices for facet in page.make_facets(keys, shown)] == [["2", "8", "16"]]


@pytest.fixture
def summarized_of(tmp_path):
    """Returns a function that makes the columns and rows of the summary of cells that never ran."""

    def summarized(cells):
        workspace = Workspace(tmp_path)
        support.keep(workspace, cells, repeats=1)
        rows = summary.summarize(load.load_matrix(workspace, None), "ddp").rows
        return columns.make_cell_tables(rows).summary_table.columns, rows

    return summarized


@support_browser.needed
def test_a_heading_sorts_by_number_up_and_down_and_then_as_before(table):
    head = table.locator("th", has_text="Throughput")
    button = table.get_by_role("button", name="Sort by Throughput (tokens/s)")
    unknown = ALL[-1]  # the cell that never ran is last in both directions
    button.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert said(table) == "12 cells, sorted by Throughput (tokens/s), ascending"
    first = [SLOWEST[strategy] for strategy, ranks, _ in rows(table) if ranks == 1]
    assert first == [1, 1, 2, 2, 3, 3]
    assert rows(table)[-1] == unknown
    button.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert rows(table)[0][0] == "single"
    assert rows(table)[-1] == unknown
    table.get_by_role("button", name="Sort by Batch").press("Enter")
    assert [batch for _, _, batch in rows(table)] == [8] * 6 + [16] * 6
    assert table.locator("[aria-sort]").count() == 1
    for _ in range(2):
        table.get_by_role("button", name="Sort by Batch").press("Enter")
    assert rows(table) == ALL
    assert table.locator("[aria-sort]").count() == 0


@support_browser.needed
def test_a_search_and_check_boxes_filter_the_rows_and_a_status_counts_them(table):
    table.locator(".tools summary").press("Enter")
    for box in ("ddp", "fsdp2", "16"):
        table.get_by_label(box, exact=True).press("Space")
    assert rows(table) == [entry for entry in ALL if entry[0] != "single" and entry[2] == 16]
    assert said(table) == "4 of 12 cells"
    table.get_by_label("Search").press_sequentially("FSDP2 completed")
    assert rows(table) == [("fsdp2", 1, 16)]
    assert said(table) == "1 of 12 cells"
    table.get_by_label("Search").press("Enter")  # Enter must not submit the form: that reloads the page
    assert said(table) == "1 of 12 cells"
    table.locator(".tools summary").press("Enter")


@support_browser.needed
def test_groups_keep_the_order_of_the_rows_and_can_be_closed(table):
    table.get_by_role("button", name="Sort by Batch").press("Enter")
    table.get_by_label("Group by").select_option(label="ranks")
    assert table.locator("th[scope=rowgroup]").all_text_contents() == ["Ranks: 16 cells", "Ranks: 26 cells"]
    assert [(ranks, batch) for _, ranks, batch in rows(table)] == [
        (ranks, batch) for ranks in RANKS for batch in BATCHES for _ in STRATEGIES
    ]
    first = table.get_by_role("button", name="Ranks: 1", exact=True)
    first.press("Enter")
    assert first.get_attribute("aria-expanded") == "false"
    assert first.evaluate("(button) => button === document.activeElement")
    assert {ranks for _, ranks, _ in rows(table)} == {2}
    assert said(table).startswith("12 cells")


@support_browser.needed
def test_a_row_opens_its_runs_and_keeps_them_when_rows_move(table):
    button = table.get_by_role("button", name="Runs of ddp ×2, batch 16", exact=True)
    button.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    opened = table.locator("tr.opened")
    name = support.make_run_id(support.cell("ddp", 2, global_batch_size=16, micro_batch_size=8), 1)
    assert opened.get_by_role("link", name=name, exact=True).get_attribute("href") == f"../runs/{name}/"
    assert "completed" in opened.inner_text()
    table.get_by_role("button", name="Sort by Strategy").press("Enter")
    assert opened.evaluate("(row) => row.previousElementSibling.dataset.facets") == '["ddp","2","16","completed"]'
    button.press("Enter")
    assert opened.count() == 0


@support_browser.needed
def test_tables_of_other_things_than_cells_are_sorted_too(opened):
    opened.fold_inside()
    section = opened.page.locator("#losses")
    section.get_by_role("button", name="Sort by Cells").press("Enter")
    texts = section.locator("tbody td:nth-child(2)").all_inner_texts()
    assert len(texts) > 2
    assert texts == sorted(texts)
    assert opened.page.locator("#spoken").inner_text() == "sorted by Cells, ascending"
    assert opened.page.locator("#runs .sort").count() == 0


@support_browser.needed
def test_without_javascript_the_table_is_whole_and_has_no_tools(browser, report):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("#summary tbody tr").count() == len(ALL)
    assert not page.locator(".tools").first.is_visible()
    assert page.locator(".sort, .opener").count() == 0
    context.close()
