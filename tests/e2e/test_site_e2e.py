"""A managed Slurm site, from `provision init` to the report. The user has no root rights there and works on another machine."""

import ipaddress
import json
import re

import pytest
from support_long import LONG
from support_practice import WHY
from support_site import ACCOUNT, PASSWORD, SECOND_FACTOR, Site, answered, package_index
from support_slurm import Desk

from provision.practice.base import find_wheels_folder
from provision.practice.machine import WHEELS_FOLDER
from shardlab.cluster import cluster
from shardlab.runs.rundir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(WHY is not None, reason=WHY or "")]
SLURM = re.compile(r"^slurm: .*\n", re.MULTILINE)
NO_INDEX = ["export PIP_INDEX_URL=http://127.0.0.1:9 PIP_RETRIES=0"]
MATRIX = """\
schema: 1
name: site
defaults: {workload: vgg16-tiny, gpus: 2, steps: 3, global_batch_size: 8, prove: "off", optimizer: {name: sgd, lr: 0.1}}
axes: {strategy: [ddp, fsdp2], nnodes: [1, 2]}
baseline: ddp
"""
# The cells that are compared: at the site, and on the same nodes as a cluster and over SSH. The long form compares all cells.
# In the short form, test_slurm_e2e.py compares ddp and fsdp2 on the cluster.
AT_SITE = (("ddp", 1), ("fsdp2", 1), ("ddp", 2), ("fsdp2", 2)) if LONG else (("fsdp2", 1), ("ddp", 2), ("fsdp2", 2))
ELSEWHERE = (("ddp", 2), ("fsdp2", 2)) if LONG else (("fsdp2", 2),)
OTHER_SEED = 7  # of a run in the workspace of the site that is not one of MATRIX


@pytest.fixture(scope="module")
def site(slurm, tmp_path_factory):
    made = Site(slurm, tmp_path_factory.mktemp("site"))
    try:
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module")
def described(site):
    """The site's cluster file, as `provision init` prints it. Nodes reach no package index, so a folder of wheels is added."""
    text = site.run("provision", "init", "--site", "uni").stdout
    text = text.replace("modules: []", 'modules: ["python/3.11.2"]').replace(
        "environment:\n", f"environment:\n  wheelhouse: {WHEELS_FOLDER}\n"
    )
    (site.desk / "cluster.yaml").write_text(text)
    return text


@pytest.fixture(scope="module")
def ready(site, described):
    """The JSON document of the first `provision`."""
    return json.loads(site.run("provision", "--json").stdout)


@pytest.fixture(scope="module")
def with_runs(site, ready):
    """The site, after the runs of the cells AT_SITE have ended there."""
    (site.desk / "site.yaml").write_text(MATRIX)
    site.run("jobs", "submit", "--matrix", str(site.desk / "site.yaml"), "--wait", "--where", selects(AT_SITE))
    return site


def selects(cells):
    """The expression that selects these cells of MATRIX: (strategy, number of nodes)."""
    return " or ".join(f"strategy == '{strategy}' and nnodes == {nnodes}" for strategy, nnodes in cells)


def test_the_site_describes_itself(site, described):
    made = cluster.load_cluster(site.desk / "cluster.yaml")
    assert (made.provider, made.login and made.login.host) == ("slurm", "uni")
    assert made.slurm is not None
    assert made.slurm.partition == site.slurm.cluster.slurm.partition
    assert made.gpus is not None
    assert (made.gpus.per_node, made.gpus.type) == (site.slurm.cluster.gpus.per_node, site.slurm.cluster.gpus.type)
    assert made.storage.shared == str(site.shared)
    assert re.search(r"modules: .*python/3\.11\.2", described)
    assert re.search(r"gpus-per-node: accepted", described)
    assert re.search(r"gpus: rejected.*--gpus is not allowed here", described)
    assert (made.slurm.account, made.slurm.gpu_request) == (ACCOUNT, "gpus-per-node")


def test_the_nodes_are_proven_by_a_job_and_nothing_lies_in_the_home(site, ready):
    assert ready["verified"] is True
    (check,) = ready["checks"]
    assert "works on 2 nodes" in check["says"]
    assert "all-reduce between 2 nodes (gloo) is exact" in check["says"]
    # Other tests may have run commands on the login node, which keep their state in .local.
    assert {path.name for path in site.home.iterdir()} - {".local"} == {".ssh"}
    jobs = list((site.shared / "proofs").glob("*/job"))
    assert {job.stat().st_uid for job in jobs} == {site.home.stat().st_uid}


def test_a_second_run_changes_nothing_and_asks_for_no_job(site, ready):
    jobs = [path.read_text() for path in (site.shared / "proofs").glob("*/job")]
    again = json.loads(site.run("provision", "--json").stdout)
    assert (again["changes"], again["verified"]) == (0, True)
    assert [path.read_text() for path in (site.shared / "proofs").glob("*/job")] == jobs


def test_the_inventory_has_the_compute_nodes_as_their_jobs_found_them(site, ready):
    inventory = json.loads((site.desk / ".shardlab/inventory.json").read_text())
    (kind,) = inventory["node_types"]
    assert (kind["count"], kind["gpus"]) == (2, [{"type": "practice", "count": 2}])
    assert [node["facts"]["host"] for node in kind["nodes"]] == ["work1", "work2"]
    assert all(node["facts"]["memory_bytes"] > 0 and node["rdma"] == [] for node in kind["nodes"])


def test_one_matrix_has_the_same_losses_at_a_site_on_a_cluster_and_over_ssh(with_runs, tmp_path):
    """The same commands, up to the report, give the same losses, bit by bit. Only the site runs cells on one node too."""
    site, trained = with_runs, {}
    for place in ("site", "root", "ssh"):
        desk = site
        if place != "site":
            (tmp_path / place).mkdir()
            desk = Desk(site.slurm, tmp_path / place)
        if place == "ssh":
            (desk.path / "cluster.yaml").write_text(SLURM.sub("", site.slurm.file.read_text()))
        folder = desk.desk if place == "site" else desk.path
        if place != "site":
            (folder / "site.yaml").write_text(MATRIX)
            desk.run("jobs", "submit", "--matrix", str(folder / "site.yaml"), "--wait", "--where", selects(ELSEWHERE))
        runs = json.loads(desk.run("jobs", "status", "--json").stdout)["runs"]
        states = [run["state"] for run in runs if run["cell"]["seed"] != OTHER_SEED]
        cells = AT_SITE if place == "site" else ELSEWHERE
        assert states == ["completed"] * len(cells)
        desk.run("collect", "fetch")
        summary = json.loads(desk.run("collect", "summarize", "--matrix", "site", "--json").stdout)
        made = [row["cell"] for row in summary["rows"] if row["n"] and row["cell"]["seed"] != OTHER_SEED]
        assert {(cell["strategy"], cell["nnodes"]) for cell in made} == set(cells)
        assert (folder / "report/index.html").exists()
        trained[place] = losses(folder)
        assert trained[place].keys() == set(cells)
    at_site = trained["site"]
    assert all(found == at_site[strategy, 2] for (strategy, nnodes), found in at_site.items() if nnodes == 1)
    for place in ("root", "ssh"):
        assert trained[place] == {cell: at_site[cell] for cell in ELSEWHERE}
    script = next((site.desk / "runs").glob("*/job.sbatch")).read_text()
    assert f"{site.shared}/python-" in script
    assert f"#SBATCH --account={ACCOUNT}" in script
    found = [path.relative_to(site.home) for path in site.home.rglob("*") if path.is_file()]
    assert {str(path.parent) for path in found if path.parts[0] != ".ssh"} == {".local/state/shardlab/workspaces"}


def test_the_plan_shows_from_the_desk_what_the_account_has_left(site, ready):
    (site.desk / "site.yaml").write_text(MATRIX)
    shown = json.loads(site.run("jobs", "plan", "--matrix", str(site.desk / "site.yaml"), "--json").stdout)["shares"][0]
    assert (shown["account"], shown["limit"]) == (ACCOUNT, 100.0)
    assert shown["resource"] == "gres/gpu"
    assert 0 < shown["left"] <= 100.0
    site.log_out()
    assert json.loads(site.run("jobs", "plan", "--matrix", str(site.desk / "site.yaml"), "--json").stdout)["shares"] == []


def losses(folder):
    """Returns the losses of all steps for each rank, by (strategy, number of nodes)."""
    made = {}
    for path in (folder / "runs").glob("[!.]*/run.json"):
        run = RunDir(path.parent)
        cell = run.read_run().cell
        if cell.seed == OTHER_SEED:
            continue
        made[cell.strategy, cell.nnodes] = [[record.loss for record in run.steps(rank).records] for rank in range(2)]
        assert all(len(rank) == 3 for rank in made[cell.strategy, cell.nnodes])
    return made


def test_a_request_that_the_site_rejects_is_reported_and_nothing_is_written(site, ready, tmp_path):
    file = tmp_path / "cluster.yaml"
    (tmp_path / "site.yaml").write_text(MATRIX)
    described = (site.desk / "cluster.yaml").read_text()
    before = sorted((site.desk / "runs").glob("*"))
    for made, words, key in (
        (re.sub(r"(?m)^(\s+)account: \S+", r"\1account: null", described), "this cluster needs an account", "slurm.account"),
        (
            described.replace("gpu_request: gpus-per-node", "gpu_request: gpus"),
            "--gpus is not allowed here",
            "slurm.gpu_request",
        ),
    ):
        assert made != described
        file.write_text(made)
        submit = ("jobs", "submit", "--cluster", str(file), "--matrix", str(tmp_path / "site.yaml"))
        refused = site.run(*submit, "--repeats", "2", code=2).stderr
        assert words in refused
        assert key in refused
    assert sorted((site.desk / "runs").glob("*")) == before


def test_a_site_without_accounting_is_provisioned(site, ready, tmp_path):
    """`provision init` says what it could not find out. `jobs` follows a run to its end by asking the controller only."""
    with site.without_accounting():
        text = site.run("provision", "init", "--site", "uni").stdout
        assert re.search(r"# .*ask.*account", text, re.IGNORECASE)
        more = MATRIX.replace("name: site", "name: more").replace("steps: 3", f"steps: 2, seed: {OTHER_SEED}")
        (tmp_path / "more.yaml").write_text(more)
        site.run(
            "jobs", "submit", "--matrix", str(tmp_path / "more.yaml"), "--where", "nnodes == 1 and strategy == 'ddp'", "--wait"
        )
        runs = json.loads(site.run("jobs", "status", "--json").stdout)["runs"]
        assert [run["state"] for run in runs if run["cell"]["seed"] == OTHER_SEED] == ["completed"]


def test_a_small_quota_is_noticed_before_anything_is_installed(site, ready, tmp_path):
    with site.small_folder("300m") as folder:
        file = tmp_path / "cluster.yaml"
        file.write_text((site.desk / "cluster.yaml").read_text().replace(str(site.shared), str(folder)))
        refused = site.run("provision", str(file), code=1)
        assert re.search(
            r"0\.\d GiB are free on \S*small, and the Python environment may take 2 GiB", refused.stdout + refused.stderr
        )
        assert site.slurm.run("head", f"ls {folder}", root=True) == ""


@pytest.fixture(scope="module")
def venv(site, ready):
    """The Python environment that `provision` installed at the site."""
    (made,) = site.shared.glob("python-*/venv")
    return made


@pytest.fixture(scope="module")
def image(site, venv):
    """An image for Charliecloud at the site, whose Python has the packages of the installed environment."""
    return site.make_image(venv)


def operation(said):
    """Returns the entry of the operation site-environment in a document."""
    return next(one for one in said["nodes"][0]["operations"] if one["name"] == "site-environment")


def jobs_of(site):
    """Returns the numbers of all jobs that the user has submitted."""
    return site.as_user("sacct -nX -o jobid -S 2020-01-01").split()


def trained(site, *nnodes):
    """Submits one run for each of these numbers of nodes and fetches the records. Returns the run folders."""
    (site.desk / "site.yaml").write_text(MATRIX.replace("[ddp, fsdp2]", "[ddp]").replace("[1, 2]", str(list(nnodes))))
    site.run("jobs", "submit", "--matrix", str(site.desk / "site.yaml"), "--wait")
    runs = json.loads(site.run("jobs", "status", "--json").stdout)["runs"]
    assert [run["state"] for run in runs] == ["completed"] * len(nnodes)
    site.run("collect", "fetch")
    return sorted((site.desk / "runs").iterdir())


def test_a_partial_purge_is_noticed(site, ready, venv):
    purged = next(venv.glob("lib/python3*/site-packages/torch/optim/sgd.py"))
    kept = purged.rename(site.scratch / "kept")
    try:
        assert json.loads(site.run("provision", "plan", "--json").stdout)["changes"] > 0
    finally:
        kept.rename(purged)
    assert json.loads(site.run("provision", "plan", "--json").stdout)["changes"] == 0


def test_an_own_environment_is_used_as_it_is(site, described, ready, venv):
    own = site.scratch / "own"
    site.as_user(f"cp -al {venv} {own}")
    used = site.at("use", described, {"use": str(own), "modules": ["python/3.11.2"]})
    packages = next(own.glob("lib/python3*/site-packages"))
    (record,) = packages.glob("submitit-*.dist-info")
    record.rename(site.scratch / "record")
    before = jobs_of(site)
    refused = json.loads(used.run("provision", "--json", code=1).stdout)
    assert f"environment.use: {own} lacks submitit. Install what is missing there." in operation(refused)["says"][-1]
    assert jobs_of(site) == before
    (site.scratch / "record").rename(record)
    (record,) = packages.glob("torch-*.dist-info")
    other = re.sub(r"\nVersion: \S+", "\nVersion: 2.99.0", (record / "METADATA").read_text())
    (record / "METADATA").unlink()  # this file is a hard link to the file in the tested environment, which must not change
    (record / "METADATA").write_text(other)
    files = sorted(own.rglob("*.py"))
    said = json.loads(used.run("provision", "--json").stdout)
    assert said["verified"] is True
    assert any("outside of the range" in sentence for sentence in operation(said)["says"])
    again = json.loads(used.run("provision", "--json").stdout)
    assert again["changes"] == 0
    assert "outside of the range" in operation(again)["says"][0]
    trained(used, 1)
    assert sorted(own.rglob("*.py")) == files


def test_ranks_train_in_a_container_and_the_desk_sends_the_other_packages(site, described, image, monkeypatch):
    made = site.at("container", described, {"container": str(image), "runtime": "charliecloud"}, NO_INDEX)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(find_wheels_folder()))
    said = json.loads(made.run("provision", "--json").stdout)
    says = operation(said)["says"]
    assert f"check the packages of environment.container: {image}: the tested versions" in says
    assert any(sentence.startswith("download the packages here, as the login node could not (") for sentence in says)
    assert said["verified"] is True
    assert "works on 2 nodes" in said["checks"][0]["says"]
    python = json.loads((made.desk / ".shardlab/inventory.json").read_text())["nodes"][0]["python"]
    program = 'import importlib.util as u; print([name for name in ("torch", "msgspec") if u.find_spec(name)])'
    assert site.as_user(f"{python} -c '{program}'") == "['msgspec']\n"
    for run in trained(made, 1, 2):
        records = [json.loads(path.read_text()) for path in run.glob("env/*.json")]
        assert records
        assert {record["system"] for record in records} == {"an image"}
    assert json.loads(made.run("provision", "--json").stdout)["changes"] == 0


def test_the_login_node_downloads_from_a_package_index(site, described, image, tmp_path):
    address = str(ipaddress.ip_network(site.slurm.cluster.lan.subnet)[-2])  # the address of this machine
    with package_index(find_wheels_folder(), tmp_path, address) as url:
        setup = [f"export PIP_INDEX_URL={url} PIP_TRUSTED_HOST={address}"]
        made = site.at("index", described, {"container": str(image), "runtime": "charliecloud"}, setup)
        said = json.loads(made.run("provision", "--only", "site-environment", "--json").stdout)
    assert "download the packages on the login node" in operation(said)["says"]
    assert "install the packages in a job" in operation(said)["says"]


def test_on_the_login_node_nobody_trains_by_mistake(site, ready):
    python = json.loads((site.desk / ".shardlab/inventory.json").read_text())["nodes"][0]["python"]
    refused = site.as_user(f"{python} -P -m jobs submit --matrix quickstart --workspace {site.scratch}/here 2>&1; echo code=$?")
    assert "code=2" in refused
    assert "login node of a Slurm cluster" in refused
    assert "provision init > cluster.yaml" in refused
    text = site.as_user(f"{python} -P -m provision init --workspace {site.scratch}/here 2> {site.scratch}/remarks")
    assert "provider: slurm" in text


def test_a_second_factor_is_asked_for_once(with_runs):
    site = with_runs  # without runs, `jobs status` asks no cluster
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
