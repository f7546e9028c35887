"""Follows docs/own-models.md as a reader would: the files of the page in an empty folder, its commands, and the report."""

import json

import pytest
from support_e2e import benches
from support_page import follow

pytestmark = pytest.mark.e2e
STRATEGIES = {"ddp", "fsdp2", "zero2", "tp", "pp-1f1b"}


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The workspace with the files of the page, after all commands of the page have run."""
    for bench in benches(tmp_path_factory.mktemp("own")):
        bench.printed = follow(bench, "own-models.md")
        yield bench


def test_the_page_leads_from_an_empty_folder_to_a_report_with_the_same_work_proven(followed):
    summary = json.loads((followed.path / "report" / "summary.json").read_text())
    rows = {row["cell"]["strategy"]: row for row in summary["rows"]}
    assert {row["cell"]["workload"] for row in rows.values()} == {"rings"}
    assert {name: row["states"] for name, row in rows.items()} == {name: {"completed": 1} for name in STRATEGIES}
    assert {name: row["same_work"]["verdict"] for name, row in rows.items()} == dict.fromkeys(STRATEGIES, "proven")
    for row in rows.values():
        sent = row["same_work"]["communication_bytes"]
        assert sent["counted"] == pytest.approx(sent["theory"], rel=0.02)
        assert row["metrics"]["throughput_per_s"]["unit"] == "points/s"


def test_the_metric_of_the_page_is_in_the_report(followed):
    summary = json.loads((followed.path / "report" / "summary.json").read_text())
    learned = [row["metrics"]["learned_nats"]["value"] for row in summary["rows"]]
    # The metric differs between strategies because Adam enlarges rounding errors. The largest difference seen was 1e-4.
    assert learned == pytest.approx([learned[0]] * len(STRATEGIES), abs=1e-2)
    assert "learned_nats" in followed.printed["collect metrics"]


def test_the_name_of_the_model_is_in_the_list_and_in_the_report(followed):
    assert "rings.py" in followed.printed["jobs workloads"]
    assert "rings" in followed.printed["collect summarize"]
    page = (followed.path / "report" / "index.html").read_text()
    assert all(f"{name}-rings-g2" in page for name in STRATEGIES)
