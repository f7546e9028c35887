"""Workloads that a workspace defines, in `collect`: compared by the digest of their code, named in claims, and reported."""

import itertools
import json

import msgspec
import pytest
import support_collect as support

from collect.cli import main
from shardlab.files import files
from shardlab.matrix.cell import Optimizer
from shardlab.plugins.plugin_kind import OwnWorkload
from shardlab.runs.record import SameWork
from shardlab.workspace.workspace import Workspace

CLAIM = {
    "id": "faster", "says": "DDP is faster.", "where": "ours",
    "test": "step_time_ms(strategy='ddp', workload='rings') < step_time_ms(strategy='single', workload='rings')",
}  # fmt: skip


def workspace(path, code):
    """A workspace that defines the workload `rings`. code: the digest of the workload's code.

    The runs of its cells `single` and `ddp` are completed, and its matrix has a claim about these cells.
    """
    made = Workspace(path)
    ours = {"workload": "rings", "workload_code": code, "seq_len": None}
    cells = [support.cell(**ours), support.cell("ddp", 2, **ours)]
    support.keep(made, cells, claims=[CLAIM])
    known = OwnWorkload(
        name="rings", summary="Rings.", code=code, file="/w/workloads/rings.py", unit="points", parameters=9,
        flops_per_unit=None, flops_source="", optimizer=Optimizer("sgd", 0.1),
    )  # fmt: skip
    proven = {"same_work": SameWork(verdict="proven", why="")}
    for what, repeat in itertools.product(cells, (1, 2, 3)):
        folder = support.completed(made, what, repeat, rehearsal=False, found=proven)
        files.write_json(folder.run_json, msgspec.structs.replace(folder.read_run(), own_workload=known))
    return made


def collect(capsys, *words):
    """The JSON document that a command of `collect` prints. words: the command line."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_two_models_of_one_name_are_never_compared_as_equal(tmp_path, capsys):
    one, same, other = (workspace(tmp_path / name, code) for name, code in (("a", "a" * 16), ("b", "a" * 16), ("c", "c" * 16)))
    assert len(collect(capsys, "compare", str(one.path), str(same.path))["pairs"]) == 2
    found = collect(capsys, "compare", str(one.path), str(other.path))
    assert found["pairs"] == []
    assert {"key": "workload_code", "a": ["a" * 16], "b": ["c" * 16]} in found["apart"]
    assert main(["compare", str(one.path), str(other.path)]) == 0
    assert f"no cell is in both A and B: workload_code is {'a' * 16} in A and {'c' * 16} in B" in capsys.readouterr().out


def test_a_claim_may_name_an_own_workload_and_the_report_has_its_digest(tmp_path, capsys):
    made = workspace(tmp_path, "a" * 16)
    (verdict,) = collect(capsys, "verdicts", "--workspace", str(made.path))["verdicts"]
    assert verdict["verdict"] == "reproduced"
    assert main(["summarize", "--workspace", str(made.path)]) == 0
    page = made.report.joinpath("index.html").read_text()
    assert f"rings: /w/workloads/rings.py, digest of its code {'a' * 16}" in page


def test_two_strategies_of_one_name_are_never_compared_as_equal(tmp_path, capsys):
    paths = []
    for name, code in (("a", "a" * 16), ("b", "a" * 16), ("c", "c" * 16)):
        made = Workspace(tmp_path / name)
        what = support.cell("ddp", 2, strategy_code=code)
        support.keep(made, [what], repeats=1)
        support.completed(made, what, rehearsal=False)
        paths.append(str(made.path))
    assert len(collect(capsys, "compare", *paths[:2])["pairs"]) == 1
    found = collect(capsys, "compare", paths[0], paths[2])
    assert found["pairs"] == []
    assert {"key": "strategy_code", "a": ["a" * 16], "b": ["c" * 16]} in found["apart"]


@pytest.mark.parametrize("changed", ["workload", "workload_code"])
def test_the_baseline_of_a_cell_is_never_another_model(tmp_path, capsys, changed):
    made = Workspace(tmp_path)
    ours = {"workload": "rings", "workload_code": "a" * 16, "seq_len": None}
    single, ddp = support.cell(**ours), support.cell("ddp", 2, **ours | {changed: "other" + "0" * 11})
    support.keep(made, [single, ddp], repeats=1)
    for what in (single, ddp):
        support.completed(made, what)
    rows = collect(capsys, "summarize", "--workspace", str(made.path))["rows"]
    assert [row["baseline"] for row in rows if row["cell"]["strategy"] == "ddp"] == [None]
