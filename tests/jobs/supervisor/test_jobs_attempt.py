"""What a supervisor checks before and after its run: claim, source, limit of starts, and kills for lack of memory."""

import json
import os
import signal
import subprocess
import sys

import msgspec
import psutil
import pytest
from support_cells import CELL
from support_e2e import HANG_S

from jobs import claim
from jobs.run_queue import RunQueue
from jobs.schedulers import local
from jobs.ssh import step
from jobs.status.reconcile import read_run_on_disk
from jobs.submission import submit
from jobs.supervisor import attempt
from shardlab.files import files, source_digest
from shardlab.hardware import host
from shardlab.runs.record import SCHEMA, Event, LineWriter, Sample
from shardlab.runs.run import Run, World
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import ENDED_IN_SLURM
from shardlab.workspace.workspace import Workspace


@pytest.fixture
def folder(tmp_path):
    found = RunDir(tmp_path / "runs" / "a-r1")
    found.log.mkdir(parents=True)
    write_run(found)
    return found


def write_run(folder, **changed):
    run = Run(
        schema=1, run_id=folder.run_id, matrix="m", cell=CELL, cell_hash=CELL.hash(), repeat=1, attempt=1, launcher="torchrun",
        rehearsal=False, world=World(1, 2, 2), cluster={"name": "c", "provider": "local"}, data_path="/d", versions={},
        git_commit=None, templates={}, created="2026-11-22T00:00:00+00:00",
    )  # fmt: skip
    files.write_json(folder.run_json, {**json.loads(files.encode_json(run)), **changed})
    folder.write_event("controller", "submitted", scheduler="slurm")


def supervised(folder, *command, before="", **environment):
    """Run the supervisor of a run to its end.

    folder: the run folder. before: Python code that the supervisor's process executes first.
    """
    start = "sys.exit(attempt.console.run_command(lambda: attempt.main(sys.argv[1:])))"
    program = (
        f"import sys; from jobs.supervisor import attempt; from jobs.node import node_processes; {before or 'pass'}; {start}"
    )
    words = [sys.executable, "-P", "-c", program, folder.path, "--", *(command or ["true"])]
    given = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | environment
    return subprocess.run(words, capture_output=True, text=True, env=given, check=False, timeout=HANG_S)


def in_job(monkeypatch, number, restarts):
    monkeypatch.setenv("SLURM_JOB_ID", number)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))


def test_a_restarted_job_may_claim_its_run_once_per_restart_and_no_other_job_may(folder, monkeypatch):
    """After each restart, the same Slurm job may claim its run once more. Another job may not."""
    in_job(monkeypatch, "7", 0)
    assert claim.claim_run(folder) == "first"
    assert claim.claim_run(folder) is None
    in_job(monkeypatch, "8", 1)
    assert claim.claim_run(folder) is None
    in_job(monkeypatch, "7", 1)
    assert claim.claim_run(folder) == "again"
    assert claim.claim_run(folder) is None
    assert not claim.is_taken_over(folder)
    in_job(monkeypatch, "7", 0)
    assert claim.is_taken_over(folder)


def test_a_run_that_slurm_told_to_end_while_it_saved_may_start_again(folder, monkeypatch):
    """Neither the record of a rank that obeyed a signal nor a state that a command learnt from Slurm stops a restart."""
    write_run(folder)
    in_job(monkeypatch, "7", 0)
    assert claim.claim_run(folder) == "first"
    folder.write_event("attempt", "started")
    folder.write_event("rank-00000", "timeout", why="signal SIGTERM: saved after step 7", signal="SIGTERM")
    folder.write_event("attempt", "exited", code=143, reason="told", why="SIGTERM")
    folder.write_event("controller", ENDED_IN_SLURM, state="cancelled", why="cancelled in Slurm", records=2)
    assert folder.judge().state == "cancelled"
    in_job(monkeypatch, "7", 1)
    assert claim.claim_run(folder) == "again"


def test_a_claim_without_an_owner_may_be_taken_only_by_a_restarted_job(folder, monkeypatch):
    """An empty folder `claim` names no owner. Only a restarted job may then claim the run."""
    folder.claim.mkdir()
    in_job(monkeypatch, "8", 0)
    assert claim.claim_run(folder) is None
    in_job(monkeypatch, "8", 1)
    assert claim.claim_run(folder) == "again"


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_run_is_started_again_as_often_as_it_may_and_no_more(folder, restarts):
    write_run(folder, scheduler="slurm", requeues=1)
    for earlier in range(restarts):  # Slurm started the run, and each start was killed with its node
        (folder.claim / f"restart-{earlier}" if earlier else folder.claim).mkdir()
    done = supervised(folder, "sh", "-c", "exit 9", SLURM_JOB_ID="7", SLURM_RESTART_COUNT=str(restarts), PATH="/bin")
    (ended,) = [event for event in folder.read_events() if event.event == "exited"]
    if restarts > 1:
        assert done.returncode == 1
        assert ended.data["why"] == "Slurm has restarted the run 2 times; allowed: 1."
    else:
        assert "has restarted the run" not in ended.data["why"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"source": "/w/.shardlab/source/000000000000"},
            f"(digest {source_digest.digest_source()}) is not the copy /w/.shardlab/source/",
        ),
        ({"environment": "0" * 12}, "rendered by an earlier version of shardlab, which kept no copy of its source"),
    ],
)
def test_a_run_without_its_source_is_given_back_and_not_started(folder, changed, words):
    """If the source copy of a run is missing or different, the run becomes `planned` again and its command does not start."""
    write_run(folder, **changed)
    done = supervised(folder, "touch", str(folder.path / "begun"))
    assert done.returncode == 76
    assert done.stderr.count("\n") == 1
    assert not folder.claim.exists()
    assert not (folder.path / "begun").exists()
    verdict = folder.judge()
    assert verdict.state == "planned"
    assert words in verdict.why
    assert "`jobs submit` or `jobs retry` submits it" in verdict.why


def test_a_run_that_started_with_other_packages_fails_with_the_reason(folder):
    write_run(folder, packages="0" * 12, scheduler="slurm", requeues=1)
    folder.claim.mkdir()
    done = supervised(folder, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    assert done.returncode == 1
    assert folder.judge().state == "failed"
    assert "packages changed since the run was submitted" in folder.judge().why


@pytest.mark.parametrize(
    ("kills", "of_job", "state", "words"),
    [
        ((4, 5), True, "oom", "out of host memory: the kernel's OOM killer"),
        ((4, 5), False, "failed", "exit code 137 (SIGKILL); perhaps out of memory: the kernel ended a process on "),
        ((4, 4), False, "failed", "exit code 137 (SIGKILL)"),
    ],
)
def test_a_run_is_out_of_memory_only_if_its_own_job_counts_a_kill(folder, kills, of_job, state, words):
    # A test cannot change the kernel's counter of out-of-memory kills, so the test replaces the function that reads it.
    counter = f"kills = iter({kills}); node_processes.count_oom_kills = lambda: (next(kills), {of_job})"
    assert supervised(folder, "sh", "-c", "kill -KILL $$", before=counter).returncode == 137
    verdict = folder.judge()
    assert (verdict.state, words in verdict.why) == (state, True), verdict
    assert ("perhaps" in verdict.why) == (kills == (4, 5) and not of_job)


@pytest.fixture
def at_work(folder):
    """A process that stands in for the supervisor of a run: the test writes its process id in the event `started`."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("changed", "state", "words"),
    [
        ({}, "running", ""),
        ({"created": -3600.0}, "failed", "ended without recording an end"),  # another process has this process id now
        ({"boot_id": "of-another-boot"}, "node_fail", "the machine restarted while the run was running"),
    ],
)
def test_a_supervisor_is_identified_by_more_than_its_process_number(folder, at_work, changed, state, words):
    data = {"pid": at_work.pid, "created": psutil.Process(at_work.pid).create_time(), "boot_id": host.read_boot_id()}
    data |= {"created": data["created"] + changed["created"]} if "created" in changed else changed
    folder.claim.mkdir()
    folder.write_event("attempt", "started", **data)
    workspace = Workspace(folder.path.parent.parent)
    (seen,) = local.SCHEDULER.observe(workspace, [read_run_on_disk(folder)])
    verdict = seen.verdict
    assert verdict.state == state
    assert words in verdict.why
    if state != "running":
        RunQueue("local", workspace).wait_for_running()
        assert folder.judge().state == state


def sampled(folder, host_, *times):
    with LineWriter(folder.samples_file(host_)) as lines:
        for wall_s in times:
            lines.write_record(Sample(schema=SCHEMA, t_s=wall_s, wall_s=wall_s, host=host_, boot_id="b"))


@pytest.mark.parametrize(
    ("last", "lost_ones"),
    [
        ({"a": 100.0}, ["a"]),  # a is the only node
        ({"a": 100.0, "b": 89.0}, ["b"]),
        ({"a": 100.0, "b": 91.0}, []),  # when a run ends, telemetry of all nodes ends within 10 s
        ({"a": 80.0, "b": 100.0, "c": 70.0, "d": 99.0}, ["a", "c"]),
        ({"a": 100.0, "b": None}, []),  # b never wrote telemetry, so it is not known to be lost
        ({"a": None, "b": None}, []),
    ],
)
def test_the_lost_nodes_are_those_whose_telemetry_fell_silent_first(folder, last, lost_ones):
    for name, wall_s in last.items():
        if wall_s is not None:
            sampled(folder, name, wall_s - 20, wall_s)
    assert submit.find_lost_nodes(folder, list(last)) == lost_ones


TOKEN = "m.0123456789"
SQUEUE = f'#!/bin/sh\nfor job in 7 8_3 9; do echo "$job|{TOKEN}|PENDING|1|N/A||None"; done\n'
SCONTROL = """\
#!/bin/sh
echo "$*" >> {0}/calls
case $1 in requeuehold) {1};; esac
"""


@pytest.fixture
def scontrol(tmp_path):
    """A function that writes a stand-in for Slurm's command scontrol, and returns a value of PATH that finds the stand-in.

    The stand-in appends its arguments to the file `calls`. The function's argument is shell code that runs at a requeue.
    """

    def make(at_requeue):
        (tmp_path / "scontrol").write_text(SCONTROL.format(tmp_path, at_requeue))
        (tmp_path / "squeue").write_text(SQUEUE)
        for command in ("scontrol", "squeue"):
            (tmp_path / command).chmod(0o755)
        return f"{tmp_path}:{os.environ['PATH']}"

    return make


def waiting_beside(folder, name, job, packages="0" * 12):
    beside = RunDir(folder.path.parent / name)
    beside.path.mkdir()
    write_run(beside, packages=packages, scheduler="slurm")
    beside.write_event("controller", "submitted", scheduler="slurm", job=job, token=TOKEN)
    return beside


def test_a_run_with_changed_packages_holds_its_like_and_is_requeued(folder, tmp_path, scontrol):
    write_run(folder, packages="0" * 12, scheduler="slurm", requeues=0)
    packed, other = waiting_beside(folder, "b-r1", "7"), waiting_beside(folder, "c-r1", "8_3")
    later = waiting_beside(folder, "d-r1", "9", source_digest.digest_installed_packages())
    done = supervised(folder, PATH=scontrol("kill $PPID"), SLURM_JOB_ID="7")
    assert done.returncode == -signal.SIGTERM
    assert (tmp_path / "calls").read_text().splitlines() == ["hold 8_3", "update JobId=7 Requeue=1", "requeuehold 7"]
    assert [run.judge().held for run in (folder, packed, other, later)] == [True, True, True, False]
    assert folder.judge().state == "pending"
    assert "`jobs retry --only held` goes on with the packages that are installed then" in folder.judge().why
    write_run(
        folder, packages=source_digest.digest_installed_packages(), scheduler="slurm", requeues=0
    )  # `jobs retry` does this
    assert supervised(folder, PATH=scontrol("true"), SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1").returncode == 0
    assert folder.claim.exists()


def test_a_requeue_whose_command_slurm_ends_first_holds_the_run(folder, scontrol):
    """Slurm ends all processes of the job, and may end the command that requeues the job before the process that called it."""
    write_run(folder, packages="0" * 12, scheduler="slurm", requeues=0)
    # The process of this command exists until its caller has read its exit code.
    late = "(while kill -0 $$; do sleep 0.05; done; kill $PPID) > /dev/null 2>&1 & kill $$"
    done = supervised(folder, PATH=scontrol(late), SLURM_JOB_ID="7")
    assert done.returncode == -signal.SIGTERM
    assert (folder.judge().state, folder.judge().held) == ("pending", True)


def test_a_run_that_another_run_is_holding_cannot_start_in_between(folder, tmp_path, scontrol):
    """Another run recorded that a third run is held, but its command to Slurm may come too late."""
    write_run(folder, packages="0" * 12, scheduler="slurm", requeues=0)
    third = waiting_beside(folder, "c-r1", "8_3")
    third.write_event("hold.b-r1", "held", why="", requeued="")
    assert supervised(folder, PATH=scontrol("kill $PPID"), SLURM_JOB_ID="7").returncode == -signal.SIGTERM
    assert (tmp_path / "calls").read_text().splitlines()[0] == "hold 8_3"
    assert [event.event for event in third.read_events()].count("held") == 1


def test_a_run_that_was_held_long_ago_is_not_held_again(folder, tmp_path, scontrol):
    """A person may be releasing it."""
    write_run(folder, packages="0" * 12, scheduler="slurm", requeues=0)
    third = waiting_beside(folder, "c-r1", "8_3")
    third.write_event("hold.b-r1", "held", why="", requeued="")
    for events in third.path.glob("events.hold*.jsonl"):
        record = json.loads(events.read_text())
        events.write_text(json.dumps({**record, "wall_s": record["wall_s"] - 3600}) + "\n")
    assert supervised(folder, PATH=scontrol("kill $PPID"), SLURM_JOB_ID="7").returncode == -signal.SIGTERM
    assert (tmp_path / "calls").read_text().splitlines()[0] == "update JobId=7 Requeue=1"


def test_a_run_that_slurm_does_not_requeue_is_given_back(folder, scontrol):
    write_run(folder, packages="0" * 12, scheduler="slurm", requeues=0)
    assert supervised(folder, PATH=scontrol("exit 1"), SLURM_JOB_ID="7").returncode == 76
    assert (folder.judge().state, folder.judge().held) == ("planned", False)
    assert "`jobs submit` or `jobs retry` submits it" in folder.judge().why


SHELL_OF_A_JOB = {
    "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
    "SLURM_RESTART_COUNT": "1", "SLURMD_NODENAME": "gpu02", "SLURM_CPUS_ON_NODE": "1", "PMI_RANK": "1",
    "SLURM_CLUSTER_NAME": "cm4",
}  # fmt: skip


@pytest.mark.parametrize("scheduler", ["local", "ssh", "allocation"])
def test_only_a_run_inside_slurm_reads_the_variables_of_a_job(folder, tmp_path, scheduler):
    """A run may be started in the shell of `srun --pty`, or in a container inside a job, which has no Slurm commands."""
    shown, is_of_slurm = tmp_path / "shown", scheduler == "allocation"
    if is_of_slurm:
        (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'gpu01\\ngpu02\\n'\n")
        (tmp_path / "scontrol").chmod(0o755)
    write_run(folder, scheduler=scheduler)
    done = supervised(folder, "sh", "-c", f"env > {shown}", **SHELL_OF_A_JOB, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert "no command scontrol" not in done.stderr
    names = {line.partition("=")[0] for line in shown.read_text().splitlines()}
    assert names & set(SHELL_OF_A_JOB) == (set(SHELL_OF_A_JOB) if is_of_slurm else set())
    started = next(event for event in folder.read_events() if event.event == "started")
    assert (started.data.get("job"), started.data.get("cluster")) == (("42", "cm4") if is_of_slurm else (None, None))


def test_the_command_gets_the_disk_of_its_node(folder, tmp_path):
    shown = tmp_path / "shown"
    supervised(folder, "sh", "-c", f'printf %s "$1" > {shown}', "sh", "$SHARDLAB_NODE_DISK, $HOME", TMPDIR=str(tmp_path))
    assert shown.read_text() == f"{tmp_path}, $HOME"


ENDS = {  # name -> (command, changes of run.json, exit code of the supervisor, state of the run, words of its reason)
    "success without a result": (["true"], {}, 0, "failed", "exit code 0, but there is no result.json"),
    "own exit code": (["sh", "-c", "exit 9"], {}, 9, "failed", "exit code 9"),
    "exit code of timeout": (["sh", "-c", "exit 124"], {}, 124, "failed", "exit code 124"),
    "signal": (["sh", "-c", "kill -ALRM $$"], {}, 142, "failed", "exit code 142"),
    "time limit": (["sleep", "60"], {"limit_s": 1}, 124, "timeout", "ended at its time limit of 1 s"),
    "hang limit": (["sleep", "60"], {"hang_limit_s": 1}, 124, "hung", "no progress for 1 s (hang_limit): "),
    "cancelled": (["sh", "-c", "{cancel}; sleep 60"], {}, 143, "cancelled", "cancelled while it ran"),
    "cancelled and failed": (["sh", "-c", "{cancel}; exit 9"], {}, 143, "cancelled", "cancelled while it ran"),
    "lost node": (["sh", "-c", "{lose}; exit 9"], {}, 9, "node_fail", "gpu7 is gone"),
    "preempted": (["sh", "-c", "exit 9"], {"scheduler": "slurm"}, 9, "preempted", "in favour of another job"),
    "failed in Slurm": (["sh", "-c", "touch {path}/done; exit 9"], {"scheduler": "slurm"}, 9, "failed", "exit code 9"),
    "ranks told by Slurm": (["sh", "-c", "{tell}; exit 1"], {"scheduler": "slurm"}, 1, "failed", "Slurm told the run to end"),
    "ranks told, without Slurm": (["sh", "-c", "{tell}; exit 1"], {}, 1, "timeout", "gpu7 is gone"),
    "allocation ended": (["sh", "-c", "exit 1"], {"scheduler": "allocation"}, 1, "failed", "Slurm told the run to end"),
    "claimed before": (["true"], {"claimed": True}, 75, "pending", ""),
}
WRITTEN = {
    "cancel": "cancel_requested",
    "lose": step.NODE_LOST_EVENT,
    "tell": "timeout",
}  # word of a command -> the event that it writes
# What stands in for `scontrol`: the controller is up, and it preempts the job of a run that has written no file `done`.
CONTROLLER = """\
#!/bin/sh
echo 'Slurmctld(primary) at head is UP'
test -e {0}/done || echo JobState=CANCELLED PreemptTime=2026-11-22T00:00:01
"""


@pytest.fixture
def handlers():
    """The supervisor handles SIGTERM; afterwards this process does what it did before."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("name", ENDS)
def test_the_exit_code_and_the_state_of_a_run_follow_from_its_end(folder, tmp_path, monkeypatch, handlers, name):
    command, changed, code, state, words = ENDS[name]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text(CONTROLLER.format(folder.path))
    (tmp_path / "bin/scontrol").chmod(0o755)
    for event in WRITTEN.values():
        data = {"node": "gpu7", "why": "gpu7 is gone", "signal": "SIGTERM"}
        told = Event(schema=SCHEMA, event=event, writer="w", wall_s=4e9, host="h", data=data)  # after the start of the run
        (tmp_path / event).write_bytes(msgspec.json.encode(told) + b"\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    more = {key: value for key, value in changed.items() if key not in ("hang_limit_s", "claimed")}
    cell = msgspec.structs.replace(CELL, hang_limit_s=changed.get("hang_limit_s", CELL.hang_limit_s))
    write_run(folder, cell=msgspec.to_builtins(cell), source=source_digest.digest_source(), **more)
    if "claimed" in changed:
        folder.claim.mkdir()
    writes = {word: f"cp {tmp_path}/{event} {folder.events_file(word)}" for word, event in WRITTEN.items()}
    command = [word.format(path=folder.path, **writes) for word in command]
    assert attempt.AttemptSupervisor(folder, command).supervise() == code
    verdict = folder.judge()
    assert (verdict.state, words in verdict.why) == (state, True), verdict
