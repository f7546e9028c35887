"""Every output says that a run is a rehearsal. The runs here were planned for GPUs and started by torchrun, but their ranks
computed on CPUs, as at a site whose nodes have no GPUs. So only their results say that they are rehearsals."""

import argparse
import csv
import json
import re
import zipfile

import msgspec
import openpyxl
import polars as pl
import pytest
import support_collect as support
import support_traces

from collect import cli as collect
from collect import tracked_run
from collect.export import load_export_formats
from collect.reading.load import load_matrix
from collect.report import page
from collect.summary import summarize
from collect.watch.live_page import LivePage
from jobs import cli as jobs
from jobs.rendering import render
from shardlab.cluster import cluster
from shardlab.hardware import host
from shardlab.matrix.cell import AnyCell
from shardlab.runs.record import Event, Result, SameWork
from shardlab.runs.run import REHEARSAL_NOTE, is_rehearsal
from shardlab.runs.rundir import was_rehearsal
from shardlab.runs.trace_part import TRACE_STRATEGY
from shardlab.workspace.workspace import Workspace

WORD = re.compile(r"\brehearsals?\b")
CELLS = [support.cell(), support.cell("ddp", 2)]
RUN = f"{CELLS[1].name()}-r1"
CLAIM = {"id": "faster", "says": "DDP is faster.", "where": "table 1", "test": "throughput_per_s(strategy='ddp') >= 0"}
# The verbs whose output has no number of a run, and no plan for one.
WITHOUT_NUMBERS = {
    "collect": {"fetch", "import", "metrics", "sample", "watch"},  # of `watch`, the page has numbers
    "jobs": {"advise", "cancel", "launchers", "matrices", "retry", "strategies", "trace", "workloads"},
}
TERMINAL = {
    "collect summarize": ("--out", "OUT"),
    "collect verdicts": (),
    "collect explain": (CELLS[1].name(), "throughput_per_s"),
    "collect trace": (RUN,),
    "collect timeline": (RUN, "--perfetto", "OUT.json"),
    "collect compare": (".", "."),
    "collect history": (),
    "jobs status": (),
    "jobs logs": (RUN,),
}
PLANS = {"jobs plan": (), "jobs render": ("--out", "OUT"), "jobs submit": ("--dry-run",)}
FILES = {"collect export", "collect archive", "collect open", "collect track"}


PROVEN = SameWork(verdict="proven", why="against one process")
MATRIX = """\
schema: 1
name: m
defaults: {workload: gpt2-tiny, strategy: ddp, launcher: torchrun, global_batch_size: 4, steps: 2}
axes: {gpus: [1, 2]}
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    made = Workspace(tmp_path_factory.mktemp("site"))
    support.keep(made, CELLS, repeats=2, claims=[CLAIM])
    for cell in CELLS:
        for repeat in (1, 2):
            found = {"same_work": PROVEN, "rehearsal": True, "peak_memory_bytes": {"rss": 1}}
            folder = support.completed(made, cell, repeat, rehearsal=False, found=found)
            (folder.path / "trace").mkdir()
            support_traces.Rank(0).write(folder.path / "trace", gz=True)
    return made


@pytest.fixture
def call(workspace, tmp_path, monkeypatch, capsys):
    """Returns a function that carries out a command and returns its exit code, its output and its remarks."""

    def carry_out(command, *words, tree=workspace.path):
        name, verb = command.split()
        monkeypatch.chdir(workspace.path)
        words = [word.replace("OUT", str(tmp_path / "out")) for word in words]
        main = collect.main if name == "collect" else jobs.main
        code = main([verb, *words, "--workspace", str(tree)])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out, printed.err

    return carry_out


def verbs(parser):
    return next(set(action.choices) for action in parser._actions if isinstance(action, argparse._SubParsersAction))


def test_every_verb_is_walked_or_has_no_numbers():
    walked = {*TERMINAL, *PLANS, *FILES}
    for name, parser in (("collect", collect.parser()), ("jobs", jobs.parser())):
        assert {f"{name} {verb}" for verb in verbs(parser) - WITHOUT_NUMBERS[name]} == {
            command for command in walked if command.startswith(f"{name} ")
        }


@pytest.mark.parametrize("command", TERMINAL)
def test_the_terminal_marks_a_rehearsal(call, command):
    out, err = call(command, *TERMINAL[command])
    assert WORD.search(out + err)


@pytest.mark.parametrize("command", sorted({*TERMINAL} - {"jobs logs"}))  # `jobs logs` has no JSON document
def test_the_json_document_marks_a_rehearsal(call, command):
    document = json.loads(call(command, *TERMINAL[command], "--json")[0])
    marks = list(marks_in(document))
    assert marks
    assert all(marks)


def marks_in(document):
    """Yields the value of each key `rehearsal` or `rehearsals` of a document, at any depth."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key in ("rehearsal", "rehearsals"):
                yield value
            yield from marks_in(value)
    elif isinstance(document, list):
        for value in document:
            yield from marks_in(value)


@pytest.mark.parametrize("command", PLANS)
def test_a_matrix_planned_without_gpus_is_marked_as_a_rehearsal_before_it_runs(call, tmp_path, monkeypatch, command):
    without_gpus = msgspec.structs.replace(host.read_host(), gpus=None)
    monkeypatch.setattr(host, "read_host", lambda: without_gpus)
    file = tmp_path / "m.yaml"
    file.write_text(MATRIX)
    out, err = call(command, "--matrix", str(file), *PLANS[command], tree=tmp_path / "here")
    assert f"every cell is a {REHEARSAL_NOTE}" in out + err
    if command == "jobs plan":
        document = json.loads(call(command, "--matrix", str(file), "--json", tree=tmp_path / "here")[0])
        assert [cell["rehearsal"] for cell in document["cells"]] == [True, True]
    if command == "jobs render":
        runs = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/run.json")]
        assert [run["rehearsal"] for run in runs] == [True] * len(runs) != []


def of_csv(path):
    with path.open() as handle:
        return {row["rehearsal"] for row in csv.DictReader(handle)} == {"true"}


def of_xlsx(path):
    sheets = [list(sheet.values) for sheet in openpyxl.load_workbook(path)]
    marked = [rows for rows in sheets if "rehearsal" in rows[0]]
    return marked and all(row[rows[0].index("rehearsal")] is True for rows in marked for row in rows[1:])


READ = {
    ".csv": of_csv,
    ".parquet": lambda path: pl.read_parquet(path)["rehearsal"].all(),
    ".json": lambda path: json.loads(path.read_text())["rehearsal"],
    ".xlsx": of_xlsx,
    ".md": lambda path: REHEARSAL_NOTE in path.read_text(),
    ".tex": lambda path: "rehearsal" in path.read_text(),
}
OF_TRACKERS = {"mlflow", "tensorboard", "wandb"}
PICTURES = {"png", "svg"}
SNAPSHOTS = {"memory-viz"}  # a snapshot of a CUDA allocator, which no rehearsal has


@pytest.mark.parametrize("name", sorted(load_export_formats().keys() - PICTURES - OF_TRACKERS - SNAPSHOTS))
def test_every_file_of_an_export_marks_a_rehearsal(call, tmp_path, name):
    call("collect export", "--to", name, "--out", "OUT")
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert written
    for path in written:
        assert READ[path.suffix](path), path.name


@pytest.mark.parametrize("name", sorted(OF_TRACKERS))
def test_every_run_in_a_tracker_marks_a_rehearsal(call, tmp_path, name):
    call("collect export", "--to", name, "--out", "OUT")
    content = b"".join(path.read_bytes() + path.name.encode() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert content.count(b"rehearsal") >= 4, "once for each run"


def test_the_data_that_trackers_get_mark_a_rehearsal(workspace):
    loaded = load_matrix(workspace, None)
    tracked = [
        *tracked_run.list_tracked_runs(loaded, summarize(loaded, "single")),
        tracked_run.read_tracked_run(workspace, workspace.find_run_dir(RUN))[1],
    ]
    assert [(run.config["rehearsal"], run.tags[-1]) for run in tracked] == [(True, "rehearsal")] * 5


def test_a_tracker_that_follows_a_run_marks_a_rehearsal(call, workspace):
    call("collect track", RUN, "--to", "tensorboard")
    (file,) = (workspace.path / "track").rglob("events.*")
    assert b"rehearsal" in file.read_bytes()


def test_a_planned_rehearsal_is_compared_with_an_unplanned_rehearsal(call, tmp_path):
    planned = Workspace(tmp_path / "planned")
    support.keep(planned, CELLS)
    for cell in CELLS:
        support.completed(planned, cell, found={"same_work": PROVEN})
    document = json.loads(call("collect compare", str(planned.path), ".", "--json")[0])
    assert [bool(pair["metrics"]) for pair in document["pairs"]] == [True, True]


def test_every_figure_marks_a_rehearsal_in_its_picture(workspace):
    loaded = load_matrix(workspace, None)
    drawn = page.draw_figures(loaded, summarize(loaded, "single"))
    assert drawn
    assert all("(rehearsal)" in json.dumps(figure.spec["picture"]) for figure in drawn)


def test_the_report_and_its_archive_mark_a_rehearsal(call, tmp_path):
    call("collect summarize", *TERMINAL["collect summarize"])
    assert REHEARSAL_NOTE in (tmp_path / "out" / "index.html").read_text()
    remarks = json.loads((tmp_path / "out" / "summary.json").read_text())["remarks"]
    assert remarks[0] == REHEARSAL_NOTE, "no share, because all runs are rehearsals"
    call("collect archive", "--out", "OUT.shardlab.zip")
    with zipfile.ZipFile(tmp_path / "out.shardlab.zip") as archive:
        reports = [name for name in archive.namelist() if name.endswith(("report/summary.json", "report/index.html"))]
        assert len(reports) == 2
        assert all(REHEARSAL_NOTE in archive.read(name).decode() for name in reports)
    call("collect open", "OUT.shardlab.zip", "--out", "OUT.opened")
    assert REHEARSAL_NOTE in (tmp_path / "out.opened" / "report" / "index.html").read_text()


def test_the_perfetto_file_and_the_live_page_mark_a_rehearsal(call, workspace, tmp_path):
    call("collect timeline", *TERMINAL["collect timeline"])
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {f"{support.HOST} (rehearsal)"}
    document = json.loads(LivePage(workspace).refresh_document()[0])
    assert document["queue"].count('<td class="why">rehearsal') == 4
    assert [run["head"].count("completed: rehearsal") for run in document["runs"]] == [1]


def result(**fields):
    return Result(schema=1, run_id="r", state="completed", steps=1, unit="tokens", **({"rehearsal": False} | fields))


def met(backend):
    return [Event(schema=1, event="met", writer="rank-00000", wall_s=0.0, host="n", data={"backend": backend})]


@pytest.mark.parametrize(
    ("planned", "ended", "events", "expected"),
    [
        (True, result(peak_memory_bytes={"allocated": 1, "rss": 1}), [], False),  # planned for a CPU, and there were GPUs
        (False, result(rehearsal=True, peak_memory_bytes={"rss": 1}), [], True),  # planned for GPUs, and there were none
        (False, result(gpus=[], peak_memory_bytes={"rss": 1}), [], True),  # an older version did not mark torchrun on a CPU
        (False, result(peak_memory_bytes={"rss": 1}), [], True),  # a still older version did not name the GPUs either
        (False, result(gpus=["GPU-0"], peak_memory_bytes={"rss": 1}), [], False),
        (False, result(), [], False),  # nothing is known about the device
        (False, None, met("gloo"), True),  # a run without a result: the backend shows the device
        (True, None, met("nccl"), False),
        (False, None, [], False),
        (True, None, [], True),
        (True, None, [msgspec.structs.replace(met("")[0], data={})], True),  # an older version did not record the backend
    ],
)
def test_the_devices_of_a_run_decide_about_a_rehearsal_and_not_its_plan(planned, ended, events, expected):
    run = support.run_file(CELLS[1], rehearsal=planned)
    assert was_rehearsal(run, ended, events) is expected


def test_ranks_that_use_parameter_servers_use_gloo_on_gpus_too():
    cell = msgspec.structs.replace(CELLS[1], strategy="ps-sync", servers=1)
    assert not was_rehearsal(support.run_file(cell, rehearsal=False), None, met("gloo"))


def test_practice_nodes_and_tiny_twins_are_rehearsals():
    twin = msgspec.structs.replace(CELLS[1], rehearses=CELLS[1])
    assert is_rehearsal(twin, {}, on_cpu=False)
    assert is_rehearsal(CELLS[1], {"provider": "virtual"}, on_cpu=False)
    assert not is_rehearsal(CELLS[1], {"provider": "slurm"}, on_cpu=False)


NODES = "nodes: [{name: n0, host: 10.9.9.1, roles: [controller, worker]}]\n"


@pytest.mark.parametrize(
    ("text", "launcher", "expected"),
    [
        (f"provider: ssh\n{NODES}", "torchrun", True),
        (f"provider: ssh\n{NODES}gpus: {{per_node: 2}}\n", "torchrun", False),
        (f"provider: ssh\n{NODES}gpus: {{per_node: 2}}\n", "fork", True),
        ("provider: slurm\nstorage: {shared: /s}\nslurm: {}\ngpus: {per_node: 2, type: practice}\n", "torchrun", True),
        ("provider: slurm\nstorage: {shared: /s}\nslurm: {}\ngpus: {per_node: 2, type: a100}\n", "torchrun", False),
        (f"provider: ssh\n{NODES}", TRACE_STRATEGY, False),  # reads traces, and computes nothing on any device
    ],
)
def test_a_plan_knows_whether_its_ranks_will_have_gpus(tmp_path, text, launcher, expected):
    file = tmp_path / "cluster.yaml"
    file.write_text(f"schema: 1\nname: site\n{text}")
    source = render.make_render_context("m", cluster.load_cluster(file), Workspace(tmp_path))
    cell = msgspec.structs.replace(CELLS[1], launcher=launcher)
    if launcher == TRACE_STRATEGY:
        cell = AnyCell(workload="part-0", strategy=launcher, launcher=launcher, gpus=1, prove="off")
    assert render.make_run(cell, 1, 1, source).rehearsal is expected
