"""Ranks in a container: the scripts that start them, a real container of Charliecloud, and packages that the image lacks."""

import json
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path, PurePosixPath
from typing import ClassVar

import msgspec
import pytest
from support_container import AS_USER, USER, UserNode, make_image, record_packages, why_not
from support_e2e import HANG_S
from support_golden import GOLDEN, run_of, same_as_golden

import templates
from jobs.rendering import render
from provision import software
from provision.checks import node_types
from provision.fact import FactAnswers, Unanswered
from provision.facts.environment import ENVIRONMENT, InstalledEnvironment
from provision.facts.node_types import GpuGres, NodeType
from provision.nodes.login_node import LocalLoginNode
from provision.operation import Nothing, Site, Target
from provision.operations import site_environment
from provision.providers import slurm
from provision.site import python
from provision.site.package_check import PackageCheck
from shardlab.cluster import cluster, container
from shardlab.remote.remote import CommandOutput
from shardlab.runs.run import World

TEXT = """\
schema: 1
name: site
provider: slurm
slurm: {partition: gpu, account: abc_g}
gpus: {per_node: 4, type: a100}
storage: {shared: /scratch/alice/shardlab}
data: {path: /project/data}
environment: {modules: [containers/1.3], container: /project/torch.sif, runtime: RUNTIME}
"""
FOLDER = PurePosixPath("/scratch/alice/shardlab/python-0123456789ab")
# Prints what a rank sees. The script in the container starts the interpreter a second time, as launchers do.
SEEN = """\
import json, os, subprocess, sys
again = 'import os; print(os.environ["NCCL_DEBUG"], os.environ["OMP_NUM_THREADS"])'
environment = {**os.environ, 'NCCL_DEBUG': 'of the task'}
child = subprocess.run([sys.argv[1], '-c', again], env=environment, capture_output=True, text=True)
print(json.dumps({
    'variables': dict(os.environ), 'cwd': os.getcwd(), 'path': sys.path, 'root': sorted(os.listdir('/')), 'child': child.stdout,
    'uid': os.getuid(),
}))
open('written', 'w').write('by a rank')
"""


class LoginWithoutJobs(UserNode):
    """A login node on which Slurm reports no waiting job."""

    def run(self, argv, **options):
        return CommandOutput(0, "", "") if "waiting" in argv else super().run(argv, **options)


def described(tmp_path: Path, text: str) -> cluster.Cluster:
    (tmp_path / "cluster.yaml").write_text(text)
    return cluster.load_cluster(tmp_path / "cluster.yaml")


@pytest.fixture
def folder():
    """A folder that a user without rights can enter and write to."""
    # not in /tmp, because Charliecloud mounts a folder of its own at /tmp
    made = Path(tempfile.mkdtemp(prefix="shardlab-container-", dir="/var/tmp"))
    made.chmod(0o755)
    (made / "shared").mkdir()
    shutil.chown(made / "shared", USER, USER)
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("runtime", ["apptainer", "charliecloud", "pyxis"])
def test_the_scripts_of_a_site_with_a_container(tmp_path, runtime):
    site = described(tmp_path, TEXT.replace("RUNTIME", runtime))
    for write in python.make_script_changes(site, FOLDER, "ba9876543210"):
        same_as_golden(f"site/{runtime}-{Path(write.path).name}.sh", write.content.decode())


def test_srun_mounts_the_disk_of_the_node_if_data_is_copied_there(tmp_path, monkeypatch):
    """In a container that pyxis starts, /tmp is in memory, so the node's disk must be mounted."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    site = described(tmp_path, TEXT.replace("RUNTIME", "pyxis").replace("data: {", "data: {stage: node, "))
    run = msgspec.structs.replace(run_of("torchrun"), scheduler="slurm", limit_s=600)
    for stage, options in (("node", [f",{tmp_path}:{tmp_path}", "--no-container-remap-root"]), (None, [])):
        text = render.render_script(msgspec.structs.replace(run, data_stage=stage), Path("/runs/a"), site, None)
        command = container.replace_node_disk(
            shlex.split(text.rpartition(" -- ")[0].partition("jobs.supervisor.attempt . -- ")[2])
        )
        assert not any("$SHARDLAB" in word for word in command)
        expected = "/scratch/alice/shardlab:/scratch/alice/shardlab,/project/data:/project/data"
        mounts, *more = options or [""]
        assert f"--container-mounts={expected}{mounts}" in command
        assert [word for word in command if "remap" in word] == more


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
@pytest.mark.parametrize("launcher", ["torchrun", "submitit"])
def test_the_script_of_a_run_starts_its_ranks_in_the_container(tmp_path, monkeypatch, runtime, launcher):
    """The supervisor runs outside the container, because Slurm's commands are there."""
    monkeypatch.setenv("SHARDLAB_PYTHON", f"{FOLDER}/bin/python")
    site = described(tmp_path, TEXT.replace("RUNTIME", runtime))
    run = run_of(launcher)
    cell = msgspec.structs.replace(run.cell, gpus=8, dp=8, nnodes=2)
    run = msgspec.structs.replace(run, scheduler="slurm", cell=cell, world=World(2, 4, 8), limit_s=600)
    folder = Path("/scratch/alice/shardlab/workspaces/study/runs") / run.run_id
    same_as_golden(f"site/{runtime}-{launcher}.sbatch", render.render_script(run, folder, site, None))


class LoginThatRecords(LocalLoginNode, eq=False):
    """A login node that only records which files would be written."""

    written: ClassVar[dict[str, str]] = {}

    def run(self, argv, **options):
        room = f"{100 << 30} 1000000 /scratch\n"
        return CommandOutput(0, room if "room" in argv else "", "")

    def put(self, content, path, *, mode, owner):
        self.written[path] = content.decode()
        return CommandOutput(0, "", "")


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_node_is_proven_in_the_container(tmp_path, runtime):
    site = described(tmp_path, TEXT.replace("RUNTIME", runtime))
    node = LoginThatRecords(name="login", python=f"{FOLDER}/bin/python")
    kind = NodeType("gpu", 2, 64, 1000, (GpuGres("a100", 4),), ())
    folder = "/scratch/alice/shardlab/proofs/0"
    assert node_types._submit_proof_job(site, Target(node, FactAnswers(node)), folder, kind, "") is None
    same_as_golden(f"site/{runtime}-prove.sh", node.written[f"{folder}/prove.sh"])


def test_the_packages_of_an_image_that_only_srun_starts_are_listed_in_a_job(tmp_path):
    site = described(
        tmp_path, TEXT.replace("RUNTIME", "pyxis").replace("/project/torch.sif", "registry.example.org#lab/torch:2")
    )
    node = LoginThatRecords(name="login", python=f"{FOLDER}/bin/python")
    target = Target(node, FactAnswers(node))
    target.facts.answers[ENVIRONMENT.name] = InstalledEnvironment()
    changes = site_environment.plan(Site(site, None, [target]), target)
    (check,) = [change for change in changes if isinstance(change, PackageCheck)]
    same_as_golden("site/pyxis-list_packages.sh", check.argv[-1])


@pytest.mark.parametrize("path", sorted((GOLDEN / "site").iterdir()), ids=lambda path: path.name)
def test_bash_can_read_a_script(path):
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=True).stderr == ""


def test_all_variables_of_a_job_script_arrive_in_the_container(tmp_path):
    """The scripts save these variables, because an image may set variables of the same names."""
    script = python.render_script(described(tmp_path, TEXT.replace("RUNTIME", "pyxis")), FOLDER, "0").decode()
    saved = set(re.search(r"for name in ([A-Z_ \\\n]+)", script)[1].replace("\\", "").split())
    for path in (templates.TEMPLATES_FOLDER / "launch").glob("slurm.sbatch.j2"):
        set_there = set(re.findall(r"^export ([A-Z_]+)=", path.read_text(), re.MULTILINE))
        assert {name for name in set_there if not name.startswith("SHARDLAB_")} - {"PYTHONPATH"} == saved - {"TMPDIR"}


@pytest.mark.parametrize(
    "key", ["container: /other.sif", "data: {path: /elsewhere}", "runtime: charliecloud", "gpus: {per_node: 0}"]
)
def test_the_folder_of_the_environment_is_another_one_for_another_container(tmp_path, key):
    text = TEXT.replace("RUNTIME", "apptainer")
    name = key.partition(":")[0]
    changed = re.sub(rf"{name}: (\{{[^}}]*\}}|[^,}}\n]*)", key, text, count=1)
    assert changed != text
    assert slurm.find_environment_folder(described(tmp_path, text)) != slurm.find_environment_folder(
        described(tmp_path, changed)
    )


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_rank_runs_in_a_container_of_charliecloud(folder):
    image, shared, data = folder / "image", folder / "shared", folder / "data"
    data.mkdir()
    (data / "set").touch()
    make_image(image, [shared, data], {"OMP_NUM_THREADS": "77", "OF_IMAGE": "yes", "NCCL_DEBUG": "of the image"})
    text = (
        TEXT.replace("RUNTIME", "charliecloud")
        .replace("modules: [containers/1.3], ", "")
        .replace("/project/torch.sif", str(image))
    )
    site = described(folder, text.replace("/scratch/alice/shardlab", str(shared)).replace("/project/data", str(data)))
    environment = shared / "python-0"
    (environment / "bin").mkdir(parents=True)
    for write in python.make_script_changes(site, PurePosixPath(environment), "0"):
        Path(write.path).write_bytes(write.content)
        Path(write.path).chmod(0o755)
    rank_python = str(environment / "bin/rank-python")
    given = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "SHARDLAB_SOURCE": "/the/copy",
             "PYTHONHOME": "/no", "LD_LIBRARY_PATH": "/nowhere", "SLURM_PROCID": "3", "NCCL_DEBUG": "of the job"}  # fmt: skip
    done = subprocess.run(
        [*AS_USER, rank_python, "-c", SEEN, rank_python], cwd=shared, env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    variables = seen["variables"]
    arrived = {
        "OMP_NUM_THREADS": "1", "NCCL_DEBUG": "of the job", "OF_IMAGE": "yes", "SLURM_PROCID": "3", "PYTHONPATH": "/the/copy",
        "XDG_CACHE_HOME": f"{shared}/cache",
    }  # fmt: skip
    assert {name: variables.get(name) for name in arrived} == arrived
    assert "LD_LIBRARY_PATH" not in variables
    assert (seen["cwd"], seen["uid"], seen["child"]) == (str(shared), USER, "of the task 1\n")
    assert "ch" in seen["root"]
    assert "work" not in seen["root"]
    assert (shared / "written").read_text() == "by a rank"
    listed = subprocess.run([*AS_USER, rank_python, "-c", f"import os; print(os.listdir('{data}'))"], cwd=shared, env=given,
                            capture_output=True, text=True, check=True)  # fmt: skip
    assert listed.stdout == "['set']\n"
    assert variables["TMPDIR"] == "/tmp"
    assert "TMPDIR" not in given
    disk = folder / "disk"
    disk.mkdir()
    shutil.chown(disk, USER, USER)
    program = "import os; open(os.environ['TMPDIR'] + '/copy', 'w').write('data')"
    subprocess.run([*AS_USER, rank_python, "-c", program], cwd=shared, env=given | {"TMPDIR": str(disk)}, check=True)
    assert (disk / "copy").read_text() == "data"
    done = subprocess.run([*AS_USER, rank_python, "-c", "pass"], cwd=shared, env=given | {"TMPDIR": "/nowhere"}, check=False)
    assert done.returncode == 0


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_the_packages_of_an_image_are_checked_before_anything_is_sent_to_slurm(folder):
    image, shared = folder / "image", folder / "shared"
    make_image(image, [shared], {})
    record_packages(image, torch="1.4.0", deepspeed=None)
    text = (
        TEXT.replace("RUNTIME", "charliecloud")
        .replace("modules: [containers/1.3], ", "")
        .replace("/project/torch.sif", str(image))
    )
    site = described(folder, text.replace("/scratch/alice/shardlab", str(shared)).replace("/project/data", "/opt"))
    node = LoginWithoutJobs(name="login", python=f"{slurm.find_environment_folder(site)}/bin/python")
    target = Target(node, FactAnswers(node))
    target.facts.answers[ENVIRONMENT.name] = InstalledEnvironment()
    changes = site_environment.plan(Site(site, None, [target]), target)
    says = [change.description for change in changes]
    place = says.index(f"check the packages of environment.container: {image}")
    assert not any("job" in sentence for sentence in says[: place + 1])
    for change in changes[:place]:
        change.make(node)
    with pytest.raises(Unanswered, match=r"cannot be listed: .*can't mkdir: .*/image/opt: .*The image must contain .* /opt"):
        changes[place].make(node)
    (image / "opt").mkdir()
    with pytest.raises(Unanswered, match=r"container: \S+ lacks deepspeed\. Install what is missing there"):
        changes[place].make(node)
    record = next((image / "usr/lib").glob("python3*/fabric-*.dist-info"))
    shutil.copytree(record, record.with_name("deepspeed-0.1.dist-info"))
    (record.with_name("deepspeed-0.1.dist-info") / "METADATA").write_text("Name: deepspeed\nVersion: 0.1\n")
    changes[place].make(node)
    assert "torch 1.4.0 (tested: " in changes[place].description
    assert "outside of the range" in changes[place].description
    answer = node.run(ENVIRONMENT.command(node.python), timeout_s=HANG_S)
    there = ENVIRONMENT.parse(answer.stdout)
    assert there.differences is not None
    assert "torch 1.4.0" in there.differences
    extras = python.list_installed_extras(site)
    target.facts.answers[ENVIRONMENT.name] = msgspec.structs.replace(
        there, packages=software.compute_packages_digest(extras), source=software.digest_source(), version="3.11"
    )
    done = site_environment.plan(Site(site, None, [target]), target)
    assert isinstance(done, Nothing)
    assert "torch 1.4.0" in done.why
