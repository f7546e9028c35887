"""Follows docs/own-strategies.md as a reader would: the files of the page in an empty folder, its commands, and the report."""

import json

import pytest
from support_e2e import benches
from support_page import files_of, follow

pytestmark = pytest.mark.e2e
PAGE = "own-strategies.md"


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The workspace with the files of the page, after all commands of the page have run."""
    for bench in benches(tmp_path_factory.mktemp("own")):
        bench.printed = follow(bench, PAGE)
        yield bench


def test_the_page_leads_from_an_empty_folder_to_a_report_with_the_same_work_proven(followed):
    summary = json.loads((followed.path / "report" / "summary.json").read_text())
    rows = {row["cell"]["strategy"]: row for row in summary["rows"]}
    assert {name: row["states"] for name, row in rows.items()} == {
        name: {"completed": 1} for name in ("ddp", "average", "average-rarely")
    }
    work = {name: row["same_work"] for name, row in rows.items()}
    assert {name: found["verdict"] for name, found in work.items()} == {
        "ddp": "proven", "average": "proven", "average-rarely": "other work",
    }  # fmt: skip
    for found in work.values():
        assert found["communication_bytes"]["counted"] == pytest.approx(found["communication_bytes"]["theory"], rel=1e-6)
    assert work["average"]["communication_bytes"]["counted"] == work["ddp"]["communication_bytes"]["counted"]
    assert "its ranks train apart between two averages" in followed.printed["collect summarize"]


def test_the_code_is_in_the_folder_of_the_run_and_the_report_names_it(followed):
    runs = {path.name.partition("-gpt2")[0]: path for path in (followed.path / "runs").iterdir()}
    assert not (runs["ddp"] / "strategies").exists()
    files = {path: text for path, text in files_of(PAGE).items() if path.startswith("strategies/")}
    assert len(files) == 2
    codes = set()
    for name in ("average", "average-rarely"):
        assert {path: (runs[name] / path).read_text() for path in files} == files
        codes.add(json.loads((runs[name] / "run.json").read_text())["cell"]["strategy_code"])
    (code,) = codes
    page = (followed.path / "report" / "index.html").read_text()
    assert f"average.py, digest of its code {code}" in page
    assert "strategies/average.py" in followed.printed["jobs strategies"]
