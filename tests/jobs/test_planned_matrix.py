"""`shardlab.plan`: the plan of `jobs plan` in Python."""

import json

import pytest

import shardlab
from jobs.cli import main
from shardlab.errors import InputError

CLUSTER = """\
schema: 1
name: site
provider: slurm
gpus: {type: a100, per_node: 4, memory_gib: 40}
storage: {shared: /scratch}
slurm: {partition: gpu, max_nodes: 2, time: "01:00:00"}
"""


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "site.yaml").write_text(CLUSTER)
    return tmp_path / "site.yaml"


def test_a_plan_in_python_is_the_document_of_jobs_plan(cluster, tmp_path, capsys):
    planned = shardlab.plan("quickstart", cluster, workspace=tmp_path, where="gpus > 1", repeats=2, settings={"steps": 7})
    assert capsys.readouterr() == ("", "")
    words = [
        "--cluster",
        str(cluster),
        "--workspace",
        str(tmp_path),
        "--where",
        "gpus > 1",
        "--repeats",
        "2",
        "--set",
        "steps=7",
    ]
    assert main(["plan", "--matrix", "quickstart", "--json", *words]) == 0
    assert planned.document == json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site.yaml"]


def test_the_frame_of_planned_cells_has_keys_and_predictions(cluster, tmp_path):
    planned = shardlab.plan("quickstart", cluster, workspace=tmp_path)
    cells, entries = planned.cells(), planned.document["cells"]
    assert cells["cell"].to_list() == [entry["id"] for entry in entries]
    assert cells["strategy"].to_list() == [entry["cell"]["strategy"] for entry in entries]
    memory = [entry["predicted"]["memory_bytes"] for entry in entries]
    ranges = cells.select("memory_bytes_low", "memory_bytes", "memory_bytes_high").rows()
    assert ranges == [(entry["low"], entry["likely"], entry["high"]) for entry in memory]
    assert cells["fits"].to_list() == [entry["predicted"]["fits"] for entry in entries]
    assert "yes" in cells["fits"]


def test_a_notebook_shows_the_plan_as_a_terminal_does(tmp_path):
    shown = shardlab.plan("quickstart", workspace=tmp_path, settings={"optimizer": {"name": "sgd", "lr": 1e-05}})._repr_html_()
    assert "8 cell(s) x 3 repeat(s) = 24 run(s)." in shown
    assert "given by --set" in shown


def test_a_wrong_argument_raises_the_sentence_of_the_command(tmp_path):
    with pytest.raises(InputError, match="unknown matrix 'quickstat'"):
        shardlab.plan("quickstat", workspace=tmp_path)
    with pytest.raises(InputError, match=r'--set steps="x": defaults\.steps: found'):
        shardlab.plan("quickstart", workspace=tmp_path, settings={"steps": "x"})
