"""How often each cell of a matrix runs: the key `repeats` in the file, the cells that claims name, the option --repeats, and
the cost."""

import json

import pytest
import support_collect as support

from jobs.cli import main
from jobs.planning import repeats
from jobs.planning.resolve import resolve_cells
from shardlab.errors import InputError
from shardlab.matrix import matrix
from shardlab.runs.run import make_run_id
from shardlab.workspace.workspace import Workspace

TEXT = """\
schema: 1
name: small
defaults: {workload: gpt2-tiny, launcher: fork, global_batch_size: 4, seq_len: 16, steps: 3, optimizer: {name: sgd, lr: 0.1}}
zip: [{strategy: [single, ddp, fsdp2], gpus: [1, 2, 2]}]
repeats: {claims: 3, others: 1}
claims:
  - {id: a, says: DDP is faster., where: table 1, test: "throughput_per_s(strategy='ddp') > 2 * throughput_per_s(gpus=1)"}
"""
# How many runs each shipped study has, computed by hand from its claims. A cell that a claim names runs more often than others.
# In paper1, claims name 14 cells, which run 3 times, and 48 other cells run once: 14 x 3 + 48. In the same way,
# paper1-16-to-64-gpus: 6 x 3 + 6; paper2: 20 x 3 + 16; paper3: 45 x 2; paper4: 32 x 3 + 13; paper5: 16 x 2;
# paper3-faults: 8 x 2 + 4; paper3-communication: 9 x 2 + 18.
RUNS = {
    "paper1": 90,
    "paper1-16-to-64-gpus": 24,
    "paper2": 76,
    "paper3": 90,
    "paper4": 117,
    "paper5": 32,
    "quickstart": 24,
    "paper3-faults": 20,
    "paper3-communication": 36,
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(TEXT)
    return path


def planned(capsys, *words):
    assert main(["plan", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_cells_that_claims_name_run_more_often(file):
    found = matrix.load_matrix(file)
    cells = resolve_cells(found)
    counts = repeats.count_repeats(found.file, cells, None)
    assert {cell.strategy: counts[cell.name()] for cell in cells} == {"single": 3, "ddp": 3, "fsdp2": 1}
    assert [(cell.strategy, repeat) for cell, repeat in repeats.order_runs_by_repeat(cells, counts)] == [
        ("single", 1), ("ddp", 1), ("fsdp2", 1), ("single", 2), ("ddp", 2), ("single", 3), ("ddp", 3),
    ]  # fmt: skip
    assert set(repeats.count_repeats(found.file, cells, 2).values()) == {2}


def test_arguments_of_a_metric_choose_no_cell(file):
    """In a claim, `of` and `accuracy_pct` are arguments of a metric and not keys of a cell. If `jobs` treated them as keys, the
    claim would name no cell."""
    file.write_text(TEXT.replace("throughput_per_s(strategy='ddp')", "operator_ms(strategy='fsdp2', of='GEMM')"))
    found = matrix.load_matrix(file)
    cells = resolve_cells(found)
    counts = repeats.count_repeats(found.file, cells, None)
    assert {cell.strategy: counts[cell.name()] for cell in cells} == {"single": 3, "ddp": 1, "fsdp2": 3}


@pytest.mark.parametrize(("name", "runs"), RUNS.items())
def test_the_plan_of_a_study_says_how_many_runs_it_is(name, runs, tmp_path, capsys):
    plan = planned(capsys, "--matrix", name, "--workspace", tmp_path)
    assert plan["runs"] == sum(cell["repeats"] for cell in plan["cells"]) == runs


def test_a_rehearsal_repeats_the_twins_of_the_cells_that_claims_name(tmp_path, capsys):
    options = ("--matrix", "paper5", "--workspace", tmp_path, "--scale", "tiny")
    assert planned(capsys, *options)["runs"] == RUNS["paper5"]
    assert planned(capsys, *options, "--repeats", "1")["runs"] == 16


def test_the_plan_shows_both_numbers_of_repeats(file, tmp_path, capsys):
    assert main(["plan", "--matrix", str(file), "--workspace", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "2 cell(s) that claims name x 3 repeat(s) + 1 other(s) x 1 = 7 run(s)." in shown
    assert "in sequence" not in shown, "nothing ran here: no time is known"
    assert main(["plan", "--matrix", str(file), "--workspace", str(tmp_path), "--repeats", "2"]) == 0
    assert "3 cell(s) x 2 repeat(s) = 6 run(s)." in capsys.readouterr().out


def cost(workspace, cells, counts):
    return repeats.estimate_cost(
        cells, counts, repeats.compute_mean_recorded_s(workspace, cells, counts, {cell.name() for cell in cells})
    )


def test_the_cost_is_that_of_runs_that_completed_here(file, tmp_path):
    """Two runs of the cell took 3.2 s and 7.2 s from start to end, on average 5.2 s. So the planned three runs cost 3 x 5.2
    s."""
    workspace = Workspace(tmp_path)
    ddp, single = support.cell("ddp", 2), support.cell()
    counts = {ddp.name(): 3, single.name(): 1}
    assert cost(workspace, [ddp, single], counts) == repeats.EstimatedCost(0, 0.0, 0.0)
    for repeat, ended in ((1, 0.2), (2, 4.2)):
        folder = support.prepare(workspace, ddp, repeat)
        support.event(folder, "started", -2)
        support.finish(folder, ended)
    unfinished = support.prepare(workspace, single, 1)
    support.event(unfinished, "started", -2)
    found = cost(workspace, [ddp, single], counts)
    assert found.cells == 1
    assert found.hours == pytest.approx(3 * 5.2 / 3600)
    assert found.rank_hours == pytest.approx(2 * 3 * 5.2 / 3600)
    assert repeats.compute_mean_recorded_s(workspace, [ddp], counts, {single.name()}) == {}, (
        "runs on a CPU say nothing about runs on GPUs"
    )


def test_a_run_whose_events_cannot_be_read_has_no_known_time(file, tmp_path):
    workspace, cell = Workspace(tmp_path), support.cell()
    folder = support.prepare(workspace, cell, 1)
    support.event(folder, "started", -2)
    support.finish(folder, 0.2)
    assert cost(workspace, [cell], {cell.name(): 1}).cells == 1
    folder.events_file("another").symlink_to("/etc/hostname")
    assert cost(workspace, [cell], {cell.name(): 1}) == repeats.EstimatedCost(0, 0.0, 0.0)


def test_rendering_notes_the_runs_of_each_cell(file, tmp_path):
    assert main(["render", "--matrix", str(file), "--workspace", str(tmp_path)]) == 0
    found = {cell.cell.strategy: len(cell.runs) for cell in Workspace(tmp_path).read_expansion("small").cells}
    assert found == {"single": 3, "ddp": 3, "fsdp2": 1}
    names = {make_run_id(cell, 3) for cell in resolve_cells(matrix.load_matrix(file)) if cell.strategy != "fsdp2"}
    assert len(list((tmp_path / "runs").iterdir())) == 7
    assert names <= {path.name for path in (tmp_path / "runs").iterdir()}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("repeats: {claims: 0}", "repeats.claims: found the number 0"),
        ("repeats: {others: 2}", "repeats: the key 'claims' is missing"),
        ("repeats: {claims: 2, all: 1}", "repeats.all: unknown key"),
        ("repeats: often", "repeats: found the text 'often'"),
    ],
)
def test_wrong_repeats_are_refused_with_their_place(file, text, place):
    file.write_text(TEXT.replace("repeats: {claims: 3, others: 1}", text))
    with pytest.raises(InputError) as caught:
        matrix.load_matrix(file)
    assert place in str(caught.value)
