"""Tables of a study that are text stand in the report beside measured values and the computed choice."""

import re

import pytest
import support_collect as support

from collect import summary
from collect.choices.printed_tables import BestOfRanks, ComparisonsWon
from collect.reading import load
from collect.report import page, summary_tables
from shardlab.runs.record import SameWork
from shardlab.workspace.workspace import Workspace

MARK = "<i>x</i>"  # a text that must not become an element of the page
TABLES = [
    {
        "where": "table 9",
        "title": "A guide",
        "columns": ["Strategy", "When"],
        "measured": ["throughput_per_s", "mfu_pct"],
        "choice": "wins",
        "rows": [
            {"texts": ["DDP", "always"], "cell": {"strategy": "ddp"}},
            {"texts": ["FSDP2", MARK], "cell": {"strategy": "fsdp2"}},
            {"texts": ["both", "two cells"], "cell": {"gpus": 2}},
            {"texts": ["ZeRO-3", "no such cell"], "cell": {"strategy": "zero3"}},
            {"texts": ["other", "of no cell"]},
        ],
    },
    {
        "where": "figure 8",
        "title": "Sizes",
        "columns": ["Size"],
        "choice": "best",
        "rows": [{"texts": ["tiny"], "cell": {"workload": "gpt2-tiny"}}],
    },
]
DDP, FSDP = support.cell("ddp", 2), support.cell("fsdp2", 2)  # ddp takes 110 ms a step, fsdp2 125 ms, each on half of the batch


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    workspace = Workspace(tmp_path_factory.mktemp("tables"))
    support.keep(workspace, [DDP, FSDP], tables=TABLES)
    for what in (DDP, FSDP):
        for repeat in (1, 2, 3):
            support.completed(workspace, what, repeat, found={"same_work": SameWork(verdict="proven", why="")})
    return load.load_matrix(workspace, None)


def test_a_row_has_the_values_of_its_cell_and_how_often_it_is_the_best(loaded):
    found = summary.summarize(loaded, "single")
    guide, sizes = found.tables
    of_ddp, of_fsdp, of_both, of_zero3, of_none = guide.rows
    (row,) = [row for row in found.rows if row.cell["strategy"] == "ddp"]
    assert (of_ddp.row, of_ddp.values) == (row.id, [row.metrics["throughput_per_s"], None])
    assert (of_both.row, of_both.values) == (None, [None, None])  # two cells match, so no number is about the row
    assert (of_zero3.values, of_zero3.wins, of_none.wins) == ([None, None], [], [])
    assert of_ddp.wins[0] == ComparisonsWon("throughput_per_s", 1, 1)
    assert of_fsdp.wins[0] == ComparisonsWon("throughput_per_s", 0, 1)
    assert of_both.wins[0] == ComparisonsWon("throughput_per_s", 1, 1)
    assert sizes.rows[0].best[0] == BestOfRanks("throughput_per_s", 2, ["ddp"])
    assert summary_tables.list_choice_clauses(of_ddp)[0] == "among the fastest in 1 of 1 comparison"
    assert summary_tables.list_choice_clauses(sizes.rows[0])[0] == "fastest on 2 ranks: ddp"
    assert summary_tables.list_choice_clauses(of_none) == [summary_tables.NO_COMPARISON]


def test_the_page_has_the_tables_with_links_and_escaped_texts(loaded, tmp_path):
    html = page.draw_page(loaded, summary.summarize(loaded, "single"), tmp_path, tmp_path)
    section = html[html.index('<section id="tables">') :]
    section = section[: section.index("</section>")]
    assert '<h4 id="printed-1">Table 9</h4>' in section
    assert "Figure 8" in section
    assert "Throughput, here" in section
    assert MARK not in section
    assert re.search(r"<th[^>]*>DDP</th><td>always</td><td class=\"number\"><a [^>]*#runs-\d+\">[\d,.]+ tokens/s", section)
    assert summary_tables.NO_COMPARISON in section
