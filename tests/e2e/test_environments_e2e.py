"""Two Python environments of one cluster file on this machine: provisioned, verified, planned, trained in and compared."""

import json

import pytest
from support_e2e import benches, make_second_environment
from support_trust import make_own

pytestmark = pytest.mark.e2e
# A model that imports a package which only the second environment has.
MODEL = """\
import package_of_one_environment
import torch
from torch import nn

ITEMS = 64

def model(width: int = 4) -> nn.Module:
    return nn.Linear(4, width)

def batch(items):
    return torch.ones(len(items), 4), torch.zeros(len(items), dtype=torch.long)
"""


@pytest.fixture
def bench(tmp_path):
    (make_second_environment(tmp_path / "other") / "package_of_one_environment.py").touch()
    for made in benches(tmp_path):
        environments = {"other": {"use": f"{tmp_path}/other"}, "gone": {"use": f"{tmp_path}/gone"}}
        cluster = {"schema": 1, "name": "here", "provider": "local", "environments": environments}
        (made.path / "workloads").mkdir()
        (made.path / "workloads/mine.py").write_text(MODEL)
        (made.path / "cluster.yaml").write_text(json.dumps(cluster))
        make_own(made.path)
        yield made


def test_a_model_trains_in_the_environment_that_has_its_packages(bench, tmp_path):
    both = "axes: {strategy: [single], environment: [null, other]}"
    assert "Run first: provision CLUSTER.yaml" in bench.run("jobs", "submit", "--matrix", bench.matrix(both), code=2).stderr
    assert not bench.folders()
    document = bench.json("provision", code=1)
    checks = {check["check"]: check["passed"] for check in document["checks"]}
    names = ("torch", "torch in other", "all_reduce in other", "torch in gone")
    assert [checks[name] for name in names] == [True, True, True, False]
    environments = json.loads((bench.path / ".shardlab/inventory.json").read_text())["environments"]
    assert {name: entry["python"] for name, entry in environments.items()} == {"other": f"{tmp_path}/other/bin/python"}
    mine = bench.matrix("axes: {strategy: [single], workload: [mine], environment: [other]}")
    bench.run("jobs", "submit", "--matrix", mine, "--wait")
    bench.run("jobs", "submit", "--matrix", bench.matrix(both), "--wait")
    assert set(bench.states().values()) == {"completed"}
    pythons = {run.cell.environment: run.python for run in (folder.read_run() for folder in bench.folders())}
    assert pythons == {None: None, "other": f"{tmp_path}/other/bin/python"}
    assert sorted("-other-" in name for name in bench.states()) == [False, True, True]
    bench.run("collect", "summarize")
    rows = json.loads((bench.path / "report/summary.json").read_text())["rows"]
    assert {row["cell"]["environment"]: row["n"] for row in rows} == {None: 1, "other": 1}


def test_a_model_whose_environment_is_not_ready_is_refused_with_the_reason(bench):
    mine = bench.matrix("axes: {strategy: [single], workload: [mine], environment: [other]}")
    error = bench.run("jobs", "plan", "--matrix", mine, code=2).stderr
    assert "No module named 'package_of_one_environment'" in error
    assert "It was not executed in the environment other: not ready here." in error
