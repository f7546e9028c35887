"""Short names of cells and runs: which runs they name, and what is said about names of no run or of several."""

import json

import msgspec
import pytest
import support_collect as support

from collect.cli import main as collect
from jobs.cli import main as jobs
from shardlab.errors import InputError
from shardlab.matrix.command import StrategyLabel
from shardlab.workspace import handles
from shardlab.workspace.workspace import Workspace

CELLS = ["single-tiny-g1-aaaaaaaaaaaa", "ddp-tiny-g2-bbbbbbbbbbbb", "ddp-tiny-g2-fork-cccccccccccc"]
NUMBERS = handles.number_cells(CELLS)
SINGLE, DDP, FORK = CELLS
RUNS = sorted([f"{SINGLE}-r1", f"{DDP}-r1", f"{DDP}-r1-a2", f"{DDP}-r2", f"{FORK}-r1", "aside-dddddddddddd-r1"])


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("c1", [f"{SINGLE}-r1"]),
        ("c2", [f"{DDP}-r1-a2", f"{DDP}-r2"]),
        ("c2.1", [f"{DDP}-r1-a2"]),
        ("c2.2", [f"{DDP}-r2"]),
        (f"{DDP}-r1", [f"{DDP}-r1"]),
        ("single", [f"{SINGLE}-r1"]),
        ("ddp-tiny-g2-b", [f"{DDP}-r1-a2", f"{DDP}-r2"]),
        (f"{DDP}-r2", [f"{DDP}-r2"]),
        ("ddp-*-r1", [f"{DDP}-r1", f"{FORK}-r1"]),
    ],
)
def test_a_handle_a_beginning_a_pattern_and_an_id_name_the_expected_runs(name, runs):
    assert handles.match_run_ids(RUNS, [name], NUMBERS) == runs


def test_the_number_of_a_repeat_is_no_beginning_of_a_longer_number():
    runs = [f"{DDP}-r10", f"{DDP}-r11", f"{DDP}-r2-a10"]
    for name in (f"{DDP}-r1", f"{DDP}-r2-a1"):
        with pytest.raises(InputError, match="unknown run"):
            handles.match_run_ids(runs, [name], NUMBERS)
    assert handles.match_run_ids(runs, [f"{DDP}-r"], NUMBERS) == runs


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("c4", "c4: the last matrix .* has no such cell. Allowed: c1 to c3"),
        ("c2.3", f"c2.3: the cell {DDP} has no such run in this workspace. Allowed: c2.1, c2.2."),
        ("ddp", f"'ddp' is the beginning of 2 cells: c2 {DDP}, c3 {FORK}. Allowed: one of these"),
        ("c0", "unknown run 'c0'"),
        ("", "unknown run ''"),
    ],
)
def test_a_name_of_no_run_or_of_several_cells_is_refused_with_candidates(name, sentence):
    with pytest.raises(InputError, match=sentence):
        handles.match_run_ids(RUNS, [name], NUMBERS)


def test_a_run_has_the_handle_of_its_cell_and_its_repeat():
    assert [handles.make_handle(run, NUMBERS) for run in (f"{DDP}-r1-a2", "aside-dddddddddddd-r1", "no-run")] == [
        "c2.1",
        "",
        "",
    ]
    assert handles.find_cell_id("c3", NUMBERS) == FORK
    assert handles.find_cell_id(f"{FORK}-r1", NUMBERS) == f"{FORK}-r1"


def test_verbs_accept_the_handles_that_the_status_shows(tmp_path, capsys):
    workspace = support.matrix(tmp_path)
    assert jobs(["status", "--workspace", str(tmp_path)]) == 0
    handle, run = next(line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("c3.2"))
    assert Workspace.find(str(tmp_path)).find_run_dir(handle).run_id == run
    assert jobs(["status", handle, "--workspace", str(workspace.path)]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("c")] == [run]
    assert jobs(["logs", "c3", "--workspace", str(tmp_path)]) == 2
    assert "'c3' matches 3 runs: c3.1 " in capsys.readouterr().err


def test_json_and_the_page_have_handles_and_a_retry_says_what_it_leaves(tmp_path, capsys):
    workspace, cells = Workspace(tmp_path), [support.cell("ddp", 2), support.cell("fsdp2", 2)]
    support.keep(workspace, cells)
    for cell in cells:
        support.completed(workspace, cell, 1)
    place = ["--workspace", str(tmp_path)]
    assert jobs(["status", *place, "--json"]) == 0
    assert [run["handle"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["c1.1", "c2.1"]
    assert collect(["summarize", *place, "--json"]) == 0
    assert [row["handle"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["c1", "c2"]
    page = (workspace.report / "index.html").read_text()
    assert 'ddp</a><span class="spread"> c1</span>' in page
    assert "c2.1</th>" in page
    assert "relative to single" not in page  # no cell has the strategy single
    assert jobs(["retry", "c1", *place, "--trust"]) == 0
    assert "not retried: 1 completed. The states that are retried: --only failed," in capsys.readouterr().out


def test_a_plan_says_that_other_verbs_number_another_matrix(tmp_path, capsys):
    support.keep(Workspace(tmp_path), [support.cell("ddp", 2)])
    (tmp_path / "m.yaml").write_text(
        "schema: 1\nname: mine\ntitle: mine\ndefaults: {workload: gpt2-tiny, gpus: 1, launcher: fork, steps: 2, "
        "global_batch_size: 2, micro_batch_size: 2}\naxes: {strategy: [single]}\n"
    )
    assert jobs(["plan", "--matrix", str(tmp_path / "m.yaml"), "--workspace", str(tmp_path)]) == 0
    assert "c1, c2, ... name cells of the matrix submitted last" in "".join(capsys.readouterr())


def test_a_label_that_looks_like_a_handle_is_refused():
    assert msgspec.convert({"label": "c1x"}, StrategyLabel).label == "c1x"
    for label in ("c1", "c3.2"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"label": label}, StrategyLabel)
