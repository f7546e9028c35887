"""If other processes use the GPUs of a run, the run fails and names these processes, or it waits for the GPUs."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support_e2e import until

from jobs.node.rendezvous import RENDEZVOUS_VARIABLE
from jobs.node.wait_for_gpus import find_processes_on_gpus
from shardlab.hardware.nvml import GpuProcess
from tests.jobs.supervisor.test_jobs_attempt import folder, supervised, write_run  # noqa: F401 - `folder` is a fixture

pytest_plugins = ["support_nvml"]
UUIDS = ["GPU-a1", "GPU-b2", "GPU-c3"]


@pytest.fixture
def other():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("visible", "count", "named"),
    [
        (None, 1, []),
        (None, 2, ["GPU-b2"]),
        ("1", 1, ["GPU-b2"]),
        ("2, 1", 1, []),
        ("2,1", 2, ["GPU-b2"]),
        ("GPU-b", 1, ["GPU-b2"]),
        ("", 2, []),
        ("7,1", 1, []),  # there is no GPU 7, so CUDA offers no GPU at all
        ("MIG-1", 1, []),
    ],
)
def test_the_gpus_of_the_ranks_are_looked_at_and_no_others(visible, count, named):
    users = {uuid: [GpuProcess(7, "python")] if uuid == "GPU-b2" else [] for uuid in UUIDS}
    assert list(find_processes_on_gpus(users, visible, count)) == named


def test_an_old_driver_lists_the_processes_of_each_gpu(old_nvml):
    old_nvml.say(UUIDS[:2], processes={1: [7, 8]})
    ask = "from shardlab.hardware import nvml; "
    ask += "print({uuid: [user.pid for user in users] for uuid, users in nvml.read_gpu_processes().items()})"
    command = [sys.executable, "-c", ask]
    done = subprocess.run(command, env={**os.environ, **old_nvml.environment}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str({"GPU-a1": [], "GPU-b2": [7, 8]})


def test_a_run_whose_gpu_is_used_fails_and_names_the_gpu_and_the_process(folder, nvml, other):  # noqa: F811
    write_run(folder)
    nvml.say(UUIDS, processes={1: [other.pid]})
    done = supervised(folder, "touch", str(folder.path / "begun"), **nvml.environment)
    assert done.returncode == 1
    assert not (folder.path / "begun").exists()
    verdict = folder.judge()
    assert verdict.state == "failed"
    assert f"GPU GPU-b2 is used by process {other.pid} (python" in verdict.why
    assert "jobs submit --wait-gpus SECONDS" in verdict.why


def test_a_gpu_that_the_run_does_not_take_may_be_used(folder, nvml, other):  # noqa: F811
    write_run(folder)
    nvml.say(UUIDS, processes={2: [other.pid]})
    assert supervised(folder, "touch", str(folder.path / "begun"), **nvml.environment).returncode == 0
    assert (folder.path / "begun").exists()


def test_a_rehearsal_on_the_cpu_does_not_look(folder, nvml, other):  # noqa: F811
    write_run(folder, launcher="fork", rehearsal=True)
    nvml.say(UUIDS, processes={0: [other.pid]})
    assert supervised(folder, "true", **nvml.environment).returncode == 0


def test_a_run_that_waits_for_gpus_starts_when_other_processes_end(folder, nvml, other):  # noqa: F811
    write_run(folder, wait_gpus_s=600)
    nvml.say(UUIDS, processes={0: [other.pid]})

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(supervised, folder, "touch", str(folder.path / "begun"), **nvml.environment)
        until(lambda: any(event.event == "waiting" for event in folder.read_events()), "it says that it waits")
        assert not (folder.path / "begun").exists()
        nvml.say(UUIDS)
        assert run.result(120).returncode == 0
    (waited,) = [event for event in folder.read_events() if event.event == "waiting"]
    assert f"GPU-a1 is used by process {other.pid}" in waited.data["why"]
    assert (folder.path / "begun").exists()


def test_a_task_of_a_slurm_job_looks_at_its_own_node(folder, nvml, other):  # noqa: F811
    write_run(folder, scheduler="slurm")
    nvml.say(UUIDS, processes={0: [other.pid]})
    begun = folder.path / "begun"
    given = {**os.environ, **nvml.environment, RENDEZVOUS_VARIABLE: "127.0.0.1:29500"}
    command = [sys.executable, "-P", "-m", "jobs.supervisor.step_task", folder.path, "--", "touch", begun]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=False, env=given | {"SLURM_LOCALID": place})
        for place in ("0", "1")
    )
    assert first.returncode == 1
    assert f"GPU GPU-a1 is used by process {other.pid}" in first.stderr
    (failed,) = [event for event in folder.read_events() if event.event == "failed"]
    assert failed.data["why"] in first.stderr.replace("\n", " ")
    assert second.returncode == 0  # only the first task on a node checks the GPUs of the node
