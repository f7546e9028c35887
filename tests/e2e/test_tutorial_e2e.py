"""Follows docs/tutorial-laptop.md as a reader would: writes the matrix of the page into an empty folder, runs the commands of
the page, and checks the report."""

import json
import re
import shlex
from pathlib import Path

import pytest
from support_document_keys import NAMED, wrong
from support_e2e import benches
from support_long import LONG

pytestmark = pytest.mark.e2e
PAGE = (Path(__file__).parents[2] / "docs" / "tutorial-laptop.md").read_text()
OURS = ("provision", "jobs", "collect")
# Described files that no run of the tutorial writes.
OTHER_FILES = ("runs/RUN_ID/validation.jsonl", "runs/RUN_ID/memory/rank-RRRRR.json", "runs/RUN_ID/checksums/rank-RRRRR.jsonl")


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The workspace after all commands of the page have run. The page runs each cell three times; the short form of this test
    runs each cell once."""
    for bench in benches(tmp_path_factory.mktemp("tutorial")):
        for name, text in re.findall(r"^```yaml title=\"(.*?)\"\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
            (bench.path / name).write_text(text if LONG else text.replace("repeats: 3", "repeats: 1"))
        bench.printed = {}
        for line in (line.strip() for line in PAGE.splitlines() if line.startswith("    ")):
            command, _, kept = line.partition(" > ")
            if command.split(" ")[0] in OURS:
                bench.printed[line] = bench.run(*shlex.split(command), cwd=bench.path).stdout
                if kept:
                    (bench.path / kept).write_text(bench.printed[line])
        yield bench


def test_the_tutorial_ends_with_a_report_of_equal_work(followed):
    assert len(followed.printed) == 6
    summary = json.loads((followed.path / "report" / "summary.json").read_text())
    assert {row["same_work"]["verdict"] for row in summary["rows"]} == {"proven"}
    assert len(summary["rows"]) == 5
    assert {tuple(row["states"].items()) for row in summary["rows"]} == {(("completed", 3 if LONG else 1),)}


@pytest.mark.parametrize("name", [name for name in NAMED if name.endswith((".json", ".jsonl"))])
def test_the_files_have_the_keys_that_are_described(followed, name):
    """docs/reference/json-files.md describes the keys of each file. The tutorial writes all described files except three, which
    exist only if a cell, or a script, asks for them."""
    pattern = re.sub(r"RUN_ID|WRITER|RRRRR|HOST", "*", name)
    paths = sorted(followed.path.glob(pattern))
    assert bool(paths) == (name not in OTHER_FILES)
    for path in paths:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        assert [said for line in lines for said in wrong(name, json.loads(line))] == []


def test_submitting_again_prints_the_runs_that_are_described(followed):
    assert (
        wrong(
            "jobs submit, jobs retry, jobs trace",
            followed.json("jobs", "submit", "--matrix", str(followed.path / "first.yaml")),
        )
        == []
    )


def test_the_commands_print_the_output_of_the_tutorial(followed):
    assert (
        "excluded: strategy=single, gpus=2: a single process is one rank" in followed.printed["jobs plan --matrix ./first.yaml"]
    )
    assert "verified: ready to train" in followed.printed["provision"]
