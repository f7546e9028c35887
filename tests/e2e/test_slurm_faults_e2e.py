"""Faults of a site while runs wait and run, on a real Slurm: each run is executed once, its state is true and stays true,
no process is left, and the command that a user would type next goes on. All tests belong to the long form."""

import contextlib
import subprocess
import sys
import time

import pytest
from support_e2e import HANG_S, until
from support_long import only_in_long_form
from support_slurm import FOREVER, RANKS, Study, studies

from provision.practice.network import interface_name

pytestmark = pytest.mark.e2e
CHECKPOINTS = "  instruments: {checkpoints: {every_steps: 50}}\n"
ONE_NODE, TWO_NODES = "axes: {strategy: [ddp], gpus: [2]}", "axes: {strategy: [ddp], gpus: [4]}"
SUPERVISORS = "pgrep -f '[j]obs.supervisor.(attempt|step_task)' || true"
OUTAGE_S = 120.0  # longer than Slurm waits for a lost node
# Counts its calls in the file $LOG, then calls the real command.
COUNTED = 'echo "$*" >> {log}; exec /usr/bin/{command} "$@"'


@pytest.fixture
def study(slurm, request):
    with studies(slurm, request.node.name) as make:
        yield make
    for name in ("work1", "work2"):
        until(lambda name=name: not slurm.run(name, RANKS).strip(), f"no rank is left on {name}")
        until(lambda name=name: not slurm.run(name, SUPERVISORS).strip(), f"no supervisor is left on {name}")


def submit(one: Study, cells: str = ONE_NODE, *, steps: int = FOREVER, keys: str = "") -> None:
    text = one.matrix(cells, steps=steps)
    if keys:
        written = (one.path / "small.yaml").read_text()
        one.write("small.yaml", written.replace("  steps:", f"{keys}  steps:"))
    one.jobs("submit", "--matrix", text)


def until_steps(one: Study, least: int = 1) -> None:
    one.until(lambda: len(one.folders()[0].steps(0).records) >= least, f"the run has made {least} steps")


def start_now(one: Study) -> None:
    """Let Slurm start a requeued job now: by itself, it waits two minutes."""
    job = one.events("submitted")[0].data["job"]
    one.slurm.answer("head", "scontrol", "update", f"JobId={job}", "StartTime=now")


def goes_on(one: Study) -> list:
    start_now(one)
    return one.events("resumed")


def until_resumed(one: Study) -> None:
    (resumed,) = one.until(lambda: goes_on(one), "the run resumes")
    assert resumed.data["step"] > 0
    one.until(lambda: one.states() == ["running"], "it runs again")


@contextlib.contextmanager
def cut_link(one: Study, node: str):
    """Cut the link of a node: its interface on this machine is down during the block."""
    link = f"vb-{interface_name(f'{one.slurm.cluster.name}/{node}')}"  # systemd-nspawn's name of it
    subprocess.run(["ip", "link", "set", link, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", link, "up"], check=True)


@only_in_long_form
def test_a_drained_node_leaves_its_run_alone_and_the_plan_names_the_reason(slurm, study):
    one = study()
    submit(one, TWO_NODES)
    until_steps(one)
    one.slurm.run("head", "scontrol update nodename=work2 state=drain reason='fan is loud'", root=True)
    try:
        before = len(one.folders()[0].steps(0).records)
        one.until(lambda: len(one.folders()[0].steps(0).records) > before, "the run goes on")
        assert one.states() == ["running"]
        words = [sys.executable, "-P", "-m", "provision", str(slurm.file), "plan", "--workspace", str(slurm.folder)]
        planned = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert "fan is loud" in planned.stdout + planned.stderr
    finally:
        one.slurm.run("head", "scontrol update nodename=work2 state=resume", root=True)


@only_in_long_form
def test_a_run_with_checkpoints_resumes_after_its_node_lost_power(study):
    one = study()
    submit(one, TWO_NODES, keys=CHECKPOINTS)
    until_steps(one, 60)
    one.slurm.machine("work2").crash()
    try:
        one.until(lambda: one.states() == ["pending"], "Slurm gives the node up and the run waits again")
    finally:
        one.slurm.boot("work2")
    one.until(one.slurm.idle, "the node is back", 240)
    until_resumed(one)
    assert len(one.events("started")) == 2


@only_in_long_form
def test_a_run_with_checkpoints_resumes_after_the_link_of_a_node_was_cut(study):
    one = study()
    submit(one, TWO_NODES, keys=CHECKPOINTS)
    until_steps(one, 60)
    with cut_link(one, "work2"):
        time.sleep(OUTAGE_S)
    one.until(lambda: one.states() == ["pending"] or one.events("resumed"), "Slurm has it again")
    for node in ("work1", "work2"):
        one.until(
            lambda node=node: one.events("resumed") or not one.slurm.run(node, "pidof slurmstepd || true"), f"{node} is free"
        )
    until_resumed(one)
    assert one.states() == ["running"]


def kill_one(one: Study, pattern: str) -> str:
    """Kill the first process on the host of the one run whose command line has this pattern. Returns the host."""
    host = one.runs()[0]["hosts"][0]
    one.slurm.run(host, f"kill -KILL $(pgrep -f '{pattern}' | head -n 1)", root=True)
    return host


@only_in_long_form
def test_a_killed_job_step_fails_its_run_and_leaves_no_process(study):
    one = study()
    submit(one)
    until_steps(one)
    host = kill_one(one, "^srun ")
    one.until(lambda: one.states() == ["failed"], "the run has failed")
    one.until(one.slurm.idle, "the nodes are free")
    assert not one.slurm.run(host, RANKS).strip()
    assert [again["attempt"] for again in one.json("retry")["runs"]] == [2]
    one.until(lambda: one.states() == ["running"], "the next attempt runs")


@only_in_long_form
def test_a_killed_sampler_is_named_and_its_run_goes_on(study):
    one = study()
    submit(one)
    until_steps(one)
    kill_one(one, f"[c]ollect sample --out={one.folders()[0].path}")
    one.until(lambda: one.runs()[0]["trouble"], "the end of the sampler is named")
    assert one.states() == ["running"]


@only_in_long_form
def test_a_thousand_runs_are_sent_with_two_calls_and_asked_for_with_one(study):
    one = study("extra: {begin: now+1hour}")
    calls = {name: one.path / f"{name}.calls" for name in ("sbatch", "squeue", "sacct", "scancel")}
    for name, log in calls.items():
        environment = one.stand_in(name, COUNTED.format(log=log, command=name))

    def count() -> dict[str, int]:
        counted = {name: len(log.read_text().splitlines()) if log.exists() else 0 for name, log in calls.items()}
        for log in calls.values():
            log.unlink(missing_ok=True)
        return counted

    seeds = ", ".join(str(seed) for seed in range(1, 1001))
    one.jobs("submit", "--matrix", one.matrix(f"axes: {{strategy: [single], seed: [{seeds}]}}", steps=1), env=environment)
    assert count()["sbatch"] == 2
    assert len(one.json("status", env=environment)["runs"]) == 1000
    assert count() == {"sbatch": 0, "squeue": 1, "sacct": 0, "scancel": 0}
    one.jobs("cancel", "--all", env=environment)
    assert count()["scancel"] == 2
    assert set(one.states()) == {"cancelled"}
