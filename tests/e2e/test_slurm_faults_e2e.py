"""Faults of a site while runs wait and run, on a real Slurm: each run is executed once, its state is true and stays true,
no process is left, and the command that a user would type next goes on. All tests belong to the long form."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support_e2e import HANG_S, until
from support_long import only_in_long_form
from support_slurm import FOREVER, MATRIX, RANKS, Desk, SlurmCluster, Study, studies

from provision.practice.base import PRACTICE_UID, PRACTICE_USER
from provision.practice.network import make_interface_name

pytestmark = pytest.mark.e2e
CHECKPOINTS = "  instruments: {checkpoints: {every_steps: 50}}\n"
ONE_NODE, TWO_NODES = "axes: {strategy: [ddp], gpus: [2]}", "axes: {strategy: [ddp], gpus: [4]}"
SUPERVISORS = "pgrep -f '[j]obs.supervisor.(attempt|step_task)' || true"
# Patterns of the command lines of a run's processes, for grep.
RANK, SUPERVISOR = r"^[^ ]* -u -m trainers run ", "^[^ ]* -m jobs.supervisor.attempt "
BIG_BYTES = 400 << 20
OUTAGE_S = 120.0  # longer than Slurm waits for a lost node
# Counts its calls in the file $LOG, then calls the real command.
COUNTED = 'echo "$*" >> {log}; exec /usr/bin/{command} "$@"'
# Ends Slurm's controller when it has just accepted three jobs, then calls the real command.
KILLED_AT_THE_FOURTH_JOB = """\
case "$*" in *--test-only*) exec /usr/bin/sbatch "$@";; esac
echo >> {calls}
test "$(wc -l < {calls})" -ne 4 || sudo -n kill -KILL $(pidof slurmctld)
exec /usr/bin/sbatch "$@"
"""


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
    """Let Slurm start a waiting job now, whenever it should begin."""
    job = one.events("submitted")[0].data["job"]
    one.slurm.answer("head", "scontrol", "update", f"JobId={job}", "StartTime=now")


def until_resumed(one: Study) -> None:
    """Wait until a run that Slurm has requeued resumes.

    Slurm waits two minutes before it starts the job. An earlier start may fail: for a minute, Slurm repeats its order to end
    the job step to a node that was lost, and the second job step has the same number as the first.
    """
    (resumed,) = one.until(lambda: one.events("resumed"), "the run resumes", HANG_S)
    assert resumed.data["step"] > 0
    one.until(lambda: one.states() == ["running"], "it runs again")


@contextlib.contextmanager
def cut_link(slurm: SlurmCluster, node: str):
    """Cut the link of a node: its interface on this machine is down during the block."""
    link = f"vb-{make_interface_name(f'{slurm.cluster.name}/{node}')}"  # systemd-nspawn's name of it
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
    with cut_link(one.slurm, "work2"):
        time.sleep(OUTAGE_S)
    one.until(lambda: one.states() == ["pending"] or one.events("resumed"), "Slurm has it again")
    for node in ("work1", "work2"):
        one.until(
            lambda node=node: one.events("resumed") or not one.slurm.run(node, "pidof slurmstepd || true"), f"{node} is free"
        )
    until_resumed(one)
    assert one.states() == ["running"]


def kill_first(one: Study, pattern: str, node: str) -> None:
    """Kill the first process on a node that works in the folder of the one run and whose command line has this pattern."""
    is_own = f'[ "$(readlink $p/cwd)" = {shlex.quote(str(one.folders()[0].path))} ]'
    has_words = f"tr '\\0' ' ' < $p/cmdline | grep -q -e {shlex.quote(pattern)}"
    find = f'for p in /proc/[0-9]*; do {is_own} && {has_words} && kill -KILL "${{p#/proc/}}" && exit; done; exit 1'
    one.slurm.run(node, f"exec 2> /dev/null; {find}", root=True)


@only_in_long_form
@pytest.mark.parametrize(
    ("pattern", "reason"),
    [(SUPERVISOR, "did not record its end"), ("^srun ", ""), (RANK, "SIGKILL ended rank")],
    ids=["supervisor", "job step", "rank"],
)
def test_a_killed_process_fails_its_run_and_leaves_no_process(study, pattern, reason):
    one = study()
    submit(one)
    until_steps(one)
    host = one.runs()[0]["hosts"][0]
    kill_first(one, pattern, host)
    one.until(lambda: one.states() == ["failed"], "the run has failed")
    assert reason in one.runs()[0]["why"]
    one.until(one.slurm.idle, "the nodes are free")
    assert not one.slurm.run(host, RANKS).strip()
    assert one.folders()[0].judge().state == "failed"
    assert [again["attempt"] for again in one.json("retry")["runs"]] == [2]
    one.until(lambda: one.states() == ["running"], "the next attempt runs")


@only_in_long_form
def test_a_killed_sampler_is_named_and_its_run_goes_on(study):
    one = study()
    submit(one)
    until_steps(one)
    kill_first(one, " collect sample --out=", one.runs()[0]["hosts"][0])
    one.until(lambda: one.runs()[0]["trouble"], "the end of the sampler is named")
    assert one.states() == ["running"]


def restart_slurmctld(one: Study) -> None:
    one.slurm.run("head", "systemctl restart slurmctld; until scontrol ping | grep -q UP; do sleep 0.5; done", root=True)


@only_in_long_form
def test_a_controller_killed_while_jobs_are_sent_loses_no_run_and_doubles_none(study):
    running, one = study(suffix="-running"), study()
    submit(running, steps=600)
    until_steps(running)
    # Runs with different time limits have different options of sbatch, so each is a job of its own.
    limits = "\n".join(f'  - {{strategy: single, seed: {number}, time_limit: "00:{number}:00"}}' for number in range(20, 26))
    words = ("submit", "--matrix", one.matrix(f"include:\n{limits}", steps=1))
    killed = KILLED_AT_THE_FOURTH_JOB.format(calls=one.path / "sbatch.calls")
    sent = one.start(*words, env=one.stand_in("sbatch", killed))
    assert sent.code == 1
    assert "Slurm does not answer" in sent.stderr
    cancelled = one.folders()[0].run_id
    away = one.start("cancel", cancelled)
    assert away.code == 1
    assert "marked as cancelled in the workspace" in away.stderr
    restart_slurmctld(one)
    one.jobs("submit", "--matrix", f"{one.path}/small.yaml")
    ended = {"completed", "cancelled", "unknown"}
    one.until(lambda: ended >= set(one.states()), "all have ended, or Slurm has lost them", HANG_S)
    if "unknown" in one.states():
        one.jobs("retry", "--only", "unknown")
    one.until(lambda: one.states().count("completed") == 5, "all others are made", HANG_S)
    assert all(sum(event.event == "started" for event in folder.read_events()) <= 1 for folder in one.folders())
    assert {folder.run_id for folder in one.folders() if folder.judge().state == "cancelled"} == {cancelled}
    running.until(lambda: running.states() == ["completed"], "the run that was running completes")
    assert len(running.events("started")) == 1
    one.until(lambda: not {sent.token for sent in one.submissions()} & set(one.queue()), "Slurm has no job of them")


@contextlib.contextmanager
def lost_by_the_controller(one: Study):
    """Lose all that the controller learns during the block, as a crash does: it goes on with its earlier state."""
    folder = "/var/lib/slurm/slurmctld"
    one.slurm.run("head", f"systemctl stop slurmctld; cp -a {folder} {folder}.before", root=True)
    restart_slurmctld(one)
    yield
    one.slurm.run("head", f"kill -KILL $(pidof slurmctld); rm -rf {folder}; mv {folder}.before {folder}", root=True)
    restart_slurmctld(one)


@only_in_long_form
def test_a_lost_job_whose_number_slurm_gives_again_is_not_taken_for_the_other_job(study):
    lost, other = study("extra: {begin: now+1hour}", "-lost"), study("extra: {begin: now+1hour}", "-other")
    with lost_by_the_controller(lost):
        lost.jobs("submit", "--matrix", lost.matrix(ONE_NODE))
    other.jobs("submit", "--matrix", other.matrix(ONE_NODE))
    assert [event.data["job"] for event in lost.events("submitted")] == [
        event.data["job"] for event in other.events("submitted")
    ]
    lost.until(lambda: lost.states() == ["unknown"], "Slurm does not know it")
    assert "Slurm does not know its job" in lost.runs()[0]["why"]
    lost.jobs("cancel", "--all")
    assert (lost.states(), other.states()) == (["cancelled"], ["pending"])
    assert other.submissions()[0].token in other.queue()


@only_in_long_form
def test_states_that_were_learnt_from_slurm_stay_without_its_accounting(study):
    one, withdrawn, unseen = study(), study(suffix="-withdrawn"), study(suffix="-unseen")
    with one.slurm.configured("MinJobAge=2"):
        for this in (one, withdrawn):
            submit(this)
            until_steps(this)
        kill_first(one, SUPERVISOR, one.runs()[0]["hosts"][0])
        withdrawn.slurm.run("head", f"scontrol requeue {withdrawn.events('submitted')[0].data['job']}")
        withdrawn.until(lambda: withdrawn.states() == ["pending"], "Slurm has it again")
        withdrawn.jobs("cancel", "--all")
        assert withdrawn.states() == ["cancelled"]
        one.until(lambda: one.states() == ["failed"], "Slurm says that its job ended")
        why = one.runs()[0]["why"]
        assert "did not record its end" in why
        submit(unseen)
        until_steps(unseen)
        one.slurm.run("head", "systemctl kill --signal=KILL slurmdbd; systemctl stop slurmdbd", root=True)
        try:
            kill_first(unseen, SUPERVISOR, unseen.runs()[0]["hosts"][0])
            one.until(lambda: not one.slurm.run("head", "squeue -h --me --states=all").strip(), "Slurm has forgotten them")
            assert (one.states(), one.runs()[0]["why"], withdrawn.states()) == (["failed"], why, ["cancelled"])
            assert one.folders()[0].judge().state == "failed"
            unseen.until(lambda: unseen.states() == ["unknown"], "nobody knows how it ended")
            assert "its accounting does not answer" in unseen.runs()[0]["why"]
            assert withdrawn.json("retry")["runs"] == []
            assert [run["attempt"] for run in unseen.json("retry", "--only", "unknown")["runs"]] == [2]
            assert [run["attempt"] for run in one.json("retry")["runs"]] == [2]
            one.until(lambda: one.states() == ["running"], "the next attempt runs")
        finally:
            one.slurm.run("head", "systemctl start slurmdbd", root=True)


@only_in_long_form
def test_tasks_of_an_array_that_are_cancelled_by_hand_are_cancelled(study):
    one = study("extra: {begin: now+1hour}")
    one.jobs("submit", "--matrix", one.matrix("axes: {strategy: [single], seed: [1, 2, 3, 4]}"))
    (sent,) = one.submissions()
    one.slurm.run("head", f"scancel {sent.job}_1 {sent.job}_[2-3]")
    one.until(lambda: sorted(one.states()) == ["cancelled", "cancelled", "cancelled", "pending"], "three are cancelled")
    assert sorted(folder.judge().state for folder in one.folders()) == ["cancelled", "cancelled", "cancelled", "pending"]
    assert one.json("retry")["runs"] == []
    assert len(one.json("retry", "--only", "cancelled")["runs"]) == 3


@only_in_long_form
def test_a_run_that_its_partition_never_starts_is_found_before_and_after_sending(study):
    short = "PartitionName=short Nodes=work1,work2 DefMemPerCPU=100 MaxTime="
    one, sent = study("partition: short"), study('partition: short, time: "00:20:00", extra: {begin: now+1hour}', "-sent")
    with one.slurm.configured(f"{short}30"):
        one.until(one.slurm.idle, "the nodes are there")
        refused = one.start("submit", "--matrix", one.matrix(ONE_NODE))
        assert refused.code == 2
        assert "MaxTime=00:30:00 of the partition short" in refused.stderr
        assert one.runs() == []
        sent.jobs("submit", "--matrix", sent.matrix(ONE_NODE))
        one.slurm.run("head", "scontrol update PartitionName=short MaxTime=10", root=True)
        start_now(sent)
        sent.until(lambda: "Slurm never starts it, because its time limit" in sent.runs()[0]["why"], "the reason is named")
        assert sent.states() == ["pending"]
        sent.jobs("cancel", "--all")
        sent.write(
            "cluster.yaml", sent.slurm.file.read_text().replace("slurm: {}", 'slurm: {partition: short, time: "00:05:00"}')
        )
        sent.jobs("retry", "--only", "cancelled", "--wait")
        assert sent.states() == ["completed"]


@only_in_long_form
def test_a_job_that_is_held_and_released_by_hand_runs_once(study):
    one = study("extra: {begin: now+30}")
    one.jobs("submit", "--matrix", one.matrix(ONE_NODE, steps=3))
    job = one.events("submitted")[0].data["job"]
    one.slurm.run("head", f"scontrol hold {job}")
    one.until(lambda: "JobHeldUser" in one.runs()[0]["scheduler"]["raw"], "Slurm holds it")
    (run,) = one.runs()
    assert (run["state"], "`scontrol release`" in run["why"]) == ("pending", True)
    one.slurm.run("head", f"scontrol release {job}")
    one.until(lambda: start_now(one) or one.states() == ["completed"], "it is made")
    assert len(one.events("started")) == 1


@contextlib.contextmanager
def small_disk(slurm: SlurmCluster, folder: Path, size_mib: int):
    """Mount a disk of this size at a folder of the shared folder, on this machine and on all nodes."""
    image = slurm.folder / "small-disk"
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-E", f"root_owner={PRACTICE_UID}:{PRACTICE_UID}", image], check=True)
    device = Path(
        subprocess.run(["losetup", "--find", "--show", image], capture_output=True, text=True, check=True).stdout.strip()
    )
    folder.mkdir(exist_ok=True)
    node = f"mknod {device} b 7 {os.minor(device.stat().st_rdev)} || true; mount {device} {folder}"
    try:
        subprocess.run(["mount", device, folder], check=True)
        for name in slurm.nodes:
            slurm.run(name, node, root=True)
        yield
    finally:
        for name in slurm.nodes:
            slurm.answer(name, "umount", "--lazy", str(folder), root=True)
        subprocess.run(["umount", "--lazy", folder], check=True)
        subprocess.run(["losetup", "--detach", device], check=True)
        image.unlink()


@only_in_long_form
def test_a_full_shared_disk_is_named_and_the_same_command_goes_on(slurm, tmp_path):
    desk = Desk(slurm, tmp_path)
    matrix = tmp_path / "small.yaml"
    matrix.write_text(MATRIX.format(name="small", steps=FOREVER, more="axes: {strategy: [single], seed: [1, 2]}"))
    submitted = ("jobs", "submit", "--matrix", str(matrix))
    with small_disk(slurm, slurm.shared / "workspaces", 64):
        desk.run("jobs", "status")
        ballast = slurm.shared / "workspaces" / "ballast"
        fill = f"cat /dev/zero > {ballast} || true"
        slurm.run("head", fill)
        refused = desk.end(desk.start(*submitted), code=1)
        assert "the disk is full; free some space and run the same command again" in refused.stderr
        twin = desk.twin()
        assert twin.events("submitting") == []
        ballast.unlink()
        desk.run(*submitted)
        twin.until(lambda: all(folder.steps(0).records for folder in twin.folders()) and twin.folders(), "both make steps")
        slurm.run("head", fill)
        twin.until(lambda: twin.states() == ["failed", "failed"], "both have failed")
        assert all("the disk of" in run["why"] and run["why"].endswith("is full") for run in twin.runs())
        assert "2 run(s): 2 failed" in desk.run("jobs", "status").stdout
        fetched = json.loads(desk.run("collect", "fetch", "--json").stdout)
        assert [(run["state"], run["complete"]) for run in fetched] == [("failed", True)] * 2
        ballast.unlink()
        assert "2 run(s) submitted" in desk.run("jobs", "retry").stdout
        twin.until(lambda: twin.states() == ["running", "running"], "the next attempts run")
        twin.end()


@contextlib.contextmanager
def read_only_home(slurm: SlurmCluster):
    """Make the home folder of the nodes' user read-only on all nodes."""
    home = f"/home/{PRACTICE_USER}"
    try:
        for name in slurm.nodes:
            slurm.run(name, f"mount --bind {home} {home}; mount -o remount,bind,ro {home}", root=True)
        yield
    finally:
        for name in slurm.nodes:
            slurm.run(name, f"umount --lazy {home}", root=True)


@only_in_long_form
def test_runs_are_made_and_fetched_with_a_home_that_became_read_only(slurm, tmp_path):
    desk, other = Desk(slurm, tmp_path / "desk"), Desk(slurm, tmp_path / "other")
    matrix = tmp_path / "small.yaml"

    def submit_seeds(seeds: list[int]) -> tuple[str, ...]:
        matrix.write_text(MATRIX.format(name="small", steps=3, more=f"axes: {{strategy: [single], seed: {seeds}}}"))
        return "jobs", "submit", "--matrix", str(matrix), "--wait"

    desk.run(*submit_seeds([1]))
    with read_only_home(slurm):
        assert "Read-only file system" in slurm.answer("work1", "touch", f"/home/{PRACTICE_USER}/file").stderr
        desk.run(*submit_seeds([1, 2]))
        assert "2 run(s): 2 completed" in desk.run("jobs", "status").stdout
        fetched = json.loads(desk.run("collect", "fetch", "--json").stdout)
        assert [(run["state"], run["complete"]) for run in fetched] == [("completed", True)] * 2
        # That a new workspace is the user's own is noted in the home folder.
        assert "set XDG_STATE_HOME to a folder" in other.run(*submit_seeds([1]), code=1).stderr


@only_in_long_form
def test_provision_with_a_read_only_home_names_the_variable_that_helps(slurm, tmp_path):
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    here = ["unshare", "--mount", "sh", "-c", mount, str(tmp_path), "env", "-u", "XDG_CACHE_HOME", f"HOME={tmp_path}"]
    plan = [sys.executable, "-P", "-m", "provision", str(slurm.file), "plan", "--workspace", str(slurm.folder)]
    refused = subprocess.run([*here, *plan], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "the file system is read-only; set XDG_CACHE_HOME to a folder in which you may write" in refused.stderr
    cache = f"XDG_CACHE_HOME={slurm.folder}/cache"
    planned = subprocess.run([*here, cache, *plan], capture_output=True, text=True, check=False)
    assert planned.returncode == 0, planned.stderr


@only_in_long_form
def test_a_cut_link_of_the_controller_ends_no_run_and_the_next_fetch_goes_on(slurm, tmp_path):
    desk = Desk(slurm, tmp_path)
    matrix = tmp_path / "small.yaml"
    matrix.write_text(MATRIX.format(name="small", steps=4000, more=f"{CHECKPOINTS}{ONE_NODE}"))
    desk.run("jobs", "submit", "--matrix", str(matrix))
    told = tmp_path / ".shardlab/away.json"
    told.write_text(told.read_text().replace('"mark": "', '"mark": "another '))  # else this machine would copy the files itself
    twin = desk.twin()
    until_steps(twin, 60)
    (folder,) = twin.folders()
    big = folder.path / "trace" / "rank-00000.bin"
    slurm.run("head", f"mkdir -p {big.parent}; head -c {BIG_BYTES} /dev/urandom > {big}")
    arriving = tmp_path / "runs"

    def bytes_of() -> int:
        return sum(path.stat().st_size for path in arriving.rglob("*") if path.is_file())

    fetching = desk.start("collect", "fetch")
    until(lambda: bytes_of() > BIG_BYTES // 50, "a part has arrived", least_pause_s=0.01)
    with cut_link(slurm, "head"):
        broken = desk.end(fetching, code=1)
        time.sleep(OUTAGE_S / 2)
    assert "run the same command again to continue" in broken.stderr
    assert bytes_of() > BIG_BYTES // 50  # the next command goes on within the file

    # Slurm gave the node up and starts the run again, two minutes later, from its checkpoint.
    twin.until(lambda: twin.states() == ["completed"], "the run completes", HANG_S)
    twin.until(lambda: twin.submissions()[0].token not in twin.queue(), "its job is gone")
    desk.run("collect", "fetch")
    assert (arriving / folder.run_id / "trace" / big.name).read_bytes() == big.read_bytes()


@only_in_long_form
def test_provision_names_the_node_whose_link_is_cut_and_heals_the_cluster_afterwards(slurm):
    words = [sys.executable, "-P", "-m", "provision", str(slurm.file), "--workspace", str(slurm.folder)]
    with cut_link(slurm, "work2"):
        broken = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert broken.returncode == 1
    assert re.search(r"work2 +operations +failed +space failed: \S+ cannot be reached", broken.stdout)
    assert "without work2" in broken.stdout  # what can be checked on the other nodes is checked
    again = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert again.returncode == 0, again.stdout


@only_in_long_form
def test_submits_at_once_from_two_nodes_and_twice_from_a_desk_send_each_run_once(slurm, study, tmp_path):
    one, desk = study("extra: {begin: now+1hour}"), Desk(slurm, tmp_path)
    seeds = "axes: {strategy: [single], seed: [1, 2, 3, 4, 5, 6]}"
    # The nodes' home folders differ, so --trust is needed on the worker.
    words = ["submit", "--matrix", one.matrix(seeds), "--workspace", str(one.path), "--trust"]
    (tmp_path / "cluster.yaml").write_text((one.path / "cluster.yaml").read_text())
    (tmp_path / "small.yaml").write_text(MATRIX.format(name="small", steps=3, more=seeds))
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(slurm.answer, node, slurm.python, "-P", "-m", "jobs", *words) for node in ("head", "work1")]
        at_once = [desk.start("jobs", "submit", "--matrix", str(tmp_path / "small.yaml")) for _ in range(2)]
    assert [answer.result().code for answer in both] == [0, 0], [answer.result().stderr for answer in both]
    for process in at_once:
        desk.end(process)
    for this in (one, desk.twin()):
        assert len(this.events("submitted")) == 6
        (sent,) = this.submissions()
        assert this.queue().count(sent.token) == 1
        this.end()


@contextlib.contextmanager
def memory_limits(slurm: SlurmCluster):
    """Let Slurm limit the memory of jobs by control groups during the block, which practice nodes do not need otherwise."""
    workers, conf = ("work1", "work2"), "/etc/slurm/cgroup.conf"
    restart = "mount -o remount,bind,{} /sys/fs/cgroup/memory && systemctl restart slurmd"
    slurm.run("head", f"cp -p {conf} {conf}.before; echo ConstrainRAMSpace=yes >> {conf}", root=True)
    try:
        with slurm.configured("TaskPlugin=task/cgroup"):
            for name in workers:
                slurm.run(name, restart.format("rw"), root=True)
            until(slurm.idle, "the nodes are there")
            yield
    finally:
        slurm.run("head", f"mv {conf}.before {conf}", root=True)
        for name in workers:
            slurm.run(name, "find /sys/fs/cgroup/memory/slurm* -depth -type d -exec rmdir {} ';' || true", root=True)
            slurm.run(name, restart.format("ro"), root=True)
        until(slurm.idle, "the nodes are there")


@only_in_long_form
@pytest.mark.skipif(not Path("/sys/fs/cgroup/memory").is_dir(), reason="control groups of version 1 are tested")
def test_a_run_above_the_memory_of_its_job_is_out_of_memory(slurm, study):
    one = study("mem: 300M")
    with memory_limits(slurm):
        submit(one)
        one.until(lambda: one.states() == ["oom"], "Slurm ends the run")
        assert "OOM killer" in one.runs()[0]["why"]
        assert one.folders()[0].judge().state == "oom"
        assert one.json("retry")["runs"] == []
        one.end()


def run_out_of_memory() -> None:
    """Let the kernel end a process outside of the nodes because the limit of its control group is reached."""
    version_1 = Path("/sys/fs/cgroup/memory")
    group = (version_1 if version_1.is_dir() else version_1.parent) / f"shardlab-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if version_1.is_dir() else "memory.max")).write_text("32M")
        script = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c 'bytearray(1 << 28)'"
        assert subprocess.run(["sh", "-c", script], check=False).returncode == -signal.SIGKILL
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), "the process has ended")
        group.rmdir()


@only_in_long_form
def test_a_killed_rank_is_not_out_of_memory_because_another_process_of_its_node_was(study):
    one = study()
    submit(one)
    until_steps(one)
    run_out_of_memory()
    kill_first(one, RANK, one.runs()[0]["hosts"][0])
    one.until(lambda: one.states() == ["failed"], "the run has failed")
    assert "SIGKILL ended rank" in one.runs()[0]["why"]
    assert "perhaps of another job" in one.runs()[0]["why"]


@only_in_long_form
def test_a_thousand_runs_are_sent_with_two_calls_and_asked_for_with_one(study):
    one = study("extra: {begin: now+1hour}")
    calls = {name: one.path / f"{name}.calls" for name in ("sbatch", "squeue", "sacct", "scancel", "scontrol")}
    for name, log in calls.items():
        environment = one.stand_in(name, COUNTED.format(log=log, command=name))

    def count() -> dict[str, int]:
        counted = {name: len(log.read_text().splitlines()) if log.exists() else 0 for name, log in calls.items()}
        for log in calls.values():
            log.unlink(missing_ok=True)
        return counted

    seeds = ", ".join(str(seed) for seed in range(1, 1001))
    one.jobs("submit", "--matrix", one.matrix(f"axes: {{strategy: [single], seed: [{seeds}]}}", steps=1), env=environment)
    # One of the calls of sbatch is a test. scontrol is asked for the limits of the partition and the size of an array.
    assert count() == {"sbatch": 2, "squeue": 0, "sacct": 0, "scancel": 0, "scontrol": 2}
    assert len(one.json("status", env=environment)["runs"]) == 1000
    assert count() == {"sbatch": 0, "squeue": 1, "sacct": 0, "scancel": 0, "scontrol": 0}
    one.jobs("cancel", "--all", env=environment)
    assert count()["scancel"] == 2
    assert set(one.states()) == {"cancelled"}
