"""From run folders to the report: its content, what it must not contain, and what is left after a kill."""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser

import msgspec
import polars as pl
import pytest
import support_collect as support
import support_report

from collect import atomic_folder, figure, flat_tables, summary
from collect.cli import main
from collect.figures import cell_rows, scaling, training
from collect.findings import columns, comparability
from collect.findings.equal_losses import compare_losses
from collect.reading import load
from collect.report import page, provenance, truncation
from collect.verdicts.reported import ReportedResult
from shardlab.errors import InputError
from shardlab.runs.record import LineWriter, ValidationRecord
from shardlab.runs.run import make_run_id
from shardlab.workspace.workspace import Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return support.matrix(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def loaded(workspace):
    return load.load_matrix(workspace, None)


@pytest.fixture(scope="module")
def summarized(loaded):
    return summary.summarize(loaded, "single")


def row_of(summarized, strategy, launcher="torchrun", batch=8):
    wanted = (strategy, launcher, batch)
    (found,) = [
        row for row in summarized.rows if (row.cell["strategy"], row.cell["launcher"], row.cell["global_batch_size"]) == wanted
    ]
    return found


def test_every_cell_has_a_row_with_its_state(summarized):
    assert [(row.cell["strategy"], row.n, row.state) for row in summarized.rows] == [
        ("single", 3, "completed"),
        ("ddp", 3, "completed"),
        ("ddp", 3, "completed"),
        ("fsdp2", 2, "2 completed, 1 failed"),
        ("fsdp2", 0, "1 planned, 1 oom, 1 timeout"),
        ("zero3", 0, "planned"),
    ]
    assert row_of(summarized, "zero3").metrics == {}
    assert row_of(summarized, "fsdp2", batch=64).metrics == {}


def test_the_numbers_are_those_of_the_records(summarized):
    single, ddp = row_of(summarized, "single"), row_of(summarized, "ddp")
    means = []
    for repeat in (1, 2, 3):
        times = [support.step_ms(support.cell(), 0, step, repeat) for step in range(1, 11)]
        means.append(1000 * 10 * 2 * support.TOKENS / sum(times))
    assert single.metrics["throughput_per_s"].value == pytest.approx(sum(means) / 3)
    assert single.metrics["throughput_per_s"].unit == "tokens/s"
    assert single.metrics["speed_up"].value == 1
    ratio = ddp.metrics["throughput_per_s"].value / single.metrics["throughput_per_s"].value
    assert ddp.metrics["speed_up"].value == pytest.approx(ratio)
    assert ddp.metrics["scaling_efficiency_pct"].value == pytest.approx(50 * ratio)
    assert ddp.metrics["speed_up"].kind == "strong"
    assert ddp.baseline == single.id
    assert ddp.metrics["peak_memory_bytes"].value == 310 * support.MIB
    window_s = sum(max(support.step_ms(support.cell("ddp", 2), r, s, 1) for r in (0, 1)) for s in range(2, 11)) / 1000
    assert ddp.runs[0].metrics["loopback_bytes"] == pytest.approx(8 * support.MIB * window_s, rel=1e-3)
    assert "gpu_pct" not in ddp.metrics


def test_without_a_comparable_baseline_there_is_no_speed_up(summarized, loaded):
    forked = row_of(summarized, "ddp", "fork")
    assert forked.baseline is None
    assert "speed_up" not in forked.metrics
    assert summary.summarize(loaded, "no such strategy").rows[1].baseline is None


def test_a_baseline_on_several_rank_counts_uses_the_fewest_ranks(loaded):
    """If the baseline strategy ran on several numbers of ranks, its cell with the fewest ranks is the baseline."""
    _, ddp = loaded.cells[:2]
    few = load.LoadedCell("few", support.cell("ddp", 1, global_batch_size=4, micro_batch_size=4), ddp.runs, [])
    many = load.LoadedCell("many", support.cell("ddp", 2, global_batch_size=8), ddp.runs, [])
    assert few.cell.gpu_batch_size == many.cell.gpu_batch_size
    assert comparability.find_baseline(many, [many, few], "ddp") is few
    assert comparability.find_baseline(few, [many, few], "ddp") is few
    passes = load.LoadedCell("passes", support.cell("ddp", 1, global_batch_size=4, gradient_accumulation_steps=4), ddp.runs, [])
    for cells in ([few, passes], [passes, few]):  # each is its own baseline, so its speed-up is 1
        assert [comparability.find_baseline(cell, cells, "ddp") for cell in cells] == cells


@pytest.mark.parametrize(
    "other",
    [{"precision": "bf16"}, {"seq_len": 128}, {"workload": "vit-tiny"}, {"launcher": "fork"}, {"options": {"n_layer": 8}}],
)
def test_a_cell_of_other_work_is_not_used_as_a_baseline(loaded, other):
    """A cell with another precision, model, launcher or sequence length is not used as a baseline."""
    single, ddp = loaded.cells[:2]
    changed = load.LoadedCell(single.id, support.cell(**({"options": {"n_layer": 4}} | other)), single.runs, [])
    mine = load.LoadedCell(ddp.id, support.cell("ddp", 2, options={"n_layer": 4, "bucket_mb": 25}), ddp.runs, [])
    assert comparability.find_baseline(mine, [changed, mine], "single") is None


def test_the_latest_attempt_counts_and_the_earlier_is_history(summarized):
    row = row_of(summarized, "fsdp2")
    counted = [(run.repeat, run.attempt, run.state) for run in row.runs]
    assert counted == [(1, 1, "completed"), (2, 2, "completed"), (3, 1, "failed")]
    found = {(failure.run.rpartition("-")[2], failure.state, failure.superseded) for failure in summarized.failures}
    assert {("r2", "failed", True), ("r3", "failed", False)} <= found
    assert {failure.state for failure in summarized.failures} == {"failed", "oom", "timeout"}
    assert "ended at its time limit of 600 s" in {failure.why for failure in summarized.failures}


def test_damage_is_counted_and_named_and_stops_nothing(summarized):
    damaged = {damage.run[:6]: (damage.truncated, damage.corrupt) for damage in summarized.damage}
    assert damaged == {"fsdp2-": (["samples/node0.jsonl"], {}), "single": ([], {"samples/node0.jsonl": 2})}


def test_losses_are_compared_through_launchers_and_strategies(loaded):
    found = {
        (entry.differ, entry.other.split("-gpt2")[0], "fork" in entry.other): entry
        for entry in compare_losses(loaded, "single")
    }
    assert found[("launcher", "ddp", True)].max_difference == pytest.approx(1e-6)
    assert found[("launcher", "ddp", True)].steps == 30
    assert found[("strategy", "ddp", False)].max_difference < 1e-12
    assert found[("strategy", "fsdp2", False)].steps == 20  # two repeats with ten steps each
    assert len(found) == 3


def test_the_coverage_of_telemetry_is_reported(summarized):
    entry = next(entry for entry in summarized.telemetry if entry.run.startswith("single"))
    assert entry.coverage_pct == pytest.approx(100)
    assert entry.largest_gap_s == pytest.approx(0.05, rel=1e-3)


def test_a_run_whose_sampler_died_is_named(tmp_path):
    workspace = support.matrix(tmp_path)
    died, never_ran, failed = (
        make_run_id(support.cell(), 1),
        make_run_id(support.cell("ddp", 2), 1),
        make_run_id(support.cell("fsdp2", 2), 3),
    )
    samples = workspace.find_run_dir(died).samples_file(support.HOST)
    samples.write_bytes(b"".join(samples.read_bytes().splitlines(keepends=True)[:30]))  # 1.5 s of 3.5 s of telemetry
    for run in (never_ran, failed):
        workspace.find_run_dir(run).samples_file(support.HOST).unlink()
    found = summary.summarize(load.load_matrix(workspace, None), "single")
    said = {entry.run: entry.incomplete for entry in found.telemetry if entry.incomplete}
    assert said.keys() == {died, never_ran, failed}
    assert said[never_ran] == "no samples"
    assert re.fullmatch(r"no samples in the last \d\.\d s", said[died])
    (remark,) = [remark for remark in found.remarks if remark.startswith("telemetry covers only a part of the timed window")]
    assert f"{died} on node0 ({said[died]})" in remark
    assert f"{never_ran} on node0 (no samples)" in remark
    assert failed not in remark  # a failed run is not part of any mean
    assert main(["summarize", "--workspace", str(tmp_path)]) == 0
    text = (workspace.report / "index.html").read_text()
    assert remark in text
    row = re.search(r'<tr><th scope="row" class="name">node0</th>.*?</tr>', text)[0]
    assert row.endswith('<td class="number">3</td></tr>')


def test_a_damaged_run_folder_is_listed_with_its_reason(tmp_path):
    workspace = support.matrix(tmp_path)
    run = workspace.find_run_dir(make_run_id(support.cell(), 1))
    run.run_json.write_text("{")
    workspace.find_run_dir(make_run_id(support.cell(), 2)).result.write_text("[]")
    found = row_of(summary.summarize(load.load_matrix(workspace, None), "single"), "single")
    assert found.states == {"completed": 1, "unknown": 2}
    assert "is not a run of this version" in found.runs[0].why
    assert "is not a result of this version" in found.runs[1].why


@pytest.mark.parametrize("verb", [["summarize"], ["verdicts"], ["export", "--to", "csv"], ["fetch"]])
@pytest.mark.parametrize("damage", ["run.json", "result.json", "events", "no file"])
def test_a_run_whose_records_cannot_be_read_is_set_aside_by_name(tmp_path, capsys, verb, damage):
    workspace = support.matrix(tmp_path)
    run = workspace.find_run_dir(make_run_id(support.cell(), 1))
    (events,) = run.path.glob("events.*")
    if damage == "events":
        events.write_bytes(events.read_bytes() + bytes(20) + b"\n")
    elif damage == "no file":
        events.unlink()
        events.mkdir()
    else:
        (run.path / damage).write_text("{")
    assert main([*verb, "--workspace", str(tmp_path)]) == 1
    said = capsys.readouterr()
    (line,) = [line for line in said.err.splitlines() if line.startswith(f"{run.run_id}: set aside: ")]
    assert f"move the folder {run.path} out of runs/" in line
    assert (damage if damage.endswith(".json") else events.name) in line
    shutil.move(run.path, tmp_path / "elsewhere")
    assert main([*verb, "--workspace", str(tmp_path)]) == 0


def test_rehearsals_and_synthetic_data_are_marked_in_every_output(workspace, capsys):
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    shown = capsys.readouterr().out
    document = json.loads((workspace.report / "summary.json").read_text())
    html = (workspace.report / "index.html").read_text()
    table = pl.read_csv(workspace.report / "tables" / "summary.csv")
    for text in (shown, "\n".join(document["remarks"]), html):
        assert summary.REHEARSAL_NOTE in text
        assert "synthetic data in gpt2-tiny" in text
    assert table["rehearsal"].all()
    assert document["rehearsal"]
    assert shown.rstrip().splitlines()[-1] == f"report: {workspace.report / 'index.html'}"


def test_the_files_hold_the_same_numbers(workspace, capsys):
    assert main(["summarize", "--workspace", str(workspace.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((workspace.report / "summary.json").read_text())
    assert {"rows", "reported", "verdicts", "failures", "telemetry"} <= document.keys()
    cells = pl.read_parquet(workspace.report / "tables" / "summary.parquet")
    assert cells.height == len(document["rows"])
    assert cells["throughput_per_s"].to_list()[:2] == [r["metrics"]["throughput_per_s"]["value"] for r in document["rows"][:2]]
    assert cells["throughput_per_s"][-1] is None
    steps = pl.read_parquet(workspace.report / "tables" / "steps.parquet")
    assert steps["run"].n_unique() == 15
    assert steps.filter(pl.col("warmup")).height > 0


def test_several_rank_counts_and_gpus_have_their_figures_and_columns(tmp_path):
    workspace = Workspace(tmp_path)
    weak = support.cell("fsdp2", 4, global_batch_size=32, micro_batch_size=8)
    cells = [support.cell(), support.cell("ddp", 2), support.cell("ddp", 4), weak]
    support.keep(workspace, cells, repeats=1)
    for what in cells:
        support.completed(workspace, what, gpu=True)
    found = load.load_matrix(workspace, None)
    summarized = summary.summarize(found, "single")
    table = {column.name: column for column in columns.make_cell_tables(summarized.rows).summary_table.columns}
    assert (table["peak_memory_bytes"].heading, table["peak_memory_bytes"].unit) == ("Peak GPU memory", "GiB")
    assert float(table["gpu_pct"].text(summarized.rows[0]).value) == pytest.approx(81, abs=0.3)
    assert [table["speed_up"].text(row).remark for row in summarized.rows] == ["strong", "strong", "strong", "weak"]
    assert columns.make_row_labels(summarized.rows) == ["single ×1", "ddp ×2", "ddp ×4", "fsdp2 ×4"]
    (group,) = figure.group_by_workload(found, summarized)
    lines = {line["name"]: (line["x"], line["y"]) for line in scaling.draw_scaling(group).data}
    assert lines["ddp"][0] == [2, 4]
    assert lines["ideal"] == ([1, 4], [1, 4])
    (group,) = figure.group_by_workload(found, summary.summarize(found, "ddp"))
    lines = {line["name"]: (line["x"], line["y"]) for line in scaling.draw_scaling(group).data}
    assert lines["ideal"] == ([1, 4], [0.5, 2])
    assert lines["ddp"][1][0] == 1


def test_the_axes_of_the_throughput_figure_hold_every_cell_and_interval(tmp_path):
    workspace = Workspace(tmp_path)
    cells = [support.cell(), support.cell("ddp", 2), support.cell("fsdp2", 2)]
    support.keep(workspace, cells, repeats=3)
    for what in cells:
        for repeat in (1, 2, 3):
            support.completed(workspace, what, repeat)
    found = load.load_matrix(workspace, None)
    summarized = summary.summarize(found, "single")
    (group,) = figure.group_by_workload(found, summarized)
    drawn = cell_rows.draw_throughput(group)
    widest = max(row.metrics["throughput_per_s"].high for row in summarized.rows)
    assert widest < drawn.layout["xaxis"]["range"][1] < 1.2 * widest
    # The axis has the three cells at 0, 1 and 2, and room for the marks of the first and the last cell.
    assert drawn.layout["yaxis"]["range"] == pytest.approx([-0.6, 2.6])


def test_a_throughput_is_shown_with_half_of_its_interval(tmp_path):
    workspace = Workspace(tmp_path)
    support.keep(workspace, [support.cell()], repeats=3)
    for repeat in (1, 2, 3):
        support.completed(workspace, support.cell(), repeat)
    (row,) = summary.summarize(load.load_matrix(workspace, None), "single").rows
    estimate = row.metrics["throughput_per_s"]
    (column,) = [one for one in columns.make_cell_tables([row]).summary_table.columns if one.name == "throughput_per_s"]
    half = float(column.text(row).remark.removeprefix("± ").replace(",", ""))
    assert half == pytest.approx((estimate.high - estimate.low) / 2, rel=0.05)  # the table rounds to two digits


def test_differing_units_are_shown_beside_each_number(tmp_path):
    workspace = Workspace(tmp_path)
    image = support.cell(workload="vit-tiny", seq_len=None)
    support.keep(workspace, [support.cell(), image], repeats=1)
    support.completed(workspace, support.cell())
    run = support.completed(workspace, image)
    run.result.write_text(run.result.read_text().replace('"tokens"', '"images"'))
    summarized = summary.summarize(load.load_matrix(workspace, None), "single")
    table = {column.name: column for column in columns.make_cell_tables(summarized.rows).summary_table.columns}
    assert table["throughput_per_s"].unit == ""
    assert [table["throughput_per_s"].text(row).remark for row in summarized.rows] == ["tokens/s", "images/s"]
    assert "seq_len" not in table


def test_a_baseline_of_several_units_gives_no_ideal(tmp_path):
    """If the baseline's runs have different units, the figure has no line of ideal scaling."""
    workspace = Workspace(tmp_path)
    ddp = support.cell("ddp", gpus=2)
    support.keep(workspace, [support.cell(), ddp], repeats=2)
    runs = [support.completed(workspace, what, repeat) for what in (support.cell(), ddp) for repeat in (1, 2)]
    runs[0].result.write_text(runs[0].result.read_text().replace('"tokens"', '"images"'))
    found = load.load_matrix(workspace, None)
    (group,) = figure.group_by_workload(found, summary.summarize(found, "single"))
    drawn = cell_rows.draw_throughput(group)
    assert drawn.data[1]["x"] == []


class Tags(HTMLParser):
    """All tags with their attributes, and the text of every script and style element."""

    def __init__(self, text):
        super().__init__()
        self.found, self.texts, self._inside = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside:
            self.texts.append(data)


def test_the_page_asks_no_host_for_anything(loaded, summarized, workspace):
    """Our own markup contains no address.

    plotly's script has addresses in its text (of map tiles). But the page's Content-Security-Policy, which the browser enforces
    for all scripts, allows no request at all.
    """
    text = page.draw_page(loaded, summarized, workspace.report, workspace.runs)
    tags = Tags(text)
    assert support_report.unpack(text, "plotly") == page.read_plotly_script()
    ours = text.replace(support_report.packed_plotly(), "")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", ours)
    policies = [attrs["content"] for tag, attrs in tags.found if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"]
    for tag, attrs in tags.found:
        assert "src" not in attrs
        if tag == "a":
            assert re.match(r"#|\.\./runs/|summary\.json$|tables/", attrs["href"])
    assert len(text) < 6_000_000


def test_the_page_shows_every_cell_state_and_run(loaded, summarized, workspace):
    text = page.draw_page(loaded, summarized, workspace.report, workspace.runs).replace(support_report.packed_plotly(), "")
    for label in ("single ×1", "ddp ×2", "ddp ×2, fork", "fsdp2 ×2", "fsdp2 ×2, batch 64", "zero3 ×2"):
        assert label in text
    for state in ("completed", "oom", "timeout", "failed", "planned"):
        assert f'class="state {state}"' in text
    for run in loaded.runs:
        assert f'href="../runs/{run.run_id}/"' in text
    assert "no GPU (NVML: Driver Not Loaded)" in text
    assert "the last line is incomplete" in text
    specs = json.loads(support_report.unpack(text, "specs"))
    assert len(specs) == sum(tag == "figure" for tag, _ in Tags(text).found) > 0
    assert all("title" in spec["layout"]["xaxis"] for spec in specs.values())


def test_text_between_backticks_in_a_remark_is_shown_as_code(loaded, summarized, workspace):
    remarked = msgspec.structs.replace(summarized, remarks=["see `collect trace <b>` & `more"])
    text = page.draw_page(loaded, remarked, workspace.report, workspace.runs)
    assert "<p>see <code>collect trace &lt;b&gt;</code> &amp; `more.</p>" in text


def test_one_environment_is_shown_once_though_failed_runs_name_other_packages(tmp_path):
    """A failed run has no result, so only its run.json names its packages. A result does not name the version of Python."""
    workspace = Workspace(tmp_path)
    cells = [support.cell(), support.cell("ddp", 2), support.cell("fsdp2", 2)]
    support.keep(workspace, cells, repeats=1)
    support.completed(workspace, cells[0])
    runs = [support.failed(workspace, cells[1], 1, "ValueError: no"), support.failed(workspace, cells[2], 1, "ValueError: no")]
    for folder in runs:
        text = folder.run_json.read_text()
        folder.run_json.write_text(text.replace('"torch": "2.13.0"', '"python": "3.11.2", "torch": "2.13.0"'))
        assert "python" in folder.read_run().versions
    versions = dict(provenance.list_run_properties(load.load_matrix(workspace, None)))["Versions"]
    assert versions == ["python 3.11.2, shardlab 0.1.0, torch 2.13.0"]
    runs[1].run_json.write_text(runs[1].run_json.read_text().replace("2.13.0", "2.12.1"))
    versions = dict(provenance.list_run_properties(load.load_matrix(workspace, None)))["Versions"]
    assert versions == ["python 3.11.2, shardlab 0.1.0, torch 2.13.0", "python 3.11.2, shardlab 0.1.0, torch 2.12.1"]


HOSTILE = "</script><script>alert(1)</script>\"'&{{ 7*7 }}<img src=x onerror=alert(2)>"


def test_of_more_cells_than_a_page_holds_some_are_shown_and_the_files_have_all(workspace, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(truncation, "MAX_ENTRIES", 2)
    assert main(["summarize", "-v", "--workspace", str(workspace.path), "--out", str(tmp_path / "report")]) == 0
    said = "shown here: 2 of 6 cells, 2 of 3 loss comparisons, 2 of 4 runs that did not complete"
    told = capsys.readouterr().out
    assert said in told
    assert told.count("failed: fsdp2-gpt2-tiny") == 2
    assert "oom" not in told
    # both shown cells use torchrun; only a hidden cell uses another launcher
    assert "launcher torchrun" not in told.splitlines()[0]
    text = (tmp_path / "report" / "index.html").read_text()
    assert said in text
    assert "<b>6</b> cells" in text
    assert text.count('<details id="runs-') == 2
    assert len(msgspec.json.decode((tmp_path / "report" / "summary.json").read_bytes())["rows"]) == 6


def test_a_cell_whose_baseline_is_not_shown_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(truncation, "MAX_ENTRIES", 2)
    workspace = support.matrix(tmp_path)
    expansion = workspace.read_expansion(None)
    workspace.store_expansion(msgspec.structs.replace(expansion, cells=[*expansion.cells[1:], expansion.cells[0]]))
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    assert (workspace.report / "index.html").read_text().count(", compared with single ×1") == 1


def test_cells_that_claims_name_are_shown_before_others(summarized, monkeypatch):
    monkeypatch.setattr(truncation, "MAX_ENTRIES", 3)
    assert truncation.truncate_summary(summarized).rows == summarized.rows[:3]
    last = summarized.rows[-1].id
    named = ReportedResult(where="table 1", metric="state", cell={}, printed="oom", kind="measured", row=last)
    cut = truncation.truncate_summary(msgspec.structs.replace(summarized, reported=[named]))
    assert [row.id for row in cut.rows] == [*(row.id for row in summarized.rows[:2]), last]
    monkeypatch.setattr(truncation, "MAX_ENTRIES", 6)
    assert truncation.truncate_summary(summarized) == summarized


def test_hostile_names_are_text(tmp_path):
    workspace = support.matrix(tmp_path / HOSTILE.replace("/", "-"), title=HOSTILE)
    big = support.cell("ddp", 2, options={"note": HOSTILE, "<b>": 1})
    support.keep(workspace, [support.cell(), support.cell("ddp", 2), big], title=HOSTILE)
    support.completed(workspace, big)
    support.failed(workspace, big, 2, HOSTILE)
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    text = (workspace.report / "index.html").read_text().replace(support_report.packed_plotly(), "")
    tags = Tags(text)
    assert {tag for tag, _ in tags.found} & {"img"} == set()
    figures = sum(tag == "figure" for tag, _ in tags.found)
    # plotly, the data of the figures, our script, and a line for browsers that cannot decompress
    assert sum(tag == "script" for tag, _ in tags.found) == 4
    assert not [attrs for _, attrs in tags.found if any(name.startswith("on") for name in attrs)]
    assert "49<img" not in text
    specs = support_report.unpack(text, "specs")
    assert len(json.loads(specs)) == figures
    assert "<b>" not in specs
    assert "&lt;b&gt;" in specs, "plotly reads tags in labels"


def test_a_folder_that_is_not_a_report_is_left_alone(workspace, tmp_path, capsys):
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1.tex").write_text("words")
    assert main(["summarize", "--workspace", str(workspace.path), "--out", str(precious)]) == 2
    assert "chapter1.tex" in capsys.readouterr().err
    assert [path.name for path in precious.iterdir()] == ["chapter1.tex"]
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_an_error_midway_leaves_the_old_report(tmp_path, monkeypatch):
    workspace = support.matrix(tmp_path)
    arguments = ["summarize", "--workspace", str(tmp_path)]
    assert main(arguments) == 0
    old = (workspace.report / "summary.json").read_bytes()

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page, "render_page", full)
    assert main(arguments) == 1
    assert (workspace.report / "summary.json").read_bytes() == old
    assert not list(tmp_path.glob(".report*"))


KILLED_AT = """
import os, signal, sys
from collect import atomic_folder, write_report
from collect.cli import main
point = sys.argv.pop(1)
def killed_before(module, name, when=lambda *arguments: True):
    there = getattr(module, name)
    def instead(*arguments, **options):
        if when(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return there(*arguments, **options)
    setattr(module, name, instead)
if point == "first file": killed_before(write_report.files, "write_new")
if point == "page": killed_before(write_report.files, "write_atomic", lambda path, *_: path.name == "index.html")
if point == "exchange": killed_before(atomic_folder, "_exchange_folders")
if point == "old folder removed": killed_before(atomic_folder.shutil, "rmtree")
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def reported_twice(tmp_path_factory):
    """A workspace with a report. The next report will have another title."""
    workspace = support.matrix(tmp_path_factory.mktemp("killed"), title="the old title")
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    expansion = msgspec.structs.replace(workspace.read_expansion(None), title="the new title")
    workspace.store_expansion(expansion)
    return workspace


@pytest.mark.parametrize(
    ("point", "title"),
    [("first file", "the old title"), ("page", "the old title"), ("exchange", "the old title"),
     ("old folder removed", "the new title")],
)  # fmt: skip
def test_a_kill_leaves_the_complete_old_or_new_report(reported_twice, tmp_path, point, title):
    workspace = Workspace(tmp_path / "workspace")
    shutil.copytree(reported_twice.path, workspace.path)
    old = {path.relative_to(workspace.report): path.read_bytes() for path in workspace.report.rglob("*") if path.is_file()}
    command = ["summarize", "--workspace", str(workspace.path)]
    killed = subprocess.run([sys.executable, "-c", KILLED_AT, point, *command], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = workspace.path.glob(".report.*.tmp")
    assert json.loads((workspace.report / "summary.json").read_text())["title"] == title
    text = (workspace.report / "index.html").read_text()
    assert title in text
    assert text.rstrip().endswith("</html>")
    found = {path.relative_to(workspace.report): path.read_bytes() for path in workspace.report.rglob("*") if path.is_file()}
    assert found.keys() == old.keys()
    assert (found == old) is (title == "the old title")
    os.utime(left, (0, 0))
    with atomic_folder.replace_folder(workspace.report, frozenset({"index.html", "summary.json", "tables"})) as fresh:
        (fresh / "index.html").write_text("next")
    assert not list(workspace.path.glob(".report*")), "the next report removes what a killed one left, once it is old"
    assert [path.name for path in workspace.report.iterdir()] == ["index.html"]


def test_a_young_temporary_folder_of_another_command_is_not_removed(tmp_path):
    young = tmp_path / ".report.0a1b2c3d.tmp"
    young.mkdir()
    with atomic_folder.replace_folder(tmp_path / "report", frozenset()):
        pass
    assert young.exists()


def test_a_file_added_to_the_folder_during_its_replacement_is_kept(tmp_path):
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "index.html").write_text("old")

    def replace():
        with atomic_folder.replace_folder(folder, frozenset({"index.html"})) as fresh:
            (fresh / "index.html").write_text("new")
            (folder / "notes.txt").write_text("of a person")

    with pytest.raises(InputError, match=r"holds 'notes\.txt', which is not part of a report"):
        replace()
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"index.html": "old", "notes.txt": "of a person"}
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_folders_are_renamed_if_they_cannot_be_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    for content in ("old", "new"):
        with atomic_folder.replace_folder(tmp_path / "report", frozenset({"a"})) as fresh:
            (fresh / "a").write_text(content)
        assert (tmp_path / "report" / "a").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_a_link_in_the_reports_place_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "report").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is not a folder"), atomic_folder.replace_folder(tmp_path / "report", frozenset()):
        raise AssertionError("the block must not run")


def test_a_matrix_without_runs_is_reported(tmp_path, capsys):
    workspace = Workspace(tmp_path)
    support.keep(workspace, [support.cell(), support.cell("ddp", 2)])
    assert main(["summarize", "--workspace", str(tmp_path)]) == 0
    assert "planned" in capsys.readouterr().out
    text = (workspace.report / "index.html").read_text()
    assert "No run has telemetry." in text
    assert len(text) < 100_000  # a page without figures does not include plotly


def test_a_workspace_without_a_matrix_is_wrong_input(tmp_path, capsys):
    assert main(["summarize", "--workspace", str(tmp_path)]) == 2
    assert "no matrix was submitted here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_shape_of_the_table_does_not_depend_on_what_was_measured(loaded, tmp_path):
    """The exported table has the same columns for a workspace without runs."""
    workspace = Workspace(tmp_path)
    support.keep(workspace, [support.cell()])
    empty = flat_tables.make_summary_frame(summary.summarize(load.load_matrix(workspace, None), "single"))
    assert empty.schema == flat_tables.make_summary_frame(summary.summarize(loaded, "single")).schema


def test_labels_name_each_value_of_a_users_own_key_alike():
    cells = [{"strategy": "command (label)", "gpus": 1, "set.lr": lr, "precision": "bf16"} for lr in (1, 2)]
    assert columns.make_cell_labels(cells) == ["command (label) ×1, set lr 1", "command (label) ×1, set lr 2"]
    del cells[0]["set.lr"]  # the default of the script
    assert columns.make_cell_labels(cells) == ["command (label) ×1", "command (label) ×1, set lr 2"]


def test_accuracy_is_drawn_over_the_seconds_of_training(tmp_path):
    workspace = Workspace(tmp_path)
    validated, not_validated = support.cell(), support.cell("ddp", 2)
    support.keep(workspace, [validated, not_validated], repeats=1)
    folder = support.completed(workspace, validated)
    support.completed(workspace, not_validated)
    with LineWriter(folder.validation_file) as lines:
        for step, share in ((5, 0.5), (10, 0.75)):
            lines.write_record(ValidationRecord(schema=1, step=step, t_s=0.0, wall_s=0.0, loss=1.0, accuracy=share, items=8))
    found = load.load_matrix(workspace, None)
    drawn = [training.draw_accuracy(group) for group in figure.group_by_workload(found, summary.summarize(found, "single"))]
    (line,) = drawn[0].data
    assert line["y"] == [50.0, 75.0]
    assert line["x"][0] == pytest.approx(sum(support.step_ms(validated, 0, step, 1) for step in range(1, 6)) / 1000)


def test_epochs_are_drawn_with_their_running_average_and_spread(tmp_path):
    workspace = Workspace(tmp_path)
    with_epochs, without = support.cell(), support.cell("ddp", 2)
    support.keep(workspace, [with_epochs, without], repeats=2)
    for repeat in (1, 2):
        support.completed(workspace, with_epochs, repeat, found={"epoch_time_s": [4.0, 2.0, 3.0]})
        support.completed(workspace, without, repeat)
    found = load.load_matrix(workspace, None)
    (group,) = figure.group_by_workload(found, summary.summarize(found, "single"))
    dots, line = training.draw_epoch_time(group).data
    assert (dots["x"], dots["y"]) == ([1, 2, 3], [4, 2, 3])
    assert line["y"] == [4, 3, 3]
    (bars,) = training.draw_epoch_histogram(group).data
    assert sorted(bars["x"]) == [2, 2, 3, 3, 4, 4]
