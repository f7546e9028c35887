"""Compares the scripts and arguments that sbatch receives with golden files, for runs with different requests to Slurm."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support_golden import GOLDEN, HOSTILE, run_of, same_as_golden
from support_queue import Queue

from jobs.rendering import render
from jobs.scheduler import SubmitOptions
from jobs.schedulers import slurm
from shardlab.cluster.cluster import Cluster, Storage
from shardlab.cluster.slurm_keys import Gpus, Partition, Slurm
from shardlab.runs.run import World
from shardlab.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("source_copied_faster")
A100, NO_GPUS = Gpus(per_node=4, type="a100"), None
SHARED = {"exclusive": False, "cpus_per_rank": 6}
SITE = {"account": "g_ml-2026", "qos": "normal", "constraint": "gpu&hbm80g|[rack1*2]"}
PARTITIONS = [
    Partition(name="a", gpus=Gpus(per_node=4, type="a100")),
    Partition(name="h", gpus=Gpus(per_node=8, type="h100")),
]
# Maps the name of a case to (launcher, nodes, ranks per node, GPUs of the cluster, the key `slurm` of the cluster, further
# fields of the run).
CASES = {
    "torchrun-1-node": ("torchrun", 1, 1, A100, {}, {}),
    "torchrun-2-nodes": ("torchrun", 2, 4, A100, {}, {}),
    "torchrun-64-nodes-site": ("torchrun", 64, 4, A100, SITE, {}),
    "torchrun-gres": ("torchrun", 2, 4, A100, {"gpu_request": "gres"}, {}),
    "torchrun-gres-any-type": ("torchrun", 2, 8, Gpus(per_node=8), {"gpu_request": "gres"}, {}),
    "torchrun-no-gpus": ("torchrun", 2, 2, NO_GPUS, {}, {}),
    "torchrun-shared-nodes": ("torchrun", 2, 2, A100, SHARED, {}),
    "submitit-1-node": ("submitit", 1, 2, A100, {}, {}),
    "submitit-2-nodes": ("submitit", 2, 4, A100, {}, {}),
    "submitit-shared-nodes": ("submitit", 2, 2, A100, SHARED | {"gpu_request": "gres"}, {}),
    "deepspeed-2-nodes": ("deepspeed", 2, 4, A100, {}, {}),
    "deepspeed-16-nodes-shared": ("deepspeed", 16, 8, Gpus(per_node=8, type="h100"), SHARED, {}),
    "fork-rehearsal": ("fork", 1, 2, A100, SHARED, {}),
    "short-and-never-again": ("torchrun", 1, 1, A100, {}, {"limit_s": 1, "requeues": 0}),
    "days-after-a-lost-node": ("torchrun", 2, 4, A100, {}, {"limit_s": 172_801, "avoid": ["gpu03", "gpu17"], "attempt": 3}),
    "partition-of-a-gpu-type": ("torchrun", 2, 8, A100, {"partition": "small", "partitions": PARTITIONS}, {"gpu_type": "h100"}),
    "extra": (
        "torchrun", 1, 1, A100,
        {"extra": {"reservation": "course-2", "spread-job": None, "mail-user": "a.b@c.edu", "gres-flags": "enforce-binding"}},
        {},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def python(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python3")


def case(name):
    """Returns (the run, the cluster) of a case. name: a key of CASES."""
    launcher, nnodes, ranks, gpus, asked, more = CASES[name]
    more = dict(more)
    run, world = run_of(launcher), World(nnodes, ranks, nnodes * ranks)
    cell = msgspec.structs.replace(run.cell, gpus=world.world_size, dp=world.world_size, nnodes=nnodes)
    cell = msgspec.structs.replace(cell, gpu_type=more.pop("gpu_type", None))
    run = msgspec.structs.replace(
        run, **{"scheduler": "slurm", "cell": cell, "world": world, "limit_s": 600, "requeues": 2, **more}
    )
    return run, Cluster(schema=1, name="c", provider="ssh", gpus=gpus, slurm=Slurm(**asked))


@pytest.mark.parametrize("name", CASES)
def test_the_slurm_script_of_a_run_is_the_golden_text(name):
    run, where = case(name)
    same_as_golden(f"slurm/{name}.sbatch", render.render_script(run, Path("/shared/study/runs") / run.run_id, where, None))


@pytest.mark.parametrize("scheduler", ["slurm", "ssh"])
def test_no_tool_of_a_run_on_cloudlab_caches_files_in_the_home_folder(scheduler):
    """At CloudLab, home folders are on NFS over the control network, which is for logins only, so caches are on other disks."""
    run, where = case("torchrun-2-nodes")
    run = msgspec.structs.replace(run, scheduler=scheduler)
    where = msgspec.structs.replace(where, provider="cloudlab", storage=Storage(shared="/mydata/shared"))
    text = render.render_script(run, Path("/shared/study/runs") / run.run_id, where, None)
    for name in ("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH"):
        assert f"export {name}=/mydata/shared/workspaces/.cache" in text


def test_the_slurm_script_in_a_folder_with_a_hostile_name_is_the_golden_text():
    run, where = case("torchrun-1-node")
    text = render.render_script(run, Path(f"{HOSTILE}\n#SBATCH --partition=owned\n%j/{run.run_id}"), where, None)
    same_as_golden("slurm/hostile.sbatch", text)


@pytest.mark.parametrize(
    ("name", "how", "folder"),
    [
        ("array", SubmitOptions(), "study"),
        ("array-throttled-after", SubmitOptions(most_runs=2, run_ids_before=("earlier",)), "study"),
        ("array-hostile", SubmitOptions(), f"{HOSTILE}\n#SBATCH --partition=owned\n%j"),
        ("pack", SubmitOptions(is_packed=True), "study"),
        ("one-hostile", SubmitOptions(), f"{HOSTILE}\n#SBATCH --partition=owned\n%j"),
    ],
)
def test_the_arguments_and_the_script_of_sbatch_are_the_golden_texts(name, how, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("python3"))
    queue = Queue(tmp_path / "slurm", monkeypatch)
    workspace = Workspace(tmp_path / folder.lstrip("/"))
    run, where = case("torchrun-2-nodes")
    source = render.make_render_context("m", where, workspace)
    earlier = render.write_run_folder(msgspec.structs.replace(run, run_id="earlier"), workspace.runs, source)
    slurm.SCHEDULER.submit(workspace, [earlier], SubmitOptions())
    names = [f"run-{number}" for number in range(1 if name.startswith("one") else 3)]
    folders = [render.write_run_folder(msgspec.structs.replace(run, run_id=one), workspace.runs, source) for one in names]
    slurm.SCHEDULER.submit(workspace, folders, how)
    *words, script = queue.calls("sbatch")[-1]
    same_as_golden(f"slurm/{name}.args", _fixed("\n".join(map(shlex.quote, [*words, script])) + "\n", tmp_path))
    if not name.startswith("one"):
        same_as_golden(f"slurm/{name}.sbatch", _fixed(Path(script).read_text(), tmp_path))


def _fixed(text: str, folder: Path) -> str:
    """The text with fixed words in place of random tokens and of the temporary folder."""
    return re.sub(r"\b(m|run-0)\.[0-9a-f]{10}\b", r"\1.TOKEN", text.replace(str(folder), "/shared"))


def test_an_array_has_the_sbatch_options_of_the_users_template(tmp_path, monkeypatch):
    """`#SBATCH` lines of the user's own template also apply to the job array of its runs."""
    monkeypatch.setattr(sys, "executable", shutil.which("python3"))
    queue = Queue(tmp_path / "slurm", monkeypatch)
    workspace = Workspace(tmp_path / "study")
    own = workspace.own_templates / slurm.SCHEDULER.TEMPLATE
    own.parent.mkdir(parents=True)
    own.write_text(
        "#!/bin/bash\n#SBATCH -C big\n\n  # mine\n#SBATCH --comment='a b'\n#SBATCH --time=7 \ntrue\n#SBATCH --hold\n"
    )
    run, where = case("torchrun-1-node")
    source = render.make_render_context("m", where, workspace)
    for how, minutes in ((SubmitOptions(), 7), (SubmitOptions(is_packed=True), 14)):
        names = [f"run-{number}-{minutes}" for number in range(2)]
        folders = [render.write_run_folder(msgspec.structs.replace(run, run_id=one), workspace.runs, source) for one in names]
        slurm.SCHEDULER.submit(workspace, folders, how)
        lines = Path(queue.calls("sbatch")[-1][-1]).read_text().splitlines()
        asked = [line for line in lines if line.startswith("#SBATCH")]
        assert asked == ["#SBATCH -C big", "#SBATCH --comment='a b'", f"#SBATCH --time={minutes}"]


@pytest.mark.parametrize("path", sorted((GOLDEN / "slurm").glob("*.sbatch")), ids=lambda path: path.stem)
def test_bash_and_sbatch_can_read_a_script(path):
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=True).stderr == ""
    head, _, _ = path.read_text().partition("\nset -")
    for line in head.split("\n"):
        # sbatch has its own rules for spaces, quotes, backslashes and # in a line #SBATCH, so no value may contain them.
        assert not line.startswith("#SBATCH") or re.fullmatch(r"#SBATCH --[a-z-]+(=[^\s'\"\\#]+)?", line), line


def test_an_array_and_a_pack_start_the_script_of_each_run_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("python3"))
    queue = Queue(tmp_path / "slurm", monkeypatch)
    workspace = Workspace(tmp_path / f"{HOSTILE}\n#SBATCH --partition=owned\n%j".lstrip("/"))
    own = workspace.own_templates / slurm.SCHEDULER.TEMPLATE
    own.parent.mkdir(parents=True)
    own.write_text('#!/bin/bash\n{% for option in options %}\n#SBATCH {{ option }}\n{% endfor %}\n: >"${0%/*}/made"\nexit 3\n')
    run, where = case("torchrun-1-node")
    source = render.make_render_context("m", where, workspace)
    for how, code in ((SubmitOptions(), 3), (SubmitOptions(is_packed=True), 1)):
        folders = [
            render.write_run_folder(msgspec.structs.replace(run, run_id=f"run-{number}-{code}"), workspace.runs, source)
            for number in range(2)
        ]
        slurm.SCHEDULER.submit(workspace, folders, how)
        made = folders[1].path / "made"
        script = queue.calls("sbatch")[-1][-1]
        done = subprocess.run(
            ["bash", script], env={"PATH": "/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "1"}, cwd=tmp_path, check=False
        )
        assert (done.returncode, made.exists()) == (code, True)
        assert (folders[0].path / "made").exists() is how.is_packed
    assert not list(tmp_path.rglob("owned"))
