"""A managed Slurm site, from `provision init` to the report, by a user without root on another machine."""

import json
import re

import pytest
from support_practice import WHY
from support_site import PASSWORD, SECOND_FACTOR, Site, answered

from provision.practice.machine import WHEELS
from shardlab import cluster

pytestmark = [pytest.mark.line, pytest.mark.skipif(WHY is not None, reason=WHY or "")]
MATRIX = """\
schema: 1
name: site
defaults: {workload: gpt2-tiny, gpus: 2, steps: 3, global_batch_size: 8, prove: "off", optimizer: {name: sgd, lr: 0.1}}
axes: {strategy: [ddp, fsdp2], nnodes: [1, 2]}
baseline: ddp
"""


@pytest.fixture(scope="module")
def site(slurm, tmp_path_factory):
    made = Site(slurm, tmp_path_factory.mktemp("site"))
    try:
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module")
def described(site):
    """The site's cluster file as `provision init` prints it; the wheels replace the package index, which no node reaches."""
    text = site.run("provision", "init", "--site", "uni").stdout
    text = text.replace("modules: []", 'modules: ["python/3.11.2"]').replace(
        "environment:\n", f"environment:\n  wheelhouse: {WHEELS}\n"
    )
    (site.desk / "cluster.yaml").write_text(text)
    return text


@pytest.fixture(scope="module")
def ready(site, described):
    """The document of the first `provision`."""
    return json.loads(site.run("provision", "--json").stdout)


def test_the_site_describes_itself(site, described):
    made = cluster.load(site.desk / "cluster.yaml")
    assert (made.provider, made.login and made.login.host) == ("slurm", "uni")
    assert made.slurm is not None
    assert made.slurm.partition == site.slurm.cluster.slurm.partition
    assert made.gpus is not None
    assert (made.gpus.per_node, made.gpus.type) == (site.slurm.cluster.gpus.per_node, site.slurm.cluster.gpus.type)
    assert made.storage.shared == str(site.shared)
    assert re.search(r"modules: .*python/3\.11\.2", described)
    assert re.search(r"gpus-per-node: accepted", described)


def test_the_nodes_are_proven_by_a_job_and_nothing_lies_in_the_home(site, ready):
    assert ready["verified"] is True
    (check,) = ready["checks"]
    assert "works on 2 nodes" in check["says"]
    assert "all-reduce between 2 nodes (gloo) is exact" in check["says"]
    assert [path.name for path in site.home.iterdir()] == [".ssh"]
    (job,) = (site.shared / "proofs").glob("*/job")
    assert job.stat().st_uid == site.home.stat().st_uid


def test_a_second_run_changes_nothing_and_asks_for_no_job(site, ready):
    jobs = [path.read_text() for path in (site.shared / "proofs").glob("*/job")]
    again = json.loads(site.run("provision", "--json").stdout)
    assert (again["changes"], again["verified"]) == (0, True)
    assert [path.read_text() for path in (site.shared / "proofs").glob("*/job")] == jobs


def test_from_the_matrix_to_the_report(site, ready):
    (site.desk / "site.yaml").write_text(MATRIX)
    site.run("jobs", "submit", "--matrix", str(site.desk / "site.yaml"), "--wait")
    runs = json.loads(site.run("jobs", "status", "--json").stdout)["runs"]
    assert [run["state"] for run in runs] == ["completed"] * 4
    site.run("collect", "fetch")
    summary = json.loads(site.run("collect", "summarize", "--json").stdout)
    assert (site.desk / "report/index.html").exists()
    losses = {tuple(row["cell"]["strategy"] for row in [entry]): entry for entry in summary["rows"]}
    assert set(losses) == {("ddp",), ("fsdp2",)}
    script = next((site.desk / "runs").glob("*/job.sbatch")).read_text()
    assert f"{site.shared}/python-" in script
    assert [path.name for path in site.home.iterdir()] == [".ssh"]


def test_on_the_login_node_nobody_trains_by_mistake(site, ready):
    (python,) = site.shared.glob("python-*/bin/python")
    refused = site.as_user(f"{python} -P -m jobs submit --matrix quickstart --workspace {site.scratch}/here 2>&1; echo code=$?")
    assert "code=2" in refused
    assert "login node of a Slurm cluster" in refused
    assert "provision init > cluster.yaml" in refused
    text = site.as_user(f"{python} -P -m provision init --workspace {site.scratch}/here 2> {site.scratch}/remarks")
    assert "provider: slurm" in text


def test_a_second_factor_is_asked_for_once(site, ready):
    site.log_out()
    site.slurm.run("head", SECOND_FACTOR, root=True)
    try:
        refused = site.run("provision", "facts", code=1)
        assert "log in once on a terminal: ssh" in refused.stderr + refused.stdout
        code, shown, asked = answered(site.command("provision", "facts"), "assword:", PASSWORD, 300)
        assert (code, asked) == (0, 1), shown
        for words in (("provision", "plan"), ("jobs", "status"), ("collect", "fetch")):
            site.run(*words)
        site.log_out()
        code, shown, asked = answered(site.command("jobs", "status"), "assword:", PASSWORD, 300)
        assert (code, asked) == (0, 1), shown
        socket = next((site.cache / "shardlab/ssh").iterdir())
        assert socket.parent.stat().st_mode & 0o077 == 0
    finally:
        site.slurm.run("head", "rm /etc/ssh/sshd_config.d/second.conf; systemctl reload ssh", root=True)
