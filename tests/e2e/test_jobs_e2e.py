"""`jobs` on this machine with real runs: no run is lost, no run is executed twice, and no failure is reported as a success."""

import itertools
import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support_e2e import HANG_S, benches, clock, holds_pause, processes_of, started, time_limit_s, until
from support_long import only_long

from shardlab.runs import suspension
from shardlab.runs.checkpoint import list_checkpoints, parse_checkpoint_step
from shardlab.runs.suspension import POLL_S

pytestmark = pytest.mark.e2e
FOUR = "axes: {strategy: [single], seed: [1, 2, 3, 4]}"
TWO = "axes: {strategy: [single], seed: [1, 2]}"
LONG = "axes: {strategy: [ddp], gpus: [2]}"
FOREVER = 10**7


@pytest.fixture
def bench(tmp_path):
    yield from benches(tmp_path)


def running(bench):
    """Wait until a run of the test's workspace is running and its rank 0 has recorded a step. Returns the run folder."""
    return until(
        lambda: next((f for f in bench.folders() if f.judge().state == "running" and f.steps(0).records), None),
        "a run makes steps",
    )


def starts(bench):
    return [sum(event.event == "started" for event in folder.read_events()) for folder in bench.folders()]


def test_each_run_of_a_matrix_runs_exactly_once(bench):
    name = bench.matrix(FOUR)
    sent = bench.json("jobs", "submit", "--matrix", name, "--wait")
    assert [run["state"] for run in sent["runs"]] == ["completed"] * 4
    again = bench.run("jobs", "submit", "--matrix", name, "--wait")
    assert again.stdout.count("skipped: completed already") == 4
    assert starts(bench) == [1, 1, 1, 1]
    status = bench.json("jobs", "status")["runs"]
    assert {(run["step"], run["steps"], run["attempt"], run["expected"]) for run in status} == {(3, 3, 1, True)}
    assert all(run["throughput"] > 0 and run["unit"] == "images" for run in status)
    more = bench.run("jobs", "submit", "--matrix", name, "--repeats", "2", "--where", "seed == 1", "--wait")
    assert "1 run(s) submitted, 1 skipped" in more.stdout


def test_runs_start_one_after_another_in_their_order(bench):
    bench.json("jobs", "submit", "--matrix", bench.matrix(FOUR), "--wait")
    spans = []
    for folder in bench.folders():
        at = {event.event: event.wall_s for event in folder.read_events()}
        spans.append((at["started"], at["exited"], folder.read_run().cell.seed))
    spans.sort()
    assert [seed for _, _, seed in spans] == [1, 2, 3, 4]
    assert all(end <= start for (_, end, _), (start, _, _) in itertools.pairwise(spans))


def test_a_closed_terminal_ends_no_run(bench):
    words = shlex.join(bench.command("jobs", "submit", "--matrix", bench.matrix(LONG, steps=150)))
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if nohup started the tests
        os.execvp("bash", ["bash", "-c", f"{words}; sleep 1000"])
    until(lambda: bench.folders(), "rendered")
    running(bench)
    os.close(terminal)  # closing the terminal makes the kernel send SIGHUP to the command
    os.waitpid(child, 0)
    until(lambda: set(bench.states().values()) == {"completed"}, "the run completes")


def test_ctrl_c_leaves_the_runs_and_exits_130(bench):
    waiting = subprocess.Popen(
        bench.command("jobs", "submit", "--matrix", bench.matrix(LONG, steps=150), "--wait"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    running(bench)
    waiting.send_signal(signal.SIGINT)
    _, stderr = waiting.communicate(timeout=HANG_S)
    assert waiting.returncode == 130
    assert "runs that were started continue" in stderr
    until(lambda: set(bench.states().values()) == {"completed"}, "the run completes")


def test_a_killed_runner_loses_nothing(bench):
    name = bench.matrix(TWO, steps=200)
    bench.run("jobs", "submit", "--matrix", name)
    at_work = running(bench)
    (runner,) = [p for p in processes_of(bench.path) if "jobs.schedulers.local" in p.cmdline()]
    runner.kill()
    runner.wait(HANG_S)
    until(lambda: at_work.judge().state == "completed", "the run at work goes on without its runner")
    raw = {run["scheduler"]["raw"] for run in bench.json("jobs", "status")["runs"] if run["state"] == "pending"}
    assert raw == {"queued, but no runner is alive: `jobs submit` starts a runner"}
    bench.run("jobs", "submit", "--matrix", name, "--wait")
    assert set(bench.states().values()) == {"completed"}
    assert starts(bench) == [1, 1]


def test_a_new_runner_waits_for_the_run_of_a_killed_runner(bench):
    name = bench.matrix(TWO, steps=300)
    bench.run("jobs", "submit", "--matrix", name)
    running(bench)
    (runner,) = [p for p in processes_of(bench.path) if "jobs.schedulers.local" in p.cmdline()]
    runner.kill()
    runner.wait(HANG_S)
    bench.run("jobs", "submit", "--matrix", name, "--wait")
    ends = sorted((e.wall_s, e.event) for f in bench.folders() for e in f.read_events() if e.event in ("started", "exited"))
    assert [event for _, event in ends] == ["started", "exited"] * 2


def test_two_submitters_at_once_send_each_run_once(bench):
    words = bench.command("jobs", "submit", "--matrix", bench.matrix(FOUR), "--wait")
    both = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for one in both:
        _, stderr = one.communicate(timeout=HANG_S)
        assert one.returncode == 0, stderr
    assert set(bench.states().values()) == {"completed"}
    assert starts(bench) == [1, 1, 1, 1]


def test_a_killed_supervisor_is_a_failure_and_leaves_nothing_behind(bench):
    name = bench.matrix("axes: {seed: [1, 2]}\ninclude: [{strategy: ddp, gpus: 2}]", steps=150)
    bench.run("jobs", "submit", "--matrix", name)
    at_work = running(bench)
    pid = started(at_work)["pid"]
    assert len(processes_of(at_work.path)) > 2  # the supervisor and at least its two ranks
    os.kill(pid, signal.SIGKILL)
    until(lambda: at_work.judge().state == "failed", "the runner writes the end down")
    assert "its supervisor ended without recording an end" in at_work.judge().why
    until(lambda: not processes_of(at_work.path), "nothing is left")
    until(lambda: sorted(bench.states().values()) == ["completed", "failed"], "the next run completes")


def alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("launcher", ["fork", "torchrun"])
def test_a_killed_rank_is_a_failure(bench, launcher):
    name = bench.matrix(f"axes: {{strategy: [ddp], gpus: [2], launcher: [{launcher}]}}", steps=FOREVER)
    bench.run("jobs", "submit", "--matrix", name)
    at_work = running(bench)
    os.kill(rank_pid(at_work, 1), signal.SIGKILL)
    until(lambda: at_work.judge().state == "failed", "the run fails")
    assert not at_work.result.exists()
    until(lambda: not processes_of(at_work.path), "nothing is left")


def rank_pid(folder, rank):
    """The process id of a rank, which is the process that has the rank's step file open."""
    wanted = str(folder.steps_file(rank))
    for process in psutil.process_iter():
        try:
            if any(opened.path == wanted for opened in process.open_files()):
                return process.pid
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    raise AssertionError(f"no process has {wanted} open")


def test_the_time_limit_is_a_result_and_not_a_failure(bench):
    name = bench.matrix(LONG + '\ninclude: [{time_limit: "00:00:03", expect: [timeout]}]', steps=FOREVER)
    sent = bench.json("jobs", "submit", "--matrix", name, "--wait")
    (run,) = sent["runs"]
    assert (run["state"], run["expected"]) == ("timeout", True)
    assert run["why"] == "ended at its time limit of 3 s"
    until(lambda: not processes_of(bench.folders()[0].path), "nothing is left")


def both_make_steps(folder):
    """Whether both ranks of a run have recorded a step.

    Each call also writes an event, which counts as progress of the run: on a slow machine, the start of the ranks may take
    longer than the hang limit.
    """
    folder.write_event("test", "waits", sync=False)
    return folder.steps(0).records and folder.steps(1).records


def stopped(folder, rank):
    """Stop the process of a rank by SIGSTOP, so that it is alive and does nothing. Returns the process."""
    pid = rank_pid(folder, rank)
    os.kill(pid, signal.SIGSTOP)
    return psutil.Process(pid)


@pytest.mark.parametrize("launcher", ["torchrun", *only_long("fork")])
def test_a_hung_run_is_ended_and_its_log_has_the_stacks_of_its_ranks(bench, launcher):
    cells = f'axes: {{strategy: [ddp], gpus: [2], launcher: [{launcher}]}}\ninclude: [{{hang_limit: "00:00:10"}}]'
    waiting = subprocess.Popen(
        bench.command("jobs", "submit", "--matrix", bench.matrix(cells, steps=FOREVER), "--wait"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (folder,) = until(bench.folders, "rendered")
    until(lambda: both_make_steps(folder), "both ranks make steps")
    rank = stopped(folder, 1)
    said, _ = waiting.communicate(timeout=HANG_S)
    assert waiting.returncode == 1
    last = [folder.steps(rank).records[-1] for rank in (0, 1)]
    verdict = folder.judge()
    assert verdict.state == "hung"
    assert verdict.why.startswith("no progress for 10 s (hang_limit): rank")
    assert f" step {min(one.step for one in last)}, at " in verdict.why
    assert verdict.why in said
    stacks = folder.rank_log(0).read_text()
    assert "Timeout (0:00:09)!" in stacks  # the rank printed its stacks at 9 s, before the hang limit of 10 s
    assert "in _run_steps" in stacks[stacks.rindex("Timeout") :]
    until(lambda: not alive(rank) and not processes_of(folder.path), "nothing of it is left")
    assert next(e.data["code"] for e in folder.read_events() if e.event == "exited") != 0


def test_a_suspension_is_recorded_and_does_not_count_towards_the_time_limit(bench, tmp_path):
    """A suspension is recorded in the event `stood_still`, and does not count towards the run's time limit."""
    saved, limit_s = "instruments: {checkpoints: {every_steps: 1000000}}", time_limit_s(tmp_path / "measured")
    name = bench.matrix(f'{LONG}\ninclude: [{{time_limit: "{clock(limit_s)}", expect: [timeout], {saved}}}]', steps=FOREVER)
    bench.json("jobs", "submit", "--matrix", name)
    folder = running(bench)
    all_of_it = [psutil.Process(pid) for pid in (started(folder)["pid"], rank_pid(folder, 0), rank_pid(folder, 1))]
    for process in all_of_it:
        process.suspend()
    time.sleep(0.8 * limit_s)  # suspended until after the time for the last checkpoint
    for process in reversed(all_of_it):
        process.resume()
    until(lambda: folder.judge().state == "timeout", "its time is up")
    assert "its time limit is near: saved after step" in folder.judge().why
    when = {event.event: event for event in folder.read_events()}
    still = when["stood_still"]
    assert still.data["seconds"] >= 0.8 * limit_s - POLL_S
    assert when["exited"].wall_s - when["started"].wall_s >= 0.8 * limit_s + still.data["seconds"] - 1
    for rank in (0, 1):
        counted = [
            one
            for one in suspension.mark_suspended(folder.steps(rank).records, suspension.read_suspensions(folder.read_events()))
            if not one.watched
        ]
        assert counted
        assert not any(holds_pause(record, still) for record in counted)


def test_the_rendezvous_of_the_ranks_is_recorded(bench):
    """The event `met` records the number of ranks and hosts, the backend and the network interface."""
    bench.run("jobs", "submit", "--matrix", bench.matrix(LONG), "--wait")
    (folder,) = bench.folders()
    (met,) = [event for event in folder.read_events() if event.event == "met"]
    assert met.data == {"world_size": 2, "hosts": 1, "backend": "gloo", "interface": "lo"}


def test_out_of_memory_is_a_result_and_not_a_failure(bench):
    huge = "workload: gpt2-tiny, seq_len: 16, options.n_embd: 1099511627776"
    name = bench.matrix(f"axes: {{strategy: [single]}}\ninclude: [{{{huge}}}]")
    sent = bench.json("jobs", "submit", "--matrix", name, "--no-fit-check", "--wait", code=1)
    (run,) = sent["runs"]
    assert (run["state"], run["expected"]) == ("oom", False)
    assert "allocate" in run["why"]


def test_cancel_ends_waiting_and_running_runs(bench):
    bench.run(
        "jobs", "submit", "--matrix", bench.matrix(FOUR.replace("single", "ddp") + "\ninclude: [{gpus: 2}]", steps=FOREVER)
    )
    at_work = running(bench)
    assert bench.run("jobs", "cancel", code=2).stderr.startswith("error: say what to cancel")
    waiting = next(f for f in bench.folders() if f.judge().state == "pending")
    bench.run("jobs", "cancel", waiting.run_id)
    assert waiting.judge().state == "cancelled"
    assert at_work.judge().state == "running"
    bench.run("jobs", "cancel", "--where", "strategy == 'ddp'")
    assert set(bench.states().values()) == {"cancelled"}
    until(lambda: not processes_of(at_work.path), "nothing is left")
    assert sum(starts(bench)) == 1


def test_a_cancel_between_a_claim_and_its_start_is_not_lost(bench):
    """A run is cancelled after its supervisor claimed it and before its command starts: the run ends as cancelled."""
    bench.run("jobs", "render", "--matrix", bench.matrix("axes: {strategy: [single]}"))
    (folder,) = bench.folders()
    paused = "take = claim.claim_run; claim.claim_run = lambda run: (take(run), input())[0]"
    imports = "import sys; from jobs import claim; from jobs.supervisor import attempt"
    supervise = f"{imports}; {paused}; sys.exit(attempt.main(sys.argv[1:]))"
    words = [sys.executable, "-P", "-c", supervise, folder.path, "--", "sleep", "1000"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as supervisor:
        until(folder.claim.exists, "it is claimed")
        with subprocess.Popen(bench.command("jobs", "cancel", "--all"), stdout=subprocess.DEVNULL) as cancel:
            until(lambda: "cancel_requested" in {event.event for event in folder.read_events()}, "it is asked to end")
            supervisor.communicate(b"\n", timeout=HANG_S)
            assert cancel.wait(HANG_S) == 0
    assert (supervisor.returncode, folder.judge().state) == (143, "cancelled")


def test_retry_makes_a_new_attempt_under_the_same_cell(bench):
    name = bench.matrix(LONG, steps=FOREVER)
    bench.run("jobs", "submit", "--matrix", name)
    first = running(bench)
    os.kill(rank_pid(first, 0), signal.SIGKILL)
    until(lambda: first.judge().state == "failed", "the run fails")
    again = bench.run("jobs", "submit", "--matrix", name)
    assert "ended: failed (`jobs retry --only failed` makes a new attempt)" in again.stdout
    bench.run("jobs", "retry", "--only", "oom")
    assert len(bench.folders()) == 1
    bench.run("jobs", "retry", "--only", "failed")
    second = running(bench)
    assert second.run_id == f"{first.run_id}-a2"
    assert (second.read_run().attempt, second.read_run().cell_hash) == (2, first.read_run().cell_hash)
    assert bench.states() == {second.run_id: "running"}
    refused = bench.run("jobs", "retry", "--only", "bored", code=2).stderr
    assert refused.startswith("error: --only: unknown state in which a run ends 'bored'")


def test_a_retry_after_the_time_limit_resumes_from_the_last_checkpoint(bench, tmp_path):
    saved, limit = "instruments: {checkpoints: {every_steps: 1000000}}", clock(time_limit_s(tmp_path / "measured"))
    name = bench.matrix(f'{LONG}\ninclude: [{{time_limit: "{limit}", expect: [timeout], {saved}}}]', steps=FOREVER)
    (run,) = bench.json("jobs", "submit", "--matrix", name, "--wait")["runs"]
    assert run["state"] == "timeout"
    assert "its time limit is near: saved after step" in run["why"]
    (first,) = bench.folders()
    step = parse_checkpoint_step(list_checkpoints(first.path)[0])
    sent = bench.run("jobs", "retry", "--only", "timeout").stdout
    assert f"attempt 2 after timeout, resumes from its checkpoint at step {step}" in sent
    second = running(bench)
    assert second.read_run().resume == [first.run_id]
    until(lambda: len(second.steps(1).records) > step, "it makes steps of its own")
    (run,) = bench.json("jobs", "status")["runs"]
    assert (run["state"], run["resumed_from_step"]) == ("running", step)
    records = second.steps(1).records
    assert [r.step for r in records] == list(range(1, len(records) + 1))
    assert records[:step] == first.steps(1).records
    assert "resumed from step" in bench.run("jobs", "status").stdout


def test_a_run_resumes_on_another_number_of_ranks_if_nothing_else_differs(bench):
    """A run may resume from the checkpoint of a cell with another number of ranks, but not with another seed."""
    saved = "instruments: {checkpoints: {every_steps: 2, layout: whole}}"
    bench.run("jobs", "submit", "--matrix", bench.matrix(f"include: [{{strategy: ddp, gpus: 2, {saved}}}]"), "--wait")
    (one,) = bench.folders()
    whole = bench.matrix("include: [{strategy: ddp, gpus: 2, instruments: {checkpoints: {every_steps: 3, layout: whole}}}]")
    bench.run("jobs", "submit", "--matrix", whole, "--wait")
    (other_id,) = {folder.run_id for folder in bench.folders()} - {one.run_id}
    why = bench.run("jobs", "submit", "--matrix", whole, "--resume-from", other_id, code=2).stderr
    assert f"cannot resume from {other_id}: its newest checkpoint is of step 3, and the cell has 3 steps." in why
    shutil.rmtree(bench.path / "runs" / other_id)
    refused = bench.matrix(f"include: [{{strategy: single, seed: 1, {saved}}}]")
    why = bench.run("jobs", "submit", "--matrix", refused, "--resume-from", one.run_id, code=2).stderr
    assert f"cannot resume from {one.run_id}: its cell differs in seed." in why
    bare = bench.matrix("include: [{strategy: single}]")
    assert "keeps no checkpoints" in bench.run("jobs", "submit", "--matrix", bare, "--resume-from", one.run_id, code=2).stderr
    assert len(bench.folders()) == 1
    other = bench.matrix(f"include: [{{strategy: single, {saved}}}]")
    (run,) = bench.json("jobs", "submit", "--matrix", other, "--resume-from", one.run_id, "--wait")["runs"]
    assert (run["state"], run["resumed_from_step"], run["steps"]) == ("completed", 2, 3)
    bench.run("collect", "summarize", "--out", str(bench.path / "report"))
    summary = json.loads((bench.path / "report" / "summary.json").read_text())
    assert any("resumed from a checkpoint" in remark for remark in summary["remarks"])
    (row,) = summary["rows"]
    assert not {"cpu_pct", "loopback_bytes"} & set(row["metrics"])
    assert not summary["telemetry"]


def test_a_second_start_of_a_script_does_nothing(bench):
    bench.run("jobs", "submit", "--matrix", bench.matrix("axes: {strategy: [single]}"), "--wait")
    (folder,) = bench.folders()
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    assert subprocess.run(["bash", folder.path / "job.sh"], check=False, stderr=subprocess.DEVNULL).returncode == 75
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


def test_a_script_that_cannot_start_is_a_failure_and_not_a_loop(bench):
    name = bench.matrix(FOUR)
    bench.run("jobs", "render", "--matrix", name)
    bench.run("jobs", "submit", "--matrix", name, "--where", "seed == 1", "--dry-run")
    assert not any(folder.claim.exists() for folder in bench.folders())
    from jobs.schedulers import local
    from shardlab.workspace.workspace import Workspace

    first, second, *_ = bench.folders()
    (first.path / "job.sh").write_text("exit 7\n")
    for folder in (first, second):
        folder.write_event("controller", "submitted", scheduler="local")
    assert local.SCHEDULER.work_as_runner(Workspace(bench.path)) == 0
    assert (first.judge().state, second.judge().state) == ("failed", "completed")
    assert "exit code 7 before it started anything" in first.judge().why


def test_logs_show_the_ranks(bench):
    bench.run("jobs", "submit", "--matrix", bench.matrix(LONG), "--wait")
    (folder,) = bench.folders()
    folder.rank_log(1).write_bytes(b"before \xff after\n")
    assert bench.run("jobs", "logs", "ddp-*", "--rank", "1").stdout == "before � after\n"
    assert "Allowed: 0 to 1." in bench.run("jobs", "logs", "ddp-*", "--rank", "2", code=2).stderr
    assert "Allowed:" in bench.run("jobs", "logs", "../ddp", code=2).stderr


def test_wrong_input_writes_nothing(bench):
    text = bench.matrix("axes: {gpus: [1, 1]}")
    before = sorted(bench.path.rglob("*"))
    for words in (
        ("submit", "--matrix", text),
        ("submit", "--matrix", "nothing-like-it"),
        ("submit", "--matrix", "quickstart", "--where", "gpu > 1"),
        ("submit", "--matrix", "quickstart", "--where", "gpus > 64"),
        ("submit", "--matrix", "quickstart", "--repeats", "0"),
        ("submit", "--matrix", "quickstart", "--cluster", "none.yaml"),
        ("render", "--matrix", text),
        ("status", "none-*"),
        ("retry", "--only", "bored"),
    ):
        done = bench.run("jobs", *words, code=2)
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
    assert sorted(bench.path.rglob("*")) == before


def test_runs_of_two_clusters_are_not_mixed(bench):
    name = bench.matrix("axes: {strategy: [single]}")
    bench.run("jobs", "submit", "--matrix", name, "--wait")
    (bench.path / "cluster.yaml").write_text("schema: 1\nname: other\nprovider: local\n")
    assert "was run on cluster 'local', not 'other'" in bench.run("jobs", "submit", "--matrix", name, code=2).stderr


def mounted(folder: Path, *options: str):
    """Mount a small file system at `folder`. Skips the test if this is not possible."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", *options, "none", folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs root to mount a file system: {done.stderr.strip()}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-o", "ro"), "the file system is read-only; if it is in the workspace, choose another folder with --workspace"),
        (("-o", "size=16k"), "the disk is full; free some"),
    ],
)
def test_a_workspace_that_cannot_be_written_is_one_clear_sentence(tmp_path, options, words):
    folder = tmp_path / "w"
    mounted(folder, *options)
    try:
        command = [sys.executable, "-m", "jobs", "submit", "--matrix", "quickstart", "--workspace", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        (sentence,) = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
        assert sentence.startswith("error: cannot ")
        assert words in sentence
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
