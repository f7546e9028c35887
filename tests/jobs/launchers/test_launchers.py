"""Tests of launchers: what a launcher writes into a run, and what it refuses before any rank starts."""

import base64
import json
import os
import pickle
import subprocess
import sys
from socket import gethostname

import msgspec
import pytest
from support_e2e import benches
from support_golden import run_of

from jobs.launcher import Launcher, find_launcher, load_launchers
from jobs.launchers import accelerate, deepspeed, submitit
from jobs.node import command_rank
from jobs.planner import memory
from jobs.planning import plan
from jobs.planning.resolve import Capacity, find_misfits, resolve_cells
from shardlab.cluster import cluster, slurm_keys
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.matrix import matrix
from shardlab.matrix.cell import AnyCell
from shardlab.matrix.command import Command
from shardlab.runs.run import World
from shardlab.runs.rundir import RunDir
from shardlab.runs.trace_part import TRACE_STRATEGY
from tests.jobs.supervisor.test_jobs_attempt import write_run

MISSING = "no-such-mpirun"
MATRIX = """schema: 1
name: m
defaults: {workload: gpt2-tiny, strategy: single, global_batch_size: 8, steps: 3, launcher: mpi}
"""


@pytest.fixture
def bench(tmp_path):
    yield from benches(tmp_path)


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Returns a function that loads a matrix with one cell. The launcher of the cell is `mpi`, which exists only in this test
    and needs the given programs."""

    def make(*needs):
        mpi = Launcher(
            name="mpi", summary="", several_nodes=True,
            make_node_argv=lambda run, python: [MISSING, python],
            make_task_argv=lambda run, python: [MISSING, python], needed_programs=needs,
        )  # fmt: skip
        monkeypatch.setitem(load_launchers(), "mpi", mpi)
        path = tmp_path / "m.yaml"
        path.write_text(MATRIX)
        return matrix.load_matrix(path)

    return make


def test_the_memory_of_a_launcher_that_starts_trainings_can_be_predicted():
    names = [name for name, launcher in load_launchers().items() if launcher.starts_trainings]
    assert names
    assert [name for name in names if f"node_{name}" not in memory.read_memory_terms()] == []


def test_torchrun_waits_for_nodes_that_wait_for_their_gpus():
    usual, patient = (
        load_launchers()["torchrun"].make_task_argv(msgspec.structs.replace(run_of("torchrun"), wait_gpus_s=wait), "python")
        for wait in (0, 900)
    )
    assert "--rdzv-conf=is_host=$SHARDLAB_IS_FIRST" in usual
    assert "--rdzv-conf=is_host=$SHARDLAB_IS_FIRST,join_timeout=1500,read_timeout=1500" in patient


@pytest.mark.parametrize("visible", [None, "", "2,3"])
def test_deepspeed_starts_ranks_with_the_gpus_that_this_process_sees(tmp_path, monkeypatch, visible):
    """DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES, so each rank is started through `env` with the value from before."""
    run = msgspec.structs.replace(run_of("deepspeed"), world=World(2, 3, 6))
    folder = tmp_path / run.run_id
    folder.mkdir()
    files.write_json(RunDir(folder).run_json, run)
    environment = {"SHARDLAB_RENDEZVOUS": "10.0.0.1:29999", "SHARDLAB_NODE": "1", "CUDA_VISIBLE_DEVICES": visible}
    for name, value in environment.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    started = []
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words))
    deepspeed.main([str(folder)])
    ((path, words, variables),) = started
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    assert json.loads(base64.urlsafe_b64decode(options["world_info"])) == {"0": [0, 1, 2], "1": [0, 1, 2]}
    assert (options["node_rank"], options["master_addr"], options["master_port"]) == ("1", "10.0.0.1", "29999")
    given = "--unset=CUDA_VISIBLE_DEVICES" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
    assert words[words.index("env") :] == ["env", given, path, "-m", "trainers", "run", "."]
    assert {"--no_python", "--no_local_rank"} <= set(words[: words.index("env")])
    assert variables["LOCAL_WORLD_SIZE"] == "3"


def write_command_run(tmp_path, *options):
    """Write a run of a command with two ranks and these words for its launcher, accelerate. Returns its folder."""
    cell = AnyCell(
        workload="mine", strategy="ddp", gpus=2, launcher="accelerate", prove="off", warmup_steps=0, time_limit_s=60,
        command=Command(words=["python", "train.py"], launcher_options=list(options)),
    )  # fmt: skip
    run = msgspec.structs.replace(run_of("accelerate"), cell=cell)
    run_dir = RunDir(tmp_path / run.run_id)
    run_dir.work.mkdir(parents=True)
    files.write_json(run_dir.run_json, run)
    return run_dir.path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), True),
        (("--mixed_precision=bf16",), True),
        (("--config_file", "fsdp.yaml"), False),
        (("--config-file=fsdp.yaml",), False),
        (("--use_deepspeed",), False),
    ],
)
def test_accelerate_starts_all_ranks_unless_its_options_say_how(tmp_path, monkeypatch, options, expected):
    folder = write_command_run(tmp_path, *options)
    monkeypatch.setenv("SHARDLAB_RENDEZVOUS", "127.0.0.1:29999")
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words))
    accelerate.main([str(folder)])
    ((_, words, _),) = started
    assert ("--multi_gpu" in words, "--num_processes=2" in words) == (expected, True)


def test_a_launcher_that_starts_fewer_ranks_than_the_cell_has_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(InputError, match=r"accelerate started 1 rank\(s\) and not 2"):
        command_rank.main([str(write_command_run(tmp_path))])


@pytest.mark.parametrize("name", ["deepspeed", "submitit"])
def test_a_launcher_that_is_a_program_needs_exactly_one_folder(name):
    with pytest.raises(InputError, match=rf"usage: python -m jobs\.launchers\.{name} RUN_DIR"):
        {"deepspeed": deepspeed, "submitit": submitit}[name].main([])


# For each launcher: options of sbatch, the tasks on each node of a job step, whether it starts ranks on several nodes, and
# whether its ranks may use GPUs.
LAUNCHERS = {
    "accelerate": ((), 1, True, True),
    "none": ((), 1, True, True),
    "srun": ((), 2, True, True),
    "deepspeed": ((), 1, True, True),
    "fork": ((), 1, False, False),
    "submitit": (("signal=USR2@60",), 2, True, True),
    "torchrun": ((), 1, True, True),
    TRACE_STRATEGY: ((), 1, False, False),
}


@pytest.mark.parametrize("name", [*sorted(load_launchers()), TRACE_STRATEGY])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_job_step_has_the_options_of_its_launcher(name, overlap):
    made, (options, tasks, several_nodes, on_gpus) = find_launcher(name), LAUNCHERS[name]
    assert (made.sbatch_options, made.several_nodes, made.on_gpus) == (options, several_nodes, on_gpus)
    words = made.make_srun_argv(run_of("torchrun"), "python", overlap=overlap, container_options=["--container-name=c"])
    begin = words[: words.index("python")]
    expected = {f"--ntasks-per-node={tasks}", "--nodes=1", "--kill-on-bad-exit=1", "--container-name=c"}
    expected |= {"--overlap"} if overlap else set()
    expected |= {"--distribution=block"} if tasks > 1 else set()
    assert set(begin) - {"srun", "--cpu-bind=none", "--unbuffered"} == expected
    assert words[len(begin) :] == [
        "python",
        "-m",
        "jobs.supervisor.step_task",
        ".",
        "--",
        *made.make_task_argv(run_of("torchrun"), "python"),
    ]


def test_submitits_pickle_holds_the_runs_path_and_nothing_else(tmp_path):
    """The pickle for submitit contains only the path of the run folder."""
    (tmp_path / "log" / "submitit").mkdir(parents=True)
    (tmp_path / "log" / "submitit" / "1_submitted.pkl.save_tmp").touch()
    given = submitit.prepare_start(RunDir(tmp_path), run_of("submitit"))
    (pickled,) = (tmp_path / "log" / "submitit").iterdir()
    assert pickled.name == f"{given['SUBMITIT_LOCAL_JOB_ID']}_submitted.pkl" == f"{os.getpid()}_submitted.pkl"
    found = pickle.loads(pickled.read_bytes())
    assert vars(found.function) == {"run_folder": str(tmp_path)}
    assert (found.args, found.kwargs, found.done()) == ((), {}, False)


@pytest.mark.parametrize("name", ["50%total", "100%A"])
def test_a_path_that_submitit_would_change_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match="submitit replaces %j, %t, %a, %A in paths"):
        submitit.prepare_start(RunDir(tmp_path / name), run_of("submitit"))
    assert not list((tmp_path / name).iterdir())


def test_a_missing_program_of_a_launcher_is_reported_before_a_submission(launched):
    here = Capacity(most_nodes=1, gpus_per_node=None, is_this_machine=True)
    found = launched("sh", MISSING)
    cells = resolve_cells(found)
    (misfit,) = find_misfits(found, cells, here, cells)
    why = f"the launcher mpi needs {MISSING}, which is not installed on {gethostname()}."
    assert f"m.yaml:3:93: defaults.launcher: {why}" in str(found.document.errors([misfit.problem]))
    assert misfit.why.startswith(why)
    # The last argument is a cluster; shardlab does not know what its nodes have installed, so it reports no misfit.
    assert find_misfits(found, cells, Capacity(most_nodes=1, gpus_per_node=None), cells) == []
    present = launched("sh")
    assert find_misfits(present, resolve_cells(present), here, resolve_cells(present)) == []


def test_a_plan_names_the_program_that_a_launcher_needs_on_each_node(launched):
    cells = resolve_cells(launched(MISSING))
    machine = Capacity(most_nodes=2, gpus_per_node=None)
    slurm = cluster.Cluster(schema=1, name="c", provider="ssh", slurm=slurm_keys.Slurm())
    assert any(
        f"the launcher mpi needs {MISSING} on each node" in one for one in plan._make_plan_remarks(cells, machine, slurm, 0)
    )
    assert not any(MISSING in one for one in plan._make_plan_remarks(cells, machine, cluster.THIS_MACHINE, 0))


def test_a_supervisor_without_its_program_ends_the_run_with_the_reason(bench):
    """The supervisor records as reason that the program is not installed; `jobs logs` prints the same reason."""
    bench.run("jobs", "render", "--matrix", bench.matrix("axes: {strategy: [single]}"))
    (folder,) = bench.folders()
    words = [sys.executable, "-P", "-m", "jobs.supervisor.attempt", folder.path, "--", MISSING, "-n", "2"]
    assert subprocess.run(words, capture_output=True, text=True, check=False, cwd=bench.path).returncode == 127
    why = f"{MISSING} is not installed on {gethostname()}."
    assert (folder.judge().state, folder.judge().why) == ("failed", why)
    assert bench.run("jobs", "logs", folder.run_id).stdout.strip() == why


def test_a_task_without_its_program_gives_the_reason_of_the_run(tmp_path):
    folder = RunDir(tmp_path)
    write_run(folder)
    before = len(folder.read_events())
    environment = {**os.environ, "SHARDLAB_RENDEZVOUS": "127.0.0.1:1"}
    words = [sys.executable, "-P", "-m", "jobs.supervisor.step_task", tmp_path, "--", MISSING]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    why = f"{MISSING} is not installed on {gethostname()}."
    assert (done.returncode, why in done.stderr) == (1, True)
    assert [(event.event, event.data["why"]) for event in folder.read_events()[before:]] == [("failed", why)]
