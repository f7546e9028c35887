"""Metrics that a workspace defines: their values in the report, their errors, and no execution of code that is not trusted."""

import json
import math
from types import SimpleNamespace

import pytest
import support_collect as support
from support_trust import make_own

from collect.cli import main
from collect.loading.loaded_run import Quantity
from collect.metric import Metric
from collect.reading import own_metrics

METRIC = """\
from pathlib import Path
from _helper import twice
from collect.loading.loaded_run import Quantity
from collect.metric import Metric, MetricColumn
Path({marker!r}).write_text("executed")
def of_run(run):
    return Quantity(twice(run.result.steps), "steps")
METRICS = (
    Metric(name="double_steps", unit="steps", direction="neither", definition="Twice the steps.", of_run=of_run,
           column=MetricColumn("times", 99, "Double steps")),
)
"""


@pytest.fixture
def made(tmp_path):
    """Returns (a workspace with runs and a metric of its own, a path that exists only after the metric's code was executed)."""
    workspace, marker = support.matrix(tmp_path / "w"), tmp_path / "marker"
    metrics = workspace.path / "metrics"
    metrics.mkdir()
    (metrics / "mine.py").write_text(METRIC.format(marker=str(marker)))
    (metrics / "_helper.py").write_text("def twice(number):\n    return 2 * number\n")
    return workspace, marker


def summarized(workspace, capsys, *more, code=0):
    """The summary that `collect summarize --json` prints. code: the expected exit code."""
    assert main(["summarize", "--workspace", str(workspace.path), "--json", *more]) == code
    return json.loads(capsys.readouterr().out)


def test_an_own_metric_is_in_the_report_with_the_digest_of_its_code(made, capsys):
    workspace, _ = made
    make_own(workspace.path)
    summary = summarized(workspace, capsys)
    values = [row["metrics"]["double_steps"]["value"] for row in summary["rows"] if row["n"]]
    assert set(values) == {20}
    assert {row["n"] for row in summary["rows"] if "double_steps" in row["metrics"]} == {2, 3}
    (remark,) = [remark for remark in summary["remarks"] if "own metrics" in remark]
    assert f"double_steps by {workspace.path}/metrics/mine.py (digest " in remark
    assert "Double steps" in (workspace.report / "index.html").read_text()
    assert main(["metrics", "--workspace", str(workspace.path), "--json"]) == 0
    files = {entry["name"]: entry["file"] for entry in json.loads(capsys.readouterr().out)}
    assert files["double_steps"] == str(workspace.path / "metrics" / "mine.py")
    assert files["final_loss"] is None


def test_metrics_of_a_foreign_workspace_are_executed_only_with_trust(made, capsys):
    workspace, marker = made
    summary = summarized(workspace, capsys, code=1)
    assert any("mine.py, and nothing shows that" in remark for remark in summary["remarks"])
    assert main(["metrics", "--workspace", str(workspace.path)]) == 1
    assert "mine.py, and nothing shows that" in capsys.readouterr().err
    for words in (["verdicts"], ["export", "--to", "csv"], ["fetch"]):
        main([*words, "--workspace", str(workspace.path)])
    assert not marker.exists()
    capsys.readouterr()
    assert "double_steps" in summarized(workspace, capsys, "--trust")["rows"][0]["metrics"]
    assert marker.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0\n", "odd.py:1: ZeroDivisionError"),
        ("METRICS = 3\n", "odd.py: METRICS is no tuple of metrics"),
        (
            "{m}METRICS = (Metric(name='final_loss', {k}),)\n",
            "final_loss ships with shardlab and cannot be replaced",
        ),
        ("{m}METRICS = (Metric(name='<b>', {k}),)\n", "'<b>' cannot be the name of a metric"),
        (
            "{m}METRICS = (Metric(name='odd', {k}, reads=3),)\n",
            "`reads` of the metric odd: Expected `object | null`, got `int`",
        ),
        (
            "{m}METRICS = (Metric(name='odd', {k}, reads=Reads(steps='all of them')),)\n",
            "`reads` of the metric odd: Invalid enum value 'all of them'",
        ),
        ("{m}METRICS = (Metric(name='odd', {k}),)\n", "odd.py:3: KeyError: 'none'. So odd of"),
    ],
)
def test_a_faulty_file_is_named_and_the_others_work(made, capsys, text, said):
    workspace, _ = made
    make_own(workspace.path)
    head = "from collect.metric import Metric, Reads\ndef value(run):\n    return {}['none']\n"
    keys = "unit='s', direction='neither', definition='Odd.', of_run=value"
    (workspace.path / "metrics" / "odd.py").write_text(text.replace("{m}", head).replace("{k}", keys))
    summary = summarized(workspace, capsys, code=1)
    assert any(said in remark for remark in summary["remarks"])
    assert summary["rows"][0]["metrics"]["double_steps"]["value"] == 20
    assert "odd" not in summary["rows"][0]["metrics"]


@pytest.mark.parametrize(
    ("value", "is_known"),
    [
        (Quantity(1.5, "s"), True),
        (Quantity(0, "s"), True),
        (Quantity(1.5, "ms"), False),
        (Quantity(math.nan, "s"), False),
        (Quantity(math.inf, "s"), False),
        (Quantity(True, "s"), False),
        (Quantity("1", "s"), False),
        (1.5, False),
    ],
)
def test_an_own_metric_leaves_out_a_value_that_is_no_number_and_names_it(value, is_known):
    own = Metric(name="odd", unit="s", direction="neither", definition="Odd.", of_run=lambda run: value)
    faults = []
    assert own_metrics._compute_own_value("mine.py", own, SimpleNamespace(run_id="run-1"), faults) == (
        value if is_known else None
    )
    says = f"mine.py: odd of run-1 is {value}. Allowed: Quantity(NUMBER, 's'), or None if it is not known."
    assert faults == ([] if is_known else [says])
