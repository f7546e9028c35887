"""Records may contain control characters that steer a terminal. No command, page, figure or export prints such a character."""

import json
import re

import msgspec
import polars as pl
import pytest
import support_hostile as hostile
import support_report
from support_hostile import STEERING, on_terminal, steering

from collect import export, summary
from collect.cli import main
from collect.reading import load
from collect.report import page
from shardlab.workspace.workspace import Workspace

# The control sequences that the library rich may print: styles, and those of a live table, which hide the cursor, show it, move
# it up and clear lines.
OF_RICH = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[1A|\x1b\[2K|\r")
TEXTS = {"csv", "json", "latex", "markdown", "html"}
IN_BYTES = (b"\x1b]0;", b"\x1b[2J", "\x9b31m".encode(), b"\x9b31m", "\u202e".encode(), "\u200b".encode())


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    return hostile.matrix(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def loaded(workspace):
    found = load.load_matrix(workspace, None)
    return found, summary.summarize(found, "single")


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["collect", "summarize"], {}),
        (["collect", "summarize", "--json"], {}),
        (["collect", "verdicts"], {}),
        (["collect", "fetch"], {}),
        (["jobs", "status"], {}),
        (["jobs", "status"], {"NO_COLOR": "1"}),
        (["jobs", "status"], {"TERM": "dumb"}),
        (["jobs", "status", "--watch"], {}),
        (["jobs", "status", "--json"], {}),
        (["jobs", "logs", "RUN"], {}),
        (["jobs", "logs", "RUN", "--rank", "0", "--follow"], {}),
        (["jobs", "logs", STEERING], {}),
        (["jobs", STEERING], {}),
    ],
    ids=lambda value: " ".join(value).replace(STEERING, "STEERING") if isinstance(value, list) else "".join(value.values()),
)
def test_a_terminal_gets_no_sequence_but_those_of_rich(workspace, words, environment):
    run = hostile.failed_run(workspace)
    module, *arguments = [run.run_id if word == "RUN" else word for word in words]
    said = OF_RICH.sub("", on_terminal(["-m", module, *arguments, "--workspace", str(workspace.path)], 200, **environment))
    assert steering(said) == []
    if words[1] in ("logs", "status", "summarize") and STEERING not in words:
        assert "[bold]b[/bold][link=x]l[/link]:smile:" in said, "a node's text is shown, and nothing in it is taken for markup"


def test_text_drawn_by_rich_contains_no_terminal_sequence_of_the_data():
    code = (
        "from rich.live import Live; from rich.table import Table; from rich.text import Text; from rich.panel import Panel\n"
        "from shardlab.terminal.console import Output\n"
        f"said = {STEERING!r}\n"
        "out = Output(verbose=True)\n"
        "out.print_line(said, 'red'); out.print_remark(said); out.print_detail(said)\n"
        "out.print_table(said, [said], [[said]])\n"
        "table = Table(title=said, caption=said); table.add_column(said); table.add_row(said); table.add_row(Text(said))\n"
        "with Live(Panel(table, title=said), console=out.results.console, auto_refresh=False): pass\n"
        "with Live(table, console=out.remarks.console, auto_refresh=False): pass\n"
    )
    said = on_terminal(["-c", code], 200)
    assert said.count("[link=x]l[/link]:smile:") >= 10
    assert steering(OF_RICH.sub("", said)) == []


def test_a_pipe_gets_no_terminal_sequence(workspace, capfd):
    assert main(["verdicts", "--workspace", str(workspace.path)]) == 0
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    said = capfd.readouterr()
    assert "[bold]b[/bold]" in said.out
    assert steering(said.out + said.err) == []


def test_the_report_contains_no_terminal_sequence(workspace, loaded, tmp_path):
    assert main(["summarize", "--workspace", str(workspace.path), "--out", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "index.html").read_text().replace(support_report.packed_plotly(), "")
    assert "[bold]b[/bold]" in text
    assert steering(text, allowed="\n\t") == []
    figures = json.loads(support_report.unpack(text, "specs"))
    assert figures
    for figure in [*figures.values(), *(drawn.spec for drawn in page.draw_figures(*loaded))]:
        assert _steering_in(figure) == []


@pytest.mark.parametrize(
    "name", sorted(export.load_export_formats().keys() - {"png", "svg", "memory-viz"})
)  # png and svg draw the same figures as the report of the test above; memory-viz needs a snapshot, whose names are numbers
def test_no_export_contains_a_terminal_sequence(workspace, tmp_path, name):
    out = tmp_path / "out"
    assert main(["export", "--to", name, "--workspace", str(workspace.path), "--out", str(out)]) == 0
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files
    for path in files:
        raw = path.read_bytes()
        assert [mark for mark in IN_BYTES if mark in raw] == [], path
        assert STEERING.encode() not in raw
        if name in TEXTS:
            assert steering(raw.decode()) == [], path
        if name == "parquet":
            assert _steering_in(pl.read_parquet(path).select(pl.col(pl.String)).to_dicts()) == []


def test_json_output_has_the_text_that_the_node_wrote(workspace, tmp_path):
    assert main(["export", "--to", "json", "--workspace", str(workspace.path), "--out", str(tmp_path / "out")]) == 0
    document = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert document["title"] == STEERING
    run = hostile.failed_run(workspace).run_id
    assert [failure["why"] for failure in document["failures"] if failure["run"] == run] == [STEERING]


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", " =", "\t=", "\n@"])
def test_a_spreadsheet_takes_no_text_of_a_csv_for_a_formula(workspace, tmp_path, begin):
    formula = f"{begin}HYPERLINK(1)"
    found = load.load_matrix(workspace, None)
    found = msgspec.structs.replace(found, expansion=msgspec.structs.replace(found.expansion, name=formula))
    export.write_export(export.find_export_format("csv"), found, summary.summarize(found, "single"), tmp_path / "out")
    (matrix, *_) = pl.read_csv(tmp_path / "out" / "summary.csv")["matrix"].unique()
    assert matrix[0] == "'"
    assert matrix.endswith("HYPERLINK(1)")
    assert pl.read_csv(tmp_path / "out" / "summary.csv")["throughput_per_s"].dtype == pl.Float64


def _steering_in(value) -> list[str]:
    if isinstance(value, str):
        return steering(value, allowed="")
    if isinstance(value, dict):
        return [mark for pair in value.items() for entry in pair for mark in _steering_in(entry)]
    return [mark for entry in value for mark in _steering_in(entry)] if isinstance(value, list | tuple) else []
