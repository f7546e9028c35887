"""`collect history`: equal cells of several workspaces in the order of time, and the changes from one to the next."""

import json
import shutil

import pytest
import support_collect as support

from collect import cli
from shardlab.workspace.workspace import Workspace


def study(folder, created, *, factor=1.0, torch="2.13.0", seeds=(1,)):
    """Make a workspace with one completed repeat of a cell for each time in `created`.

    created: when each run was created. factor: multiplies the time of each step. torch: the version that the runs record.
    """
    workspace = Workspace(folder)
    cell = support.cell()
    support.keep(workspace, [cell])
    for repeat, time in enumerate(created, 1):
        run = support.completed(workspace, cell, repeat)
        text = json.loads(run.run_json.read_text())
        text["created"] = time
        text["versions"]["torch"] = torch
        run.run_json.write_text(json.dumps(text))
        result = json.loads(run.result.read_text())
        result["versions"] = text["versions"]
        run.result.write_text(json.dumps(result))
        if factor != 1.0:
            for file in run.path.glob("steps/*.jsonl"):
                records = [json.loads(line) for line in file.read_text().splitlines()]
                for record in records:
                    record["step_ms"] *= factor
                file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return workspace


def history(capsys, *words):
    code = cli.main(["history", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def places(tmp_path):
    june = study(tmp_path / "june", ["2031-06-01T08:00:00Z", "2031-06-01T10:00:00+02:00", "2031-06-02T08:00:00Z"])
    july = study(tmp_path / "july", ["2031-07-01T08:00:00Z"], factor=1.5, torch="2.14.0")
    return july.path, june.path


def test_periods_are_in_chronological_order_and_name_their_change(places, capsys):
    code, said = history(capsys, *places)
    (cell,) = said["cells"]
    first, second = cell["periods"]
    assert (code, first["place"], second["place"]) == (0, str(places[1]), str(places[0]))
    assert (len(first["runs"]), len(second["runs"])) == (3, 1)
    assert (first["first"], first["last"]) == ("2031-06-01T08:00:00+00:00", "2031-06-02T08:00:00+00:00")
    assert first["changed"] == []
    assert {one["what"]: (one["before"], one["after"]) for one in second["changed"]} == {"torch": (["2.13.0"], ["2.14.0"])}
    assert first["metrics"]["step_time_ms"]["ratio"] == 1.0
    expected = 1.5 * step_ms(1) / ((step_ms(1) + step_ms(2) + step_ms(3)) / 3)
    assert second["metrics"]["step_time_ms"]["ratio"] == pytest.approx(expected, rel=1e-3)


def test_a_property_that_one_run_does_not_record_starts_no_period(places, capsys):
    (run, *_) = Workspace(places[1]).list_run_dirs()
    for file in run.path.glob("env/*.json"):
        text = json.loads(file.read_text())
        file.write_text(json.dumps({**text, "gpu_driver": "550.54"}))
    _, said = history(capsys, *places)
    assert [len(period["runs"]) for period in said["cells"][0]["periods"]] == [3, 1]


def step_ms(repeat):
    """The mean time of the timed steps of a run in ms, computed by the function from which the test records are written."""
    return sum(support.step_ms(support.cell(), 0, step, repeat) for step in range(2, 12)) / 10


def test_a_copy_of_a_run_counts_once_and_a_range_selects(places, tmp_path, capsys):
    shutil.copytree(places[1], tmp_path / "copy")
    _, said = history(capsys, *places, tmp_path / "copy")
    assert [len(period["runs"]) for period in said["cells"][0]["periods"]] == [3, 1]
    _, said = history(capsys, *places, "--since", "2031-06-02", "--until", "2031-06-30")
    (period,) = said["cells"][0]["periods"]
    assert period["first"] == "2031-06-02T08:00:00+00:00"
    assert history(capsys, *places, "--since", "2040-01-01")[1]["cells"] == []


def test_an_archive_is_read_like_a_workspace(places, tmp_path, capsys):
    file = tmp_path / "june.shardlab.zip"
    assert cli.main(["archive", "--out", str(file), "--workspace", str(places[1])]) == 0
    capsys.readouterr()
    _, said = history(capsys, file, places[0])
    assert [period["place"] for period in said["cells"][0]["periods"]] == [str(file), str(places[0])]


def test_the_table_names_the_change_and_marks_rehearsals(places, capsys):
    assert cli.main(["history", *map(str, places)]) == 0
    said = capsys.readouterr()
    assert "torch: 2.13.0 -> 2.14.0" in said.out
    assert "Some runs are rehearsals" in said.err


def test_wrong_input_is_refused_and_a_damaged_matrix_is_named(places, tmp_path, capsys):
    for words, sentence in (
        ([str(tmp_path / "none")], "no such folder or file"),
        ([str(tmp_path)], "contains no matrix"),
        ([str(places[0]), "--since", "yesterday"], "Allowed: a date or a time in ISO 8601"),
    ):
        assert cli.main(["history", *words]) == 2
        assert sentence in capsys.readouterr().err
    (places[0] / ".shardlab/matrices/broken.json").write_text("{")
    code, said = history(capsys, *places)
    assert code == 1
    assert "broken" in said["skipped"][0]
    assert len(said["cells"]) == 1
