"""The state of a run follows from the answer of Slurm together with the run's own records.

The folder recorded/slurm contains what sacct and squeue of Slurm 22.05 printed on practice nodes, with the columns that
jobs.slurm.query asks for. Job 18 completed, job 19 failed, job 20 was cancelled while it ran, jobs 23 and 25 were cancelled
while they waited, job 21 exceeded its time limit, and job 24 was requeued. Job 22 is an array of which some tasks had ended.
"""

import os
import re
import time
from pathlib import Path

import msgspec
import pytest
from support_cells import CELL
from support_trust import make_own

from jobs.schedulers import allocation, slurm
from jobs.slurm import query, states
from jobs.status import reconcile
from shardlab.files import files
from shardlab.runs.record import Event, LineWriter, Result, StepRecord
from shardlab.runs.run import Run, World
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import ENDED_IN_SLURM, FINAL_STATES, STATE_MEANINGS
from shardlab.workspace.workspace import Workspace

RECORDED = Path(__file__).parents[2] / "recorded" / "slurm"
ALL = ["18", "19", "20", "21", "22", "23", "24", "25"]
# (exit code, error) of Slurm's commands if the controller does not answer, the database does not answer, or accounting is
# disabled.
AWAY = (1, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
NO_DATABASE = (1, "sacct: error: Problem talking to the database: Connection refused")
NO_ACCOUNTS = (1, "Slurm accounting storage is disabled")
EVERY = sorted(
    {*states.WAITING_STATES, *states.RUNNING_STATES, *states.RUN_STATE_BY_END, "CANCELLED by 1000", "COMPLETING+", "A_NEW_ONE"}
)


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Returns a function that sets what the stand-ins for Slurm's commands print: a text, or (exit code, error)."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()

    def say(**answers):
        for name, answer in answers.items():
            code, text, stream = (0, answer, 1) if isinstance(answer, str) else (*answer, 2)
            (tmp_path / f"{name}.txt").write_text(text)
            command = tmp_path / "bin" / name
            command.write_text(f"#!/bin/sh\ncat '{tmp_path}/{name}.txt' >&{stream}\nexit {code}\n")
            command.chmod(0o755)

    return say


def recorded(name):
    return (RECORDED / f"{name}.txt").read_text()


def said(found):
    return {job.id: states.translate_state(job.state) for job in found.jobs.values()}


def test_squeue_counts_before_an_outdated_sacct(says):
    says(sacct=recorded("sacct-middle"), squeue=recorded("squeue-middle"))
    found = query.find_jobs(ALL, 0.0)
    assert (found.no_answer_reason, found.complete) == ("", True)
    assert found.jobs["24"].state == "PENDING"  # job 24 was requeued; the accounting database still had it as running
    assert found.jobs["24"].reason == "BeginTime"
    assert found.jobs["22_31"].start_s == 1795283124.0
    assert found.jobs["22_32"].start_s is None
    assert found.jobs["22_1"].node_list == "work1"
    assert "8" not in found.jobs  # job 8 belongs to another user
    ends = {"18": "completed", "19": "failed", "20": "cancelled", "21": "running", "23": "pending", "22_59": "pending"}
    assert ends.items() <= said(found).items()
    assert {f"25_{task}" for task in (0, 3, 160, 300, 301, 399)} <= found.jobs.keys()
    assert "25_161" not in found.jobs


def test_squeue_is_not_called_if_sacct_says_that_all_jobs_have_ended(says):
    """If sacct says that all jobs have ended, squeue is not called."""
    says(sacct=recorded("sacct-end"), squeue=(99, "squeue: must not be asked"))
    found = query.find_jobs(ALL, 0.0)
    assert (found.no_answer_reason, found.complete) == ("", True)
    ends = {"18": "completed", "19": "failed", "20": "cancelled", "21": "timeout", "23": "cancelled", "24": "cancelled"}
    assert ends.items() <= said(found).items()
    assert said(found)["25_300"] == "cancelled"


def test_a_task_listed_alone_and_in_a_range_has_the_state_of_its_own_line(says):
    """sacct may list a task of an array by itself and also in a range of waiting tasks. Its own line decides."""
    says(sacct=recorded("sacct-middle"), squeue=AWAY)
    found = query.find_jobs(ALL, 0.0)
    assert (found.no_answer_reason, found.complete) == ("Unable to contact slurm controller (connect failure)", False)
    assert (said(found)["22_27"], said(found)["22_28"]) == ("failed", "pending")


@pytest.mark.parametrize(("accounts", "complete"), [(NO_ACCOUNTS, True), (NO_DATABASE, False)])
def test_without_sacct_the_controller_decides_the_state(says, accounts, complete):
    """Without accounting, the answer of squeue is complete. If the database is only unreachable, it is not."""
    says(sacct=accounts, squeue=recorded("squeue-middle"))
    found = query.find_jobs(ALL, 0.0)
    assert (found.no_answer_reason, found.complete, said(found)["21"]) == ("", complete, "running")


@pytest.mark.parametrize(
    ("listed", "tasks"),
    [
        ("12", ["12"]),
        ("12_4", ["12_4"]),
        ("12_[3-5,7%2]", ["12_3", "12_4", "12_5", "12_7"]),
        ("12_[0-4:2,9]", ["12_0", "12_2", "12_4", "12_9"]),
        ("12_[7]", ["12_7"]),
        ("12_[1,...]", ["12_1"]),
    ],
)
def test_the_tasks_of_an_array_are_parsed(says, listed, tasks):
    says(sacct=f"{listed}|m.1|PENDING|1795283038|Unknown|None assigned|None\n", squeue="")
    assert list(query.find_jobs(["12"], 0.0).jobs) == tasks


STARTED = ("started", {})
OWN = {  # maps the name of a history to the events that a run wrote after its submission
    "waits": (),
    "taken back": (("cancelled", {}),),
    "runs": (STARTED,),
    "completed": (STARTED, ("exited", {"code": 0, "reason": None})),
    "failed": (STARTED, ("exited", {"code": 1, "reason": None})),
    "failed with a word": (STARTED, ("failed", {"why": "peer left"}), ("exited", {"code": 1, "reason": None})),
    "failed for a reason": (STARTED, ("exited", {"code": 1, "reason": "failed", "why": "packages changed"})),
    "told to end": (STARTED, ("exited", {"code": 143, "reason": "told", "why": "SIGTERM"})),
    "told to end while it saved": (
        STARTED,
        ("timeout", {"why": "signal SIGTERM: saved after step 7", "signal": "SIGTERM"}),
        ("exited", {"code": 143, "reason": "told", "why": "SIGTERM"}),
    ),
    "oom": (STARTED, ("oom", {"why": "CUDA"}), ("exited", {"code": 1, "reason": None})),
    "timeout": (STARTED, ("exited", {"code": 143, "reason": "timeout", "why": "3 s"})),
    "hung": (STARTED, ("exited", {"code": 143, "reason": "hung", "why": "rank 1"})),
    "cancelled": (STARTED, ("cancel_requested", {}), ("exited", {"code": 143, "reason": "cancelled"})),
}
TIMEOUT, AGAIN = OWN["timeout"], STARTED
OWN["failed after a timeout"] = (*TIMEOUT, *OWN["failed"])
OWN["runs after a timeout"] = (*TIMEOUT, AGAIN)
OWN["goes on after a timeout"] = (*TIMEOUT, ("requeued", {"why": "it left a checkpoint"}))
AGO = 1000.0  # the runs of the tests were submitted this many seconds ago; each wrote one event per second after that
JOB, TOKEN = "12", "m.0123456789"


@pytest.fixture
def run_of(tmp_path):
    """Returns a function that writes a run folder with the given events and returns it."""

    def write(events, *, kind="one", ago_s=AGO, place="run", job=JOB):
        cell = msgspec.structs.replace(CELL, steps=1)
        folder = RunDir(tmp_path / "runs" / place)
        folder.path.mkdir(parents=True)
        run = Run(
            schema=1, run_id=place, matrix="m", cell=cell, cell_hash=cell.hash(), repeat=1, attempt=1, launcher="torchrun",
            rehearsal=False, world=World(1, 2, 2), cluster={}, data_path="", versions={}, git_commit=None, templates={},
            created="2026-01-01T00:00:00Z", scheduler="slurm",
        )  # fmt: skip
        files.write_json(folder.run_json, run)
        sent = ("submitted", {"scheduler": "slurm", "job": job, "token": TOKEN, "kind": kind})
        add(folder, (("rendered", {}), sent, *events), time.time() - ago_s)
        if ("exited", {"code": 0, "reason": None}) in events:
            complete(folder)
        return folder

    return write


def add(folder, events, first_s):
    with LineWriter(folder.events_file("w")) as lines:
        for at, (name, data) in enumerate(events):
            lines.write_record(Event(schema=1, event=name, writer="w", wall_s=first_s + at, host="h", data=data))


def complete(folder):
    for rank in (0, 1):
        with LineWriter(folder.steps_file(rank)) as lines:
            lines.write_record(StepRecord(schema=1, step=1, t_s=0.0, wall_s=0.0, units=1, step_ms=1.0))
    files.write_json(
        folder.result, Result(schema=1, run_id=folder.run_id, state="completed", rehearsal=False, steps=1, unit="t")
    )


@pytest.fixture
def together(run_of, says, tmp_path):
    """Returns a function that judges several runs while Slurm reports the same state `raw` for all their jobs. owns: the names
    in OWN of the histories of the runs."""

    def judged(owns, raw, *, kind="one", start_s=None):
        start = "Unknown" if start_s is None else int(start_s)
        numbers = [str(int(JOB) + place) for place in range(len(owns))]
        text = "".join(f"{number}|{TOKEN}|{raw}|{int(time.time() - AGO)}|{start}|n1|None\n" for number in numbers)
        says(sacct=text, squeue=text)
        places = [re.sub("[^a-z0-9]+", "-", f"{own}-{raw}-{start}-{kind}".lower()) for own in owns]
        runs = [
            reconcile.read_run_on_disk(run_of(OWN[own], kind=kind, place=place, job=number))
            for own, place, number in zip(owns, places, numbers, strict=True)
        ]
        return [found.verdict for found in slurm.SCHEDULER.observe(Workspace(tmp_path), runs)]

    return judged


@pytest.mark.parametrize(
    ("own", "raw", "state", "words"),
    [
        ("waits", "PENDING", "pending", ""),
        ("waits", "RUNNING", "pending", "its job is starting"),
        ("waits", "CANCELLED by 1000", "cancelled", "cancelled in Slurm"),
        ("waits", "TIMEOUT", "failed", "(TIMEOUT) before the run started; `jobs retry` submits it again"),
        ("waits", "OUT_OF_MEMORY", "failed", "(OUT_OF_MEMORY) before the run started"),
        ("waits", "PREEMPTED", "preempted", "another job"),
        ("waits", "COMPLETED", "failed", "before the run started"),
        ("waits", "FAILED", "failed", "before the run started"),
        ("waits", "BOOT_FAIL", "node_fail", "did not boot"),
        ("waits", "A_NEW_ONE", "unknown", "Slurm says A_NEW_ONE"),
        ("waits", "REVOKED", "unknown", "REVOKED"),
        ("taken back", "PENDING", "cancelled", "before it started"),
        ("runs", "RUNNING", "running", ""),
        ("runs", "COMPLETING", "running", ""),
        ("runs", "SUSPENDED", "running", ""),
        ("runs", "PENDING", "pending", "started again by Slurm"),
        ("runs", "REQUEUED", "pending", "started again by Slurm"),
        ("runs", "COMPLETED", "unknown", "did not record its end"),
        ("runs", "FAILED", "failed", "did not record its end"),
        ("runs", "NODE_FAIL", "node_fail", "a node of the job failed"),
        ("runs", "OUT_OF_MEMORY", "oom", "host memory"),
        ("runs", "PREEMPTED", "preempted", "another job"),
        ("runs", "CANCELLED by 1000", "cancelled", "cancelled in Slurm"),
        ("runs", "DEADLINE", "timeout", "deadline"),
        ("failed", "FAILED", "failed", "exit code 1"),
        ("failed", "COMPLETED", "failed", "exit code 1"),
        ("failed", "OUT_OF_MEMORY", "oom", "host memory"),
        ("failed", "NODE_FAIL", "node_fail", "a node"),
        ("failed", "CANCELLED by 1000", "cancelled", "in Slurm"),
        ("failed", "RUNNING", "running", "its job is ending, after failed: exit code 1"),
        ("failed", "COMPLETING", "running", "its job is ending"),
        ("failed", "PENDING", "pending", "started again by Slurm, after failed"),
        ("failed with a word", "NODE_FAIL", "node_fail", "a node"),
        ("failed with a word", "FAILED", "failed", "peer left"),
        ("failed for a reason", "OUT_OF_MEMORY", "failed", "packages changed"),
        ("failed after a timeout", "OUT_OF_MEMORY", "oom", "host memory"),
        ("runs after a timeout", "RUNNING", "running", ""),
        ("told to end", "RUNNING", "running", "its job is ending"),
        ("told to end", "TIMEOUT", "timeout", "Slurm ended the job"),
        ("told to end", "PREEMPTED", "preempted", "another job"),
        ("told to end", "PENDING", "pending", "started again by Slurm"),
        ("told to end", "CANCELLED by 1000", "cancelled", "in Slurm"),
        ("told to end", "FAILED", "failed", "SIGTERM"),
        ("told to end while it saved", "PREEMPTED", "preempted", "another job"),
        ("told to end while it saved", "PENDING", "pending", "after Slurm told it to end"),
        ("told to end while it saved", "CANCELLED by 1000", "cancelled", "in Slurm"),
        ("told to end while it saved", "TIMEOUT", "timeout", "Slurm ended the job"),
        ("told to end while it saved", "FAILED", "failed", "SIGTERM"),
        ("oom", "FAILED", "oom", "CUDA"),
        ("oom", "OUT_OF_MEMORY", "oom", "CUDA"),
        ("oom", "CANCELLED by 0", "oom", "CUDA"),
        ("timeout", "FAILED", "timeout", "3 s"),
        ("timeout", "RUNNING", "running", "its job is ending, after timeout: 3 s"),
        ("hung", "COMPLETING", "running", "its job is ending"),
        ("completed", "RUNNING", "completed", ""),
        ("timeout", "PENDING", "pending", "started again by Slurm, after timeout"),
        ("goes on after a timeout", "REQUEUED", "pending", "started again by Slurm, after timeout"),
        ("goes on after a timeout", "CANCELLED by 1000", "cancelled", "while it waited to be started again, after timeout"),
        ("timeout", "CANCELLED by 1000", "timeout", "3 s"),
        ("hung", "FAILED", "hung", "rank 1"),
        ("hung", "NODE_FAIL", "hung", "rank 1"),
        ("cancelled", "CANCELLED by 1000", "cancelled", ""),
        ("cancelled", "PENDING", "cancelled", ""),
    ],
)
def test_the_state_of_a_run_follows_from_its_records_and_slurm(together, own, raw, state, words):
    """The state of a run follows from its own records (`own`) and the state in Slurm (`raw`)."""
    (verdict,) = together([own], raw)
    assert (verdict.state, words in verdict.why) == (state, True), verdict


@pytest.mark.parametrize("raw", EVERY)
def test_a_run_is_completed_exactly_if_its_own_records_say_so(together, raw):
    """For every state in Slurm, a run is completed exactly if its own records say so."""
    found = {own: verdict.state for own, verdict in zip(OWN, together(list(OWN), raw), strict=True)}
    assert set(found.values()) <= STATE_MEANINGS.keys()
    assert [own for own, state in found.items() if state == "completed"] == ["completed"]
    assert found["cancelled"] == found["taken back"] == "cancelled"


# Each state of a job that Slurm 21.08 to 25.11 knows: the state of the run, and whether the job has ended for good.
OF_SLURM = {
    "pending": "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT EXPEDITING POWER_UP_NODE",
    "running": "RUNNING COMPLETING RESIZING SIGNALING STAGE_OUT STOPPED SUSPENDED UPDATE_DB RUNNING+",
    "completed": "COMPLETED",
    "failed": "FAILED",
    "timeout": "TIMEOUT DEADLINE",
    "cancelled": "CANCELLED",
    "oom": "OUT_OF_MEMORY",
    "node_fail": "NODE_FAIL BOOT_FAIL LAUNCH_FAILED RECONFIG_FAIL",
    "preempted": "PREEMPTED",
    "unknown": "REVOKED A_NEW_ONE",
}
MAY_START_AGAIN = {"NODE_FAIL", "BOOT_FAIL", "PREEMPTED"}


def test_each_state_of_slurm_is_the_state_of_a_run():
    of_run = {word: state for state, words in OF_SLURM.items() for word in words.split()}
    assert of_run.keys() >= states.WAITING_STATES | states.RUNNING_STATES | states.RUN_STATE_BY_END.keys()
    assert {word: states.translate_state(word) for word in of_run} == of_run
    assert states.translate_state("CANCELLED by 1000") == "cancelled"
    assert states.translate_state("") == "unknown"
    ended = {word for word, state in of_run.items() if state not in ("pending", "running")} - MAY_START_AGAIN - {"A_NEW_ONE"}
    assert {word for word in of_run if states.is_settled(word)} == ended


def test_a_start_after_the_recorded_end_is_a_restart(together):
    """If Slurm's job started after the recorded end of a run, Slurm started the run again, unless the run completed."""
    again, completed = together(["timeout", "completed"], "RUNNING", start_s=time.time() - 1)
    assert (again.state, again.why) == ("pending", "started again by Slurm, after timeout")
    assert completed.state == "completed"


def test_the_end_of_a_shared_job_does_not_change_runs_that_ended_before(together):
    """If several runs share a job, the end of the job does not change the state of runs that ended before."""
    failed, waits = together(["failed", "waits"], "RUNNING", kind="pack")
    assert (failed.state, waits.why) == ("failed", "waits for the earlier runs in its job")
    failed, told = together(["failed", "told to end"], "CANCELLED by 1000", kind="pack")
    assert (failed.state, told.state) == ("failed", "cancelled")


def seen(tmp_path, folder, read=None):
    """Returns what `jobs status` shows about one run."""
    (found,) = slurm.SCHEDULER.observe(Workspace(tmp_path), [read or reconcile.read_run_on_disk(folder)])
    return found


def line(raw, *, token=TOKEN):
    return f"{JOB}|{token}|{raw}|1795283038|1795283081|work1|None\n"


@pytest.mark.parametrize(
    ("reason", "words", "held"),
    [
        ("Priority", "", False),
        ("None", "", False),
        ("PartitionTimeLimit", "lower `time_limit` of the cell or slurm.time", False),
        ("PartitionNodeLimit", "its partition has too few nodes for it now", False),
        ("launch failed requeued held", "`jobs retry` or `jobs retry --only held` releases it", True),
        ("launch_failed_requeued_held", "releases it (launch_failed_requeued_held)", True),
        ("JobHoldMaxRequeue", "after a failed start", True),
        ("JobHeldUser", "`scontrol release`", False),
        ("JobHeldAdmin", "an administrator of the cluster holds its job", False),
        ("DependencyNeverSatisfied", "did not end as required", False),
        ("BadConstraints", "slurm.constraint", False),
        ("ReqNodeNotAvail, UnavailableNodes:work1", "`sinfo -R` says why", False),
        ("InvalidAccount", "slurm.account", False),
        ("InvalidQOS", "slurm.qos", False),
        ("AssocGrpCpuLimit", "starts when other jobs have ended", False),
        ("QOSMaxJobsPerUserLimit", "starts when other jobs have ended", False),
        ("QOSMaxWallDurationPerJobLimit", "Slurm never starts it", False),
    ],
)
@pytest.mark.parametrize("own", ["waits", "runs", "failed"])
def test_the_reason_of_a_waiting_job_is_explained_if_it_does_not_pass_by_itself(
    run_of, says, tmp_path, own, reason, words, held
):
    folder = run_of(OWN[own])
    text = line("PENDING").replace("|None\n", f"|{reason}\n")
    says(sacct=text, squeue=text)
    verdict = seen(tmp_path, folder).verdict
    assert (verdict.state, words in verdict.why, verdict.held) == ("pending", True, held), verdict
    assert ("started again by Slurm" in verdict.why) == (own != "waits")


def test_a_number_that_slurm_gave_out_again_is_another_job(run_of, says, tmp_path):
    says(sacct=line("COMPLETED", token="other.1"), squeue="")
    found = seen(tmp_path, run_of(OWN["runs"]))
    assert (found.verdict.state, found.scheduler_words) == ("unknown", "-")
    assert "Slurm does not know its job 12" in found.verdict.why


@pytest.mark.parametrize("own", ["waits", "runs"])
def test_a_job_that_slurm_does_not_know_yet_is_waited_for(run_of, says, tmp_path, own):
    says(sacct="", squeue="")
    assert seen(tmp_path, run_of(OWN[own], ago_s=5.0, place="late")).verdict.state == {"waits": "pending"}.get(own, "running")
    assert seen(tmp_path, run_of(OWN[own], place="lost")).verdict.state == "unknown"


def test_a_job_dropped_by_the_controller_is_unknown_without_sacct(run_of, says, tmp_path):
    folder = run_of(OWN["runs"])
    for accounts, words in (
        (NO_DATABASE, " (its accounting does not answer: Problem talking to the database: "),
        (NO_ACCOUNTS, ","),
    ):
        says(sacct=accounts, squeue="")
        verdict = seen(tmp_path, folder).verdict
        assert (verdict.state, f"does not know its job 12{words}" in verdict.why) == ("unknown", True), verdict


@pytest.mark.parametrize(
    ("accounts", "state"), [("", "cancelled"), (NO_DATABASE, "unknown"), (NO_ACCOUNTS, "unknown"), (AWAY, "unknown")]
)
def test_a_task_that_slurm_does_not_list_is_cancelled_only_if_the_accounting_answers(run_of, says, tmp_path, accounts, state):
    """Without accounting, the controller soon forgets tasks that have ended, and still lists other tasks of the array."""
    folder = run_of(OWN["waits"], kind="array", job=f"{JOB}_1")
    says(sacct=accounts, squeue=line("RUNNING").replace(f"{JOB}|", f"{JOB}_2|", 1))
    assert seen(tmp_path, folder).verdict.state == state


def test_slurm_says_why_a_run_in_an_allocation_was_told_to_end(run_of, says, tmp_path):
    """The answer is recorded. A job that started after the end of the run is another job with the same number."""
    told = OWN["told to end while it saved"]
    folder = run_of((("started", {"job": "7", "restarts": 0}), *told[1:]))
    make_own(tmp_path)
    says(sbatch="")  # this machine has Slurm's commands

    def judge():
        (observed,) = allocation.SCHEDULER.observe(Workspace(tmp_path), [reconcile.read_run_on_disk(folder)])
        return observed.verdict

    for start_s, state in ((time.time(), "failed"), (time.time() - AGO, "cancelled")):
        says(sacct=f"7|interactive|CANCELLED by 0|{int(start_s)}|{int(start_s)}|work1|None\n", squeue=AWAY)
        assert judge().state == state
    says(sacct=(99, "sacct: must not be asked"), squeue=(99, "squeue: must not be asked"))
    assert judge().state == folder.judge().state == "cancelled"


def answer_per_cluster(folder, name, rows):
    """Let a stand-in for one of Slurm's commands print a row for each cluster; '': without the option --clusters."""
    cases = "".join(f"*\"{key and f' --clusters={key} '}\"*) echo '{row}' ;;\n" for key, row in rows.items())
    (folder / "bin" / name).write_text(f'#!/bin/sh\ncase " $* " in\n{cases}esac\n')
    (folder / "bin" / name).chmod(0o755)


@pytest.mark.parametrize(("cluster", "state", "job"), [("cm4", "cancelled", "cm4:7"), ("c", "timeout", "7")])
def test_an_allocation_of_another_cluster_is_asked_for_there(run_of, says, tmp_path, cluster, state, job):
    """The default cluster has an allocation with the same number, and a cluster without a database has no --clusters."""
    told = OWN["told to end while it saved"]
    folder = run_of((("started", {"job": "7", "restarts": 0, "cluster": cluster}), *told[1:]))
    make_own(tmp_path)
    since_s = int(time.time() - AGO)
    says(sbatch="", squeue="", scontrol="ClusterName = c\n")
    row = f"7|interactive|STATE|{since_s}|{since_s}|work1|None"
    rows = {"c": "", "cm4": row.replace("STATE", "CANCELLED by 0"), "": row.replace("STATE", "TIMEOUT")}
    answer_per_cluster(tmp_path, "sacct", rows)
    (observed,) = allocation.SCHEDULER.observe(Workspace(tmp_path), [reconcile.read_run_on_disk(folder)])
    assert (observed.verdict.state, observed.job_id) == (state, job)
    assert folder.judge().state == state
    learnt = [event.data for event in folder.read_events(strict=True) if event.event == ENDED_IN_SLURM]
    assert [(data["job"], data["cluster"]) for data in learnt] == [("7", "cm4" if cluster == "cm4" else None)]


@pytest.mark.parametrize(
    ("own", "raw", "state"), [("runs", "FAILED", "failed"), ("told to end", "CANCELLED by 1", "cancelled")]
)
def test_a_final_state_learnt_from_slurm_stays_when_slurm_forgets_the_job(run_of, says, tmp_path, own, raw, state):
    folder = run_of(OWN[own])
    make_own(tmp_path)
    says(sacct=line(raw), squeue="")
    learnt = seen(tmp_path, folder).verdict
    assert learnt.state == state
    other_job = line("COMPLETED", token="other.1")
    for accounts, queue in ((NO_DATABASE, ""), (NO_DATABASE, AWAY), ("", ""), (other_job, ""), (line("RUNNING"), AWAY)):
        says(sacct=accounts, squeue=queue)
        assert seen(tmp_path, folder).verdict == learnt
    assert folder.judge() == learnt
    assert sum(event.event == ENDED_IN_SLURM for event in folder.read_events()) == 1


def test_a_later_start_or_end_of_the_run_supersedes_a_state_learnt_from_slurm(run_of, says, tmp_path):
    folder = run_of(OWN["runs"])
    make_own(tmp_path)
    says(sacct=line("PREEMPTED"), squeue=line("PREEMPTED"))
    assert seen(tmp_path, folder).verdict.state == "preempted"
    says(sacct=line("PREEMPTED"), squeue=line("PENDING"))
    assert seen(tmp_path, folder).verdict.state == "pending"
    assert folder.judge().state == "running"  # what was learnt is withdrawn: the report agrees
    add(folder, [STARTED], time.time() - 1000)  # the clock of the node is slow
    assert folder.judge().state == "running"
    says(sacct=line("FAILED"), squeue="")
    assert seen(tmp_path, folder).verdict.state == folder.judge().state == "failed"
    add(folder, OWN["completed"][1:], time.time())
    complete(folder)
    assert seen(tmp_path, folder).verdict.state == folder.judge().state == "completed"


def test_a_job_that_a_person_requeues_after_a_learnt_end_is_no_leftover(run_of, says, tmp_path):
    folder = run_of(OWN["runs"])
    make_own(tmp_path)
    says(sacct=line("CANCELLED"), squeue=line("CANCELLED"))
    assert seen(tmp_path, folder).verdict.state == "cancelled"
    says(sacct=line("PENDING"), squeue=line("PENDING"))
    observed = seen(tmp_path, folder)
    assert (observed.verdict.state, observed.is_leftover) == ("pending", False)


def test_a_state_is_recorded_only_in_a_workspace_in_which_the_user_may_act(run_of, says, tmp_path):
    folder = run_of(OWN["runs"])
    says(sacct=line("FAILED"), squeue="")
    assert seen(tmp_path, folder).verdict.state == "failed"
    assert folder.judge().state == "running"


def test_a_state_that_cannot_be_written_is_shown_nevertheless(run_of, says, tmp_path):
    folder = run_of(OWN["failed"])
    make_own(tmp_path)
    read = reconcile.read_run_on_disk(folder)
    folder.events_file("controller").mkdir()
    says(sacct=line("OUT_OF_MEMORY"), squeue="")
    assert seen(tmp_path, folder, read).verdict.state == "oom"


@pytest.mark.parametrize(("own", "state"), [("waits", "cancelled"), ("runs", "unknown")])
def test_a_waiting_task_that_slurm_has_removed_from_its_array_is_cancelled(run_of, says, tmp_path, own, state):
    folder = run_of(OWN[own], job="12_5")
    others = f"12_4|{TOKEN}|RUNNING|1795283038|1795283081|work1|None\n"
    says(sacct=others, squeue=others)
    assert seen(tmp_path, folder).verdict.state == state
    says(sacct="", squeue="")
    assert seen(tmp_path, folder).verdict.state == "unknown"
    says(sacct=NO_DATABASE, squeue=others)  # the task may have ended before it wrote anything
    assert seen(tmp_path, folder).verdict.state == "unknown"


def test_an_unreachable_controller_is_reported_and_changes_no_state(run_of, says, tmp_path):
    folder = run_of(OWN["runs"])
    why = "Unable to contact slurm controller (connect failure)"
    says(sacct=NO_DATABASE, squeue=AWAY)
    found = seen(tmp_path, folder)
    assert (found.verdict.state, found.scheduler_words) == ("running", f"Slurm does not answer: {why}")
    says(sacct=line("RUNNING"), squeue=AWAY)
    found = seen(tmp_path, folder)
    assert (found.verdict.state, found.scheduler_words) == (
        "running",
        f"RUNNING in Slurm's accounting; the controller does not answer: {why}",
    )
    assert seen(tmp_path, run_of(OWN["timeout"], place="ended")).verdict.state == "timeout"


@pytest.mark.parametrize("answer", [line("COMPLETED"), ""])
def test_an_end_that_was_written_while_slurm_was_asked_is_not_lost(run_of, says, tmp_path, answer):
    folder = run_of(OWN["runs"])
    read = reconcile.read_run_on_disk(folder)
    add(folder, OWN["completed"][1:], time.time())
    complete(folder)
    assert read.verdict.state not in FINAL_STATES
    says(sacct=answer, squeue="")
    assert seen(tmp_path, folder, read).verdict.state == "completed"
