"""Tests of `jobs` on a real Slurm: each run starts exactly once, no run is lost, and no failed run is reported as completed."""

import json
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support_e2e import HANG_S, clock, holds_pause
from support_long import LONG, only_in_long_form
from support_slurm import FOREVER, MATRIX, RANKS, Desk, studies

import templates
from shardlab.runs import suspension
from shardlab.runs.checkpoint import list_checkpoints, parse_checkpoint_step
from shardlab.runs.rundir import RunDir
from shardlab.runs.suspension import MIN_SUSPENSION_S

pytestmark = pytest.mark.e2e
# A key of the cluster file that makes jobs wait in the queue, for tests in which no job has to run.
HELD = "extra: {begin: now+1hour}"
SAVES = "  instruments: {checkpoints: {every_steps: 20}}\naxes: {strategy: [ddp], gpus: [2]}"
SEEDS = "axes: {strategy: [single], seed: [1, 2, 3, 4]}"
# A script that prints the states (such as T: stopped) of the ranks and supervisors on a node, each state once.
PROCESS_STATES = (
    f"for p in $({RANKS}; pgrep -f '[j]obs.attempt'); do sed -n 's/^State:\\t\\(.\\).*/\\1/p' /proc/$p/status; done | sort -u"
)


@pytest.fixture
def study(slurm, request):
    with studies(slurm, request.node.name) as make:
        yield make


def while_slurmctld_is_away(desk, twin, held, without_accounts):
    """Is called while slurmctld is down. Checks the states that shardlab reports meanwhile, and that it keeps submissions for
    later.

    Of the four runs of `twin`, one continues, one ends and two wait in the queue. In Slurm 26.05, the job step of a run whose
    ranks have ended waits for slurmctld. So the supervisor of the ended run waits too, and the run is still reported as
    running.
    """
    step_waits = twin.slurm.version >= (26, 5)
    with ThreadPoolExecutor() as pool:  # each of these calls waits as long as Slurm's own commands wait for slurmctld
        sent = pool.submit(held.start, "submit", "--matrix", held.matrix(SEEDS))
        results = twin.until(lambda: results_of_ended_tasks(twin), "the ranks of a run end, and its sampler")
        twin.until(lambda: step_waits or twin.events("exited"), "a run ends")
        states = [folder.judge().state for folder in twin.folders()]
        assert sorted(states) == sorted(["running" if step_waits else "completed", "pending", "pending", "running"])
        running = [folder.path for folder, state in zip(twin.folders(), states, strict=True) if state == "running"]
        # Exactly one of the runs that are reported as running has no result, because its ranks still work.
        assert len(set(running) - {result.parent for result in results}) == 1
        samples = [path / "samples" for path in running]
        files = contents(twin.path, *samples)
        shown = pool.submit(desk.run, "jobs", "status")
        told = [pool.submit(twin.runs, env=env) for env in ({}, without_accounts)]
    for one in told:
        assert [run["state"] for run in one.result()] == states
        assert all("does not answer" in run["scheduler"]["raw"] for run in one.result())
    assert shown.result().stdout.count("does not answer") == 4
    assert "does not answer" in sent.result().stderr
    assert contents(twin.path, *samples) == files


def results_of_ended_tasks(study):
    """Returns the paths of the results of runs whose task (the process that starts ranks on a node) has ended. The task writes
    the log of its sampler last, so a log with content means that no other file of the run will change."""
    found = study.path.glob("runs/*/result.json")
    return [path for path in found if any(log.stat().st_size for log in (path.parent / "log").glob("sampler.*.log"))]


def contents(folder, *but):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent not in but}


def test_two_strategies_run_from_a_desk_to_the_report_with_slurmctld_away(slurm, study, tmp_path):
    desk, held = Desk(slurm, tmp_path), study(HELD)
    without_accounts = held.stand_in("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    matrix = str(tmp_path / "desk.yaml")
    Path(matrix).write_text(MATRIX.format(name="desk", steps=4, more="axes: {strategy: [ddp, fsdp2], gpus: [2, 4]}"))
    waiting = desk.start("jobs", "submit", "--matrix", matrix, "--wait", "--json")
    with slurm.frozen_ranks("work1"):
        twin = desk.twin()
        twin.until(lambda: "work2" in {event.host for event in twin.events("met")}, "the other run is at work")
        with slurm.without_slurmctld(60.0 if LONG else 5.0):
            while_slurmctld_is_away(desk, twin, held, without_accounts)
    assert "4 skipped" in held.jobs("submit", "--matrix", f"{held.path}/small.yaml")
    assert held.queue().count(held.submissions()[0].token) == 1
    said = json.loads(desk.end(waiting).stdout)
    assert [run["state"] for run in said["runs"]] == ["completed"] * 4
    assert [run["hosts"] for run in said["runs"] if run["cell"]["nnodes"] == 2] == [["work1", "work2"]] * 2
    assert all(run["rehearsal"] for run in said["runs"])
    assert {run["scheduler"]["raw"] for run in said["runs"]} <= {"COMPLETED", "COMPLETING", "RUNNING"}
    for name in ("submitted", "started", "exited"):
        assert len(twin.events(name)) == 4
    assert "skipped: completed already" in desk.run("jobs", "submit", "--matrix", matrix).stdout
    fetched = json.loads(desk.run("collect", "fetch", "--json").stdout)
    assert [(run["complete"], run.get("problems", [])) for run in fetched] == [(True, [])] * 4
    summary = json.loads(desk.run("collect", "summarize", "--json").stdout)
    assert {row["cell"]["nnodes"] for row in summary["rows"]} == {1, 2}
    losses = {round(row["metrics"]["final_loss"]["value"], 3) for row in summary["rows"]}
    assert len(losses) == 1
    assert (tmp_path / "report/index.html").stat().st_size > 10_000
    shutil.rmtree(tmp_path / "runs")
    told = tmp_path / ".shardlab/away.json"
    # The file away.json contains the mark of the folder on the cluster. If the mark in it is changed, this machine believes
    # that it cannot see the folder, so `collect fetch` must copy the files.
    told.write_text(told.read_text().replace('"mark": "', '"mark": "another '))
    again = json.loads(desk.run("collect", "fetch", "--json").stdout)
    assert [run["files"] for run in again] == [run["files"] for run in fetched]
    assert not any(run.get("problems") for run in again)
    (run,) = [path for path in (tmp_path / "runs").iterdir() if path.name.startswith("ddp-vgg16-tiny-g4")]
    (run / "result.json").write_text("{}")
    assert "its content changed" in desk.run("collect", "fetch", code=1).stderr


def test_a_run_is_made_once_however_often_its_script_is_sent(study):
    one = study()
    one.jobs("submit", "--matrix", one.matrix("axes: {strategy: [single]}"), "--wait")
    (folder,) = one.folders()
    again = one.slurm.answer(
        "head", "sbatch", "--wait", "--parsable", f"--output={folder.log}/again.out", str(folder.path / "job.sbatch")
    )
    assert again.code == 75
    assert "claimed already" in (folder.log / "again.out").read_text()
    assert len(one.events("started")) == 1
    assert one.states() == ["completed"]


# Runs `jobs` and kills it at one moment of a submission. The moments: `intended`, before sbatch is called; `answered`,
# before the answer of sbatch is recorded for the first run; `noted`, before the file of the submission says "sent"; `kept`,
# after the file says "sent".
KILLED = """
import os, runpy, signal, sys
step = sys.argv.pop(1)
asked = written = False

def kill(event, arguments):
    global asked, written
    reached = ""
    if event == "subprocess.Popen" and arguments[1][0].endswith("sbatch") and "--test-only" not in arguments[1]:
        reached, asked = "intended", True
    elif event == "os.rename" and asked and "/submissions/" in str(arguments[1]):
        reached, written = "noted", True
    elif event == "open" and written:
        reached = "kept"
    elif event == "open" and asked and "/events." in str(arguments[0]):
        reached = "answered"
    if reached == step:
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
runpy.run_module("jobs", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("step", ["intended", "answered", "kept", "noted"])
def test_a_submitter_killed_at_any_step_leaves_one_job_per_run(study, step):
    one = study(HELD)
    name = one.matrix(SEEDS)
    argv = [one.slurm.python, "-P", "-c", KILLED, step, "submit", "--matrix", name, "--workspace", str(one.path)]
    assert one.slurm.nodes["head"].run(argv, timeout_s=HANG_S).code == 128 + signal.SIGKILL
    assert set(one.states()) == {"pending"}
    one.jobs("submit", "--matrix", name)
    assert set(one.states()) == {"pending"}
    (sent,) = one.submissions()
    assert sent.state == "sent"
    assert one.queue().count(sent.token) == 1
    assert {event.data["job"] for event in one.events("submitted")} == {f"{sent.job}_{n}" for n in range(4)}
    assert "4 skipped" in one.jobs("submit", "--matrix", name)


@pytest.mark.parametrize(("accepts", "jobs"), [(True, 1), (False, 1)])
def test_an_unclear_answer_of_sbatch_is_looked_up_in_the_queue(study, accepts, jobs):
    one = study(HELD)
    first = '/usr/bin/sbatch "$@" > /dev/null\n' if accepts else ""
    # The stand-in for sbatch loses only the answer of its first call.
    tested = 'case "$*" in *--test-only*) exec /usr/bin/sbatch "$@";; esac\n'
    lost = one.stand_in("sbatch", f"{tested}if [ ! -e {one.path}/lost ]; then\n: > {one.path}/lost\n{first}"
              'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2\nexit 1\nfi\n'
              'exec /usr/bin/sbatch "$@"')  # fmt: skip
    one.jobs("submit", "--matrix", one.matrix(SEEDS), env=lost)
    (sent,) = one.submissions()
    assert one.queue().count(sent.token) == jobs
    assert set(one.states()) == {"pending"}


def test_two_submitters_at_once_send_each_run_once(study):
    one = study(HELD)
    name = one.matrix(SEEDS)
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(one.start, "submit", "--matrix", name) for _ in range(2)]
    ended = [submitter.result() for submitter in both]
    assert [submitter.code for submitter in ended] == [0, 0], [submitter.stderr for submitter in ended]
    (sent,) = one.submissions()
    assert one.queue().count(sent.token) == 1


def test_a_rejected_request_is_reported_before_writing_and_sent_after_its_repair(study):
    one = study("constraint: nowhere")
    name = one.matrix("axes: {strategy: [single]}")
    refused = one.start("submit", "--matrix", name)
    assert refused.code == 2
    assert "Invalid feature specification. Decided in the cluster file by: slurm.constraint." in refused.stderr
    assert one.runs() == []
    one.write("cluster.yaml", one.slurm.file.read_text())
    assert "1 run(s) submitted" in one.jobs("submit", "--matrix", name)


@only_in_long_form
def test_a_limit_on_the_jobs_of_a_user_is_waited_out_and_each_run_made_once(study):
    one = study()
    user = one.slurm.run("head", "id -un").strip()
    limited = f"sacctmgr -iQ add account limited; sacctmgr -iQ add user {user} account=limited MaxSubmitJobs=2"
    lifted = f"sacctmgr -iQ delete user {user}; sacctmgr -iQ delete account limited"
    seeds = "axes: {strategy: [single], seed: [1, 2, 3, 4]}"
    with one.slurm.configured("AccountingStorageEnforce=limits"):
        try:
            one.slurm.run("head", limited, root=True)
            runs = one.json("submit", "--matrix", one.matrix(seeds), "--wait")["runs"]
        finally:
            one.slurm.answer("head", "sh", "-c", lifted, root=True)
    assert [run["state"] for run in runs] == ["completed"] * 4
    assert len(one.events("started")) == len(one.events("submitted")) == 4
    assert len({event.data["job"] for event in one.events("submitted")}) == 4
    # One submission with all four runs would exceed the limit, so there are several.
    assert len([sent for sent in one.submissions() if sent.state == "sent"]) > 1


def test_a_workspace_with_a_hostile_name_runs_on_slurm(study):
    one = study(suffix=" a 'b' \"c\" $d; e %j")
    one.jobs("submit", "--matrix", one.matrix("axes: {strategy: [ddp], gpus: [2], nnodes: [2]}"), "--wait")
    assert one.states() == ["completed"]
    (folder,) = one.folders()
    folder.rank_log(1).write_text("a word of rank 1\n")
    assert one.jobs("logs", "ddp*", "--rank", "1") == "a word of rank 1\n"


def test_cancelled_runs_end_and_a_retry_makes_them(study):
    one = study()
    name = one.matrix("axes: {strategy: [ddp], gpus: [2, 4]}", steps=FOREVER)
    one.jobs("submit", "--matrix", name)
    one.until(lambda: any(folder.steps(0).records for folder in one.folders()), "a run makes steps")
    said = one.json("cancel", "--all")["runs"]
    assert {run["state"] for run in said} == {"cancelled"}
    one.until(one.slurm.idle, "the nodes are free")
    assert not {sent.token for sent in one.submissions()} & set(one.queue())
    again = one.json("retry", "--only", "cancelled", "--where", "gpus == 2")["runs"]
    assert [run["attempt"] for run in again] == [2]
    one.until(lambda: "running" in one.states(), "the second attempt runs")


def test_packed_runs_share_an_allocation_and_nothing_else(study):
    one = study()
    broken = "axes: {strategy: [single], launcher: [torchrun, submitit], memory_limit_gib: [0.001, 8]}"
    runs = one.json("submit", "--matrix", one.matrix(broken), "--pack", "--wait", code=1)["runs"]
    assert [run["state"] == "completed" for run in runs] == [run["cell"]["memory_limit_gib"] == 8 for run in runs], runs
    jobs = {run["id"]: run["scheduler"]["id"] for run in runs}
    sent = one.submissions()
    assert [one.kind for one in sent] == ["pack", "pack"]
    for allocation in sent:
        assert {jobs[run] for run in allocation.runs} == {allocation.job}
        folders = [RunDir(one.path / "runs" / run) for run in allocation.runs]
        first, second = ([event for event in folder.read_events() if event.writer == "attempt"] for folder in folders)
        assert first[-1].event == "exited"
        assert first[-1].wall_s <= second[0].wall_s


def test_a_run_past_its_time_limit_resumes_from_its_checkpoint(study):
    one, measured = study(), study(suffix="-measured")
    text = MATRIX.format(name="limited", steps=FOREVER, more="axes: {strategy: [ddp], gpus: [2]}")
    measured.jobs("submit", "--matrix", measured.matrix("axes: {strategy: [ddp], gpus: [2]}"), "--wait")
    (first,) = measured.folders()
    start = next(event.wall_s for event in first.read_events() if event.event == "started")
    # This time limit is a multiple of what the run above needed for its first step under the present load of the machine.
    limit = clock(round(10 + 3 * (first.steps(0).records[0].wall_s - start)))
    limits = f'  instruments: {{checkpoints: {{every_steps: 1000000}}}}\n  time_limit: "{limit}"\n'
    name = one.write("limited.yaml", text.replace("  steps", f"{limits}  steps"))
    one.jobs("submit", "--matrix", name)
    one.until(lambda: one.events("requeued"), "its time is up and Slurm has it again")
    (folder,) = one.folders()
    (saved,) = list_checkpoints(folder.path)
    assert one.states() == ["pending"]
    job = one.events("submitted")[0].data["job"]

    def goes_on():
        # Slurm would start the requeued job after two minutes. It ignores this command until the first start has ended.
        one.slurm.answer("head", "scontrol", "update", f"JobId={job}", "StartTime=now")
        return one.events("resumed")

    (resumed,) = one.until(goes_on, "it goes on")
    assert resumed.data["step"] == parse_checkpoint_step(saved)
    assert one.events("started")[-1].data["restarts"] == 1
    assert one.states() == ["running"]


def test_a_crashed_node_is_reported_and_its_run_started_again(study):
    one = study()
    name = one.matrix("axes: {strategy: [ddp], gpus: [4]}", steps=FOREVER)
    one.jobs("submit", "--matrix", name)
    one.until(lambda: one.folders() and one.folders()[0].steps(0).records, "the run makes steps")
    one.slurm.machine("work2").crash()
    try:
        one.until(lambda: one.states() == ["pending"], "Slurm gives the node up and the run waits again")
        (run,) = one.runs()
        assert "started again by Slurm" in run["why"]
    finally:
        one.slurm.boot("work2")
    one.until(one.slurm.idle, "the node is back", 180)
    job = one.events("submitted")[0].data["job"]
    one.slurm.run("head", f"scontrol update JobId={job} StartTime=now")
    one.until(lambda: one.states() == ["running"], "it runs again")
    assert len(one.events("started")) == 2
    one.until(lambda: (one.folders()[0].path / "before-restart-1").exists(), "what the first start recorded is put aside", 30)


@only_in_long_form
def test_a_killed_slurmd_leaves_one_copy_of_its_run(study):
    one = study()
    one.jobs("submit", "--matrix", one.matrix("axes: {strategy: [ddp], gpus: [4]}", steps=FOREVER))
    one.until(lambda: one.folders()[0].steps(0).records, "the run makes steps")
    one.slurm.run("work2", "kill -KILL $(pidof slurmd)", root=True)  # the ranks on work2 survive the end of slurmd
    try:
        one.until(lambda: one.states() == ["pending"], "Slurm gives the node up and the run waits again")
    finally:
        one.slurm.run("work2", "systemctl start slurmd", root=True)
    # Slurm requeues the run and starts it a second time. If a job step of the first start ends on a node after that, Slurm
    # starts no job step on this node any more. So the test waits until these job steps have ended.
    for node in ("work1", "work2"):
        one.until(lambda node=node: not one.slurm.run(node, "pidof slurmstepd || true"), f"the first start has left {node}")
    one.until(one.slurm.idle, "the node is back", 180)
    job = one.events("submitted")[0].data["job"]
    one.slurm.run("head", f"scontrol update JobId={job} StartTime=now")
    one.until(lambda: len(one.events("met")) == 2, "the ranks of the second start have met")
    assert [len(one.slurm.run(node, RANKS).split()) for node in ("work1", "work2")] == [2, 2]
    assert [event.data["restarts"] for event in one.events("started")] == [0, 1]


@only_in_long_form
def test_a_preempted_run_waits_if_slurm_requeues_it_and_is_preempted_otherwise(study):
    again, gone = study(suffix="-again"), study("requeue: 0, partition: graced", "-gone")
    both = "Nodes=work1,work2 DefMemPerCPU=100"
    partitions = [f"PartitionName=urgent PriorityTier=10 {both}", f"PartitionName=graced GraceTime=30 {both}"]
    with again.slurm.configured("PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", *partitions):
        again.until(again.slurm.idle, "the nodes are there")
        for one in (again, gone):
            one.jobs("submit", "--matrix", one.matrix("axes: {strategy: [ddp], gpus: [2]}", steps=FOREVER))
        for one in (again, gone):
            one.until(lambda one=one: one.folders()[0].steps(0).records, "the run makes steps")
        taken = again.slurm.run("head", "sbatch --parsable -p urgent -N2 --exclusive -o /dev/null --wrap 'sleep 60'").strip()
        again.until(lambda: again.events("exited") and gone.events("exited"), "both are told to end")
        seen = []
        again.until(lambda: seen.append(again.states()[0]) or seen[-1] != "running", "Slurm has it again")
        assert seen[-1] == "pending"
        assert "after Slurm told it to end" in again.runs()[0]["why"]
        gone.until(lambda: gone.states() == ["preempted"], "Slurm says why")
        again.slurm.run("head", f"scancel {taken}")
        assert again.json("retry")["runs"] == []
        assert [(run["attempt"], run["state"]) for run in gone.json("retry")["runs"]] == [(2, "pending")]
        for one in (again, gone):
            one.end()


def begin_saving_run(one):
    """Submit a run that saves checkpoints, and wait until it has saved one. Returns the number of its job."""
    one.jobs("submit", "--matrix", one.matrix(SAVES, steps=600))
    one.until(lambda: list_checkpoints(one.folders()[0].path), "it saves a checkpoint")
    assert not one.events("exited")
    return one.events("submitted")[0].data["job"]


def must_go_on_to_its_end(one, job):
    """Wait until a run that Slurm has requeued completes, and check that it resumed from its checkpoint."""

    def goes_on():
        one.slurm.answer("head", "scontrol", "update", f"JobId={job}", "StartTime=now")  # it would wait for two minutes
        return one.events("resumed")

    assert one.until(goes_on, "it resumes")[0].data["step"] >= 20
    one.until(lambda: one.states() == ["completed"], "it completes")
    assert [event.data["restarts"] for event in one.events("started")] == [0, 1]


def must_be_recorded(one, state):
    """Check that Slurm's word is shown, and recorded for `collect`."""
    one.until(lambda: one.states() == [state], "Slurm says why")
    (folder,) = one.folders()
    assert folder.judge().state == state


@only_in_long_form
def test_runs_that_save_checkpoints_are_cancelled_or_resume_as_slurm_is_told(study):
    gone, again = study(suffix="-gone"), study(suffix="-again")
    gone.slurm.run("head", f"scancel {begin_saving_run(gone)}")
    must_be_recorded(gone, "cancelled")
    job = begin_saving_run(again)
    again.slurm.run("head", f"scontrol requeue {job}")
    again.until(lambda: again.states() == ["pending"], "Slurm has it again")
    must_go_on_to_its_end(again, job)


def test_preempted_runs_that_save_checkpoints_resume(study):
    again, gone = study(suffix="-again"), study("partition: cancelled", "-gone")
    both = "Nodes=work1,work2 DefMemPerCPU=100"
    partitions = [f"PartitionName=urgent PriorityTier=10 {both}", f"PartitionName=cancelled PreemptMode=CANCEL {both}"]
    urgent_job = "sbatch --parsable -p urgent -N2 --exclusive -o /dev/null --wrap 'sleep 600'"
    with again.slurm.configured("PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE", *partitions):
        again.until(again.slurm.idle, "the nodes are there")
        try:
            job, taken = begin_saving_run(again), again.slurm.run("head", urgent_job).strip()
            again.until(lambda: again.states() == ["pending"], "Slurm has it again")
            again.slurm.run("head", f"scancel {taken}")
            must_go_on_to_its_end(again, job)
            begin_saving_run(gone)
            taken = gone.slurm.run("head", urgent_job).strip()
            must_be_recorded(gone, "preempted")
            gone.slurm.run("head", f"scancel {taken}")
            assert [(run["attempt"], run["state"]) for run in gone.json("retry")["runs"]] == [(2, "pending")]
            gone.until(lambda: gone.states() == ["completed"], "the next attempt completes")
            assert gone.events("resumed")[0].data["step"] >= 20
        finally:
            again.slurm.run("head", "scancel --me --partition=urgent,cancelled")


@only_in_long_form
def test_a_run_in_an_allocation_that_is_cancelled_while_it_saves_is_cancelled(study):
    one = study()
    words = ["submit", "--matrix", one.matrix(SAVES, steps=FOREVER), "--in-allocation", "--wait"]
    jobs = [one.slurm.python, "-P", "-m", "jobs", *words, "--workspace", str(one.path)]
    salloc = ["salloc", "--quiet", "--job-name=mine", "--nodes=1", "--exclusive", "--gpus-per-node=2", *jobs]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(one.slurm.answer, "head", *salloc)
        one.until(lambda: one.folders() and list_checkpoints(one.folders()[0].path), "it saves a checkpoint")
        one.slurm.run("head", "scancel --me --name=mine")
        must_be_recorded(one, "cancelled")
        assert waiting.result().code != 0


@only_in_long_form
def test_a_suspended_run_continues_and_its_suspension_is_recorded(study):
    one = study()
    one.jobs("submit", "--matrix", one.matrix("axes: {strategy: [ddp], gpus: [4]}", steps=FOREVER))
    (folder,) = one.folders()
    one.until(lambda: folder.steps(3).records, "the run makes steps")
    job = one.events("submitted")[0].data["job"]
    one.slurm.run("head", f"scontrol suspend {job}", root=True)
    try:
        one.until(lambda: one.runs()[0]["scheduler"]["raw"] == "SUSPENDED", "Slurm has suspended it")
        # Slurm reports the suspension a moment before it stops the processes.
        one.until(lambda: {one.slurm.run(node, PROCESS_STATES) for node in ("work1", "work2")} == {"T\n"}, "all are stopped")
        time.sleep(MIN_SUSPENSION_S)
        assert one.states() == ["running"]
        before = len(folder.steps(3).records)
    finally:
        one.slurm.run("head", f"scontrol resume {job}", root=True)
    (still,) = one.until(lambda: one.events("stood_still"), "its supervisor knows")
    assert still.data["seconds"] >= MIN_SUSPENSION_S
    one.until(lambda: len(folder.steps(3).records) > before + 1, "it makes more steps")
    (run,) = one.runs()
    assert (run["state"], run["scheduler"]["raw"]) == ("running", "RUNNING")
    records = suspension.mark_suspended(folder.steps(3).records, suspension.read_suspensions(folder.read_events()))
    counted = [record for record in records if not record.watched]
    assert counted
    assert not any(holds_pause(record, still) for record in counted)


def test_cells_run_inside_an_allocation_that_a_person_has(study):
    one = study()
    cells = "axes: {strategy: [ddp], gpus: [2, 4]}"
    words = ["submit", "--matrix", one.matrix(cells), "--in-allocation", "--wait", "--json"]
    outside = one.start(*words)
    assert outside.code == 2
    assert "this process is in no job of Slurm" in outside.stderr
    jobs = [one.slurm.python, "-P", "-m", "jobs", *words, "--workspace", str(one.path)]
    small = one.slurm.answer("head", "salloc", "--quiet", "--nodes=1", "--gpus-per-node=2", *jobs)
    assert small.code == 2
    assert "needs 2 nodes, the cluster has 1." in small.stderr
    assert one.runs() == []
    done = one.slurm.answer("head", "salloc", "--quiet", "--nodes=2", "--exclusive", "--gpus-per-node=2", *jobs)
    assert done.code == 0, f"{done.stdout}\n{done.stderr}\n{one.logs()}"
    assert [run["state"] for run in json.loads(done.stdout)["runs"]] == ["completed"] * 2
    assert {run["scheduler"]["name"] for run in one.runs()} == {"allocation"}
    assert {run["cell"]["gpus"]: len(run["hosts"]) for run in one.runs()} == {2: 1, 4: 2}
    ends = sorted((event.wall_s, event.event) for name in ("started", "exited") for event in one.events(name))
    assert [name for _, name in ends] == ["started", "exited"] * 2
    assert one.queue() == []


@only_in_long_form
def test_changed_packages_hold_all_runs_until_a_person_releases_them(study):
    """Packages changed after the submission, so all runs are held, and `jobs retry --only held` lets them start with the same
    jobs. `requeue: 0` forbids Slurm to restart a job, so a start at which a run was only held must not count as a start of the
    run."""
    made = study("requeue: 0, extra: {begin: now+10}")
    made.begin()
    packages = {"PYTHONPATH": f"{made.path}/site"}
    shipped = (Path(templates.TEMPLATES_FOLDER) / "launch/slurm.sbatch.j2").read_text()
    path = 'PYTHONPATH="$SHARDLAB_SOURCE'
    assert path in shipped
    made.write("templates/launch/slurm.sbatch.j2", shipped.replace(path, f"{path}:{made.path}/site"))
    made.jobs("submit", "--matrix", made.matrix(SEEDS), env=packages)
    # A new package makes the digest of the packages differ from the digest at the submission. pip writes this metadata for a
    # package.
    made.write("site/some_package-1.0.dist-info/METADATA", "")
    made.until(lambda: all(run["held"] and "held" in run["scheduler"]["raw"].lower() for run in made.runs()), "all are held")
    assert {run["state"] for run in made.runs()} == {"pending"}
    assert all("`jobs retry --only held`" in run["why"] for run in made.runs())
    assert not made.events("started")
    jobs = {run["id"]: run["scheduler"]["id"] for run in made.runs()}
    requeued = {event.data["requeued"] for event in made.events("held")} - {""}
    # Slurm requeued only runs that a node had already started, and two nodes start at most two of these runs at a time.
    assert 1 <= len(requeued) <= 2
    assert "4 run(s) submitted" in made.jobs("retry", "--only", "held", env=packages)
    made.slurm.run("head", f"for job in {' '.join(requeued)}; do scontrol update JobId=$job StartTime=now; done")
    made.until(lambda: made.states() == ["completed"] * 4, "they are made")
    assert {run["id"]: run["scheduler"]["id"] for run in made.runs()} == jobs
    assert {run["attempt"] for run in made.runs()} == {1}
