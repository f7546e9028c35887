"""A workspace of an earlier version has the same states, summary and tables as it had with that version."""

import csv
import json
import re

import pytest
import support_collect

import collect.cli
import jobs.cli

TIME = re.compile(r'(?m)^\d{4}-\d\d-\d\d \d\d:\d\d UTC$|"created_s": [\d.]+,')


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """(the workspace, the texts in the report of the earlier version: {path in the folder of the report: text})."""
    workspace = support_collect.earlier(tmp_path_factory.mktemp("earlier")).path
    return workspace, texts(workspace)


def texts(workspace):
    """The texts in the report of a workspace, without the time at which the report was made."""
    report = workspace / "report"
    paths = [path for path in report.rglob("*") if path.suffix in (".json", ".csv", ".md", ".tex")]
    return {str(path.relative_to(report)): TIME.sub("", path.read_text()) for path in paths}


def keep_known(value, earlier):
    """A value of a JSON document, without the keys that an earlier document does not have: later versions add metrics."""
    if isinstance(value, dict) and isinstance(earlier, dict):
        return {key: keep_known(value.get(key), one) for key, one in earlier.items()}
    if isinstance(value, list) and isinstance(earlier, list) and len(value) == len(earlier):
        return [keep_known(one, other) for one, other in zip(value, earlier, strict=True)]
    return value


def parse_text(path, text):
    """A text of a report as values: the document of a JSON file, the rows of a CSV file, else the text."""
    if path.endswith(".json"):
        return json.loads(text)
    return list(csv.DictReader(text.splitlines())) if path.endswith(".csv") else text


def test_an_earlier_workspace_gives_the_same_summary_and_tables(earlier):
    workspace, before = earlier
    assert collect.cli.main(["summarize", "--workspace", str(workspace)]) == 0
    assert len(before) == 9
    expected = {path: parse_text(path, text) for path, text in before.items()}
    # Since that version, tables also say which failures the matrix expects, and which runs profiled only some of their ranks.
    newer = re.compile(
        r' *"not all ranks were profiled.*",\n|- not all ranks were profiled.*\n|not all ranks were profiled.*?ranks\)\. '
    )
    after = {
        path: parse_text(path, newer.sub("", text.replace("1 oom (expected)", "1 oom")))
        for path, text in texts(workspace).items()
    }
    assert {path: keep_known(value, expected[path]) for path, value in after.items()} == expected


def test_an_earlier_workspace_gives_the_same_states(earlier, capsys):
    workspace, _ = earlier
    assert jobs.cli.main(["status", "--json", "--workspace", str(workspace)]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert sorted((run["cell"]["strategy"], run["state"], run["step"]) for run in runs) == [
        ("ddp", "completed", 6), ("ddp", "oom", None), ("fsdp1-full-shard", "completed", 6),
        ("fsdp2", "completed", 6), ("fsdp2", "completed", 6),
        ("ps-sync", "completed", 6), ("single", "completed", 6),
    ]  # fmt: skip
