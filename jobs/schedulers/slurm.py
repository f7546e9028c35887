"""The scheduler `slurm`: submits runs with the same options as one job array, and never submits a run twice."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from jobs import claim
from jobs.rendering import scripts
from jobs.scheduler import ObservedRun, RunOnDisk, Scheduler, SchedulerFull, SubmitOptions
from jobs.slurm import query, states, submission
from jobs.slurm.commands import ENDED_S, ControllerUnreachable, call_slurm, read_number_setting, read_own_cluster, read_setting
from jobs.slurm.query import Job, JobsFound
from jobs.slurm.submission import Submission, SubmissionKind
from shardlab.cluster import slurm_waiting
from shardlab.errors import InputError, ShardlabError, WorkspaceError
from shardlab.files import files
from shardlab.runs.record import Event
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import (
    ENDED_IN_SLURM,
    FINAL_STATES,
    TOLD_REASON,
    JudgedState,
    count_starts_and_ends,
    drop_learnt_ends,
    find_last_sending,
    find_learnt_end,
    find_sent_job,
    name_job,
)
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

SCRIPT = "job.sbatch"
SHARED_TEMPLATES = {"array": "launch/slurm_array.sbatch.j2", "pack": "launch/slurm_pack.sbatch.j2"}
# Slurm's limits count each task of an array. If an array exceeds a limit, an array with 1/CUT of its tasks is tried, down to
# one run.
PART_DIVISOR = 4
# The longest delay of Slurm's accounting. If the accounting does not know a job after this time, the job does not exist.
ACCOUNTING_LAG_S = 120.0
# States of a job that only Slurm may know. The records of its run may only say that the run failed, without a reason.
STATES_ONLY_SLURM_KNOWS = ("oom", "node_fail", "preempted", "cancelled", "timeout")
# States of an ended job that say nothing about a run of the job that had not started: in a packed allocation, an earlier run
# may have used up the time or the memory.
JOB_STATES_OF_OTHER_RUNS = ("completed", "failed", "timeout", "oom")
_NOT_HELD_ANY_MORE = re.compile("already finished|no longer pending|Invalid job id")  # Slurm's words
_OPTION_PREFIX = "#SBATCH "
_TIME_OPTION = re.compile(r"^--time=(\d+)\Z")


class SlurmScheduler(Scheduler):
    """Submits runs by sbatch, and asks Slurm for their states."""

    NAME = "slurm"
    TEMPLATE = "launch/slurm.sbatch.j2"
    TEMPLATES = (TEMPLATE, *SHARED_TEMPLATES.values())
    SCRIPT = SCRIPT
    POLL_S = 5.0  # seconds between two questions to Slurm's controller; not less, because other users need the controller too

    def submit(self, workspace: Workspace, run_dirs: Sequence[RunDir], submit_options: SubmitOptions) -> None:
        """Submit runs. Runs with the same options become one job.

        Raises JobRefused if Slurm rejects a job, ControllerUnreachable, and SchedulerFull if, because of a limit, Slurm accepts
        not even a job with a single run.
        """
        cluster = run_dirs[0].read_run().slurm_cluster  # all runs of a submission have the same cluster
        earlier_jobs = _find_unended_jobs(workspace, submit_options.run_ids_before, cluster)
        is_one_job = submit_options.is_packed or len(run_dirs) == 1
        most_runs_per_job = len(run_dirs) if is_one_job else max(1, read_number_setting("MaxArraySize", 1001, cluster))
        run_groups = _group_by_options(run_dirs)
        while run_groups:
            equal_runs = run_groups[0]
            job_runs = equal_runs if submit_options.is_packed else equal_runs[:most_runs_per_job]
            try:
                job = _submit_job(workspace, job_runs, submit_options, earlier_jobs)
            except submission.SlurmLimitReached as limit_error:
                if submit_options.is_packed or len(job_runs) == 1:
                    raise SchedulerFull(
                        "Slurm", limit_error.why, [run_dir for group_of_runs in run_groups for run_dir in group_of_runs]
                    ) from None
                most_runs_per_job = max(1, len(job_runs) // PART_DIVISOR)
                continue
            run_groups[:1] = [remaining_runs] if (remaining_runs := equal_runs[len(job_runs) :]) else []
            if submit_options.most_runs is not None and job is not None:
                earlier_jobs = [job]  # jobs with other options wait for this job: otherwise too many runs could run at a time

    def finish_interrupted(self, workspace: Workspace) -> list[str]:
        """Finish submissions of earlier commands that were interrupted; return a sentence about each."""
        sentences = []
        for interrupted in submission.list_interrupted(workspace):
            try:
                sentences.append(submission.settle_submission(workspace, interrupted))
            except submission.SlurmLimitReached as limit_error:
                why = f"Slurm does not have this job, and accepts no more jobs for now ({limit_error.why})."
                sentences.append(f"{interrupted.token}: {why}")
            except submission.JobRefused as refusal_error:
                sentences.append(f"{interrupted.token}: this job was never created. {refusal_error}")
        return sentences

    def describe_damaged_records(self, workspace: Workspace) -> list[str]:
        """A sentence for each submission file that cannot be read, with the runs that are skipped for this reason."""
        return submission.describe_damaged(workspace)

    def observe(self, workspace: Workspace, runs: Sequence[RunOnDisk]) -> list[ObservedRun]:
        """The state of each run, from its own records and from one query to each cluster of Slurm for all its jobs."""
        runs_by_cluster: dict[str | None, list[RunOnDisk]] = {}
        for run in runs:
            last_sending = find_last_sending(run.events)
            runs_by_cluster.setdefault(last_sending.data.get("cluster") if last_sending is not None else None, []).append(run)
        observed_by_id: dict[str, ObservedRun] = {}
        for cluster, runs_of_cluster in runs_by_cluster.items():
            group_ids = [run.run_dir.run_id for run in runs_of_cluster]
            observed_by_id |= zip(group_ids, self._observe_on_cluster(workspace, runs_of_cluster, cluster), strict=True)
        return [observed_by_id[run.run_dir.run_id] for run in runs]

    def _observe_on_cluster(self, workspace: Workspace, runs: Sequence[RunOnDisk], cluster: str | None) -> list[ObservedRun]:
        """As `observe`, for runs that were submitted to the same cluster of Slurm."""
        sendings = [find_last_sending(run.events) for run in runs]
        job_ids = [str(sending.data["job"]) for sending in sendings if sending is not None and sending.data.get("job")]
        job_numbers = sorted({job_id.split("_")[0] for job_id in job_ids})
        since_s = min((sending.wall_s for sending in sendings if sending is not None), default=0.0)
        answer = query.find_jobs(job_numbers, since_s, _list_unfinished_job_ids(runs, sendings), cluster)
        unfinished_packs = _find_unfinished_packs(workspace) if any(claim.is_packed(run.events) for run in runs) else set()
        has_open_sending = any(sending is not None and sending.event == "submitting" for sending in sendings)
        unreadable_reasons = submission.find_unreadable(workspace) if has_open_sending else {}
        observed_runs = []
        for run, sending in zip(runs, sendings, strict=True):
            observed_run = _observe_run(run, sending, answer, unreadable_reasons)
            job_name = name_job(observed_run.job_id, cluster) if observed_run.job_id != "-" else "-"
            # Slurm may start a run again after an end that was learnt from Slurm: such an end makes no job a leftover.
            judged_run = run if find_learnt_end(run.events) is None else _judge_by_records(run, run.events)
            is_leftover = job_name not in unfinished_packs and _is_leftover(judged_run, answer.jobs.get(observed_run.job_id))
            observed_runs.append(msgspec.structs.replace(observed_run, job_id=job_name, is_leftover=is_leftover))
        record_learnt_ends(workspace, runs, observed_runs)
        return observed_runs

    def cancel(self, workspace: Workspace, runs: Sequence[RunOnDisk]) -> None:
        """Record that the runs are cancelled, then cancel their jobs. Raises ControllerUnreachable if Slurm does not answer."""
        cancelled_ids = {run.run.run_id for run in runs}
        cancelled_packs = {
            name_job(pack.job, pack.cluster)
            for pack in _list_pack_submissions(workspace)
            if pack.job and cancelled_ids >= _list_unfinished_run_ids(workspace, pack)
        }
        tokens_by_job: dict[str, str] = {}
        for run in runs:
            last_sending = find_last_sending(run.events)
            if run.verdict.state not in ("planned", "pending") or not claim.claim_as_cancelled(run.run_dir):
                run.run_dir.write_event("controller", "cancel_requested")
            job, token = find_sent_job(last_sending)
            # A packed allocation is cancelled only if all its unfinished runs are cancelled. Otherwise its other runs continue,
            # and the supervisor of a running run ends this run.
            if job and (not claim.is_packed(run.events) or job in cancelled_packs):
                tokens_by_job[job] = token
        try:
            for cluster, job_numbers in query.select_own_jobs(tokens_by_job):
                output = call_slurm(["scancel", *job_numbers], cluster=cluster)
                if output.exit_code != 0 and query.is_unanswered(output):
                    raise ControllerUnreachable(output.error_line, "")
        except ControllerUnreachable as outage:
            raise ControllerUnreachable(
                outage.why,
                "The runs are marked as cancelled in the workspace: pending runs will not start, and running runs end "
                "by themselves. Their jobs may stay in Slurm's queue; run the command again when Slurm is back to cancel them.",
            ) from None

    def cancel_jobs(self, job_ids: Sequence[str]) -> str:
        """Cancel jobs that `observe` has just found under their tokens. Returns '', or Slurm's words if it cancelled none."""
        outputs = [
            call_slurm(["scancel", *job_numbers], cluster=cluster) for cluster, job_numbers in query.split_by_command(job_ids)
        ]
        return next((output.error_line for output in outputs if output.exit_code != 0), "")

    def hold_jobs(self, token_by_job: Mapping[str, str]) -> str:
        """Hold pending jobs, then requeue the job of this process as a held job, which ends this process. Returns Slurm's words
        if Slurm did not requeue the job."""
        with contextlib.suppress(ControllerUnreachable):  # a run that starts now checks its packages and holds itself
            for cluster, job_numbers in query.select_own_jobs(token_by_job):
                call_slurm(["scontrol", "hold", ",".join(job_numbers)], cluster=cluster)
        own_job = claim.read_own_job_id()
        # Slurm requeues only jobs with Requeue=1. The run counts its restarts itself, so this allows no additional restarts.
        call_slurm(["scontrol", "update", f"JobId={own_job}", "Requeue=1"], cluster=read_own_cluster())
        output = call_slurm(["scontrol", "requeuehold", own_job], cluster=read_own_cluster())
        if not output.ends_own_job:
            return output.error_line
        time.sleep(ENDED_S)  # until Slurm ends this process; otherwise a job with several runs (`--pack`) starts its next run
        return "" if output.exit_code == 0 else output.error_line

    def release_jobs(self, token_by_job: Mapping[str, str]) -> None:
        """Release held jobs. Raises ShardlabError if Slurm does not release them."""
        for cluster, job_numbers in query.select_own_jobs(token_by_job):
            output = call_slurm(["scontrol", "release", ",".join(job_numbers)], cluster=cluster)
            if output.exit_code != 0 and not _NOT_HELD_ANY_MORE.search(output.stderr):
                raise ShardlabError(
                    f"Slurm does not release the held runs: {output.error_line}. They stay held; run the command again."
                )


SCHEDULER = SlurmScheduler()


def _is_leftover(run: RunOnDisk, job: Job | None) -> bool:
    """Whether a job is still pending in Slurm although its run has ended for good. False for a try of a search, because the job
    executes further tries.

    Slurm requeues the job of a completed run if a node failed, or if the controller lost contact to a node, before Slurm
    recorded the end of the job.
    """
    return (
        job is not None
        and run.run.search is None
        and run.verdict.state in ("completed", "cancelled")
        and job.name in {event.data.get("token") for event in run.events if event.event == "submitted"}
        and states.translate_state(job.state) == "pending"
    )


def _find_unfinished_packs(workspace: Workspace) -> set[str]:
    """The jobs of the packed allocations that contain a run that has not ended, as `name_job` names them."""
    packs = _list_pack_submissions(workspace)
    return {name_job(pack.job, pack.cluster) for pack in packs if pack.job and _list_unfinished_run_ids(workspace, pack)}


def _list_pack_submissions(workspace: Workspace) -> list[submission.Submission]:
    """The submissions of packed allocations, each with several runs in one job."""
    return [pack for pack in submission.list_submissions(workspace) if pack.kind == "pack"]


def _list_unfinished_job_ids(runs: Sequence[RunOnDisk], sendings: Sequence[Event | None]) -> set[str]:
    """The ids of the jobs that may still wait or run. Empty if all runs are in a final state.

    As long as one run is not in a final state, the jobs of failed runs count too, because Slurm may restart them; the jobs of
    completed and of cancelled runs never count.
    """
    if all(run.verdict.state in FINAL_STATES for run in runs):
        return set()
    return {
        str(sending.data["job"])
        for run, sending in zip(runs, sendings, strict=True)
        if sending is not None and sending.data.get("job") and run.verdict.state not in ("completed", "cancelled")
    }


def _list_unfinished_run_ids(workspace: Workspace, pack_submission: Submission) -> set[str]:
    """The ids of those runs of a submission that have not ended, according to their records. A run whose records cannot be read
    counts as not ended."""
    return {run_id for run_id in pack_submission.runs if not RunDir(workspace.runs / run_id).has_ended()}


def _find_unended_jobs(workspace: Workspace, run_ids: Sequence[str], cluster: str | None) -> list[str]:
    """The numbers of the jobs of those of these runs that have not ended: Slurm may have forgotten others. Raises
    ControllerUnreachable, and InputError if such a job is not on the cluster `cluster`, because no job waits for a job of
    another cluster."""
    run_folders = [RunDir(workspace.runs / run) for run in run_ids]
    tokens_by_job = dict(folder.find_sent_job() for folder in run_folders if not folder.has_ended())
    job_groups = query.select_own_jobs({job: token for job, token in tokens_by_job.items() if job})
    for job_cluster, job_numbers in job_groups:
        # sbatch may name the default cluster although no cluster was chosen, for example in a federation.
        if job_cluster != cluster and (cluster is not None or job_cluster != read_setting("ClusterName")):
            raise InputError(
                f"--after: the job {name_job(job_numbers[0], job_cluster)} is on another cluster of Slurm than the "
                "new runs. Allowed: runs of the same cluster (slurm.cluster), because no job waits for a job of "
                "another cluster."
            )
    return [number for _, job_numbers in job_groups for number in job_numbers]


def _group_by_options(run_dirs: Sequence[RunDir]) -> list[list[RunDir]]:
    """Groups of runs with the same sbatch options, in the order of the runs."""
    runs_by_options: dict[tuple[str, ...], list[RunDir]] = {}
    for run_dir in run_dirs:
        runs_by_options.setdefault(_read_script_options(run_dir), []).append(run_dir)
    return list(runs_by_options.values())


def _read_script_options(run_dir: RunDir) -> tuple[str, ...]:
    """The sbatch options of a run, read from its script, because the user's own template may add options.

    As in sbatch, the options end at the first line that is neither a comment nor empty. Lines below are not read: they contain
    the path of the run's folder, which may contain any text.
    """
    script_lines = files.read(run_dir.path / SCRIPT).decode(errors="replace").split("\n")
    head_lines = itertools.takewhile(lambda line: not line.strip() or line.lstrip().startswith("#"), script_lines)
    return tuple(line.removeprefix(_OPTION_PREFIX).strip() for line in head_lines if line.startswith(_OPTION_PREFIX))


def _submit_job(
    workspace: Workspace, run_dirs: Sequence[RunDir], submit_options: SubmitOptions, earlier_jobs: Sequence[str]
) -> str | None:
    """Submit runs with the same options as one job, which starts after the jobs `earlier_jobs` have ended; return its
    number."""
    first_run = run_dirs[0].read_run()
    kind: SubmissionKind = "one" if len(run_dirs) == 1 else "pack" if submit_options.is_packed else "array"
    token = submission.make_token(run_dirs[0].run_id if kind == "one" else first_run.matrix)
    submission_folder = submission.find_submissions_folder(workspace) / token
    added_options: list[str] = []
    if kind == "one":
        script_path = run_dirs[0].path / SCRIPT
        added_options.append(f"--output={_escape_percent(run_dirs[0].log)}/slurm-%j.out")
    else:
        option_words = _read_script_options(run_dirs[0])
        if kind == "pack":
            option_words = tuple(
                _TIME_OPTION.sub(lambda match: f"--time={int(match[1]) * len(run_dirs)}", option_word)
                for option_word in option_words
            )
        files.make_folder(submission_folder)
        script_path = submission_folder / f"{kind}.sbatch"
        script_text = scripts.render_template(
            SHARED_TEMPLATES[kind],
            workspace.own_templates,
            options=option_words,
            folders=[str(run_dir.path) for run_dir in run_dirs],
            script=SCRIPT,
        )
        files.write_atomic(script_path, script_text.encode(), mode=0o755)
        added_options.append(f"--output={_escape_percent(submission_folder)}/slurm-%{'a' if kind == 'array' else 'j'}.out")
    if kind == "array":
        task_limit = (
            f"%{submit_options.most_runs}"
            if submit_options.most_runs is not None and submit_options.most_runs < len(run_dirs)
            else ""
        )
        added_options.append(f"--array=0-{len(run_dirs) - 1}{task_limit}")
    added_options += [f"--dependency=afterany:{':'.join(earlier_jobs)}"] if earlier_jobs else []
    new_submission = Submission(
        token=token,
        kind=kind,
        runs=[run_dir.run_id for run_dir in run_dirs],
        script=str(script_path),
        options=added_options,
        created_s=time.time(),
        cluster=_find_named_cluster(_read_script_options(run_dirs[0])) or first_run.slurm_cluster,
    )
    submission.record_intent(workspace, new_submission)
    submission.send_submission(workspace, new_submission)
    return new_submission.job


def _find_named_cluster(sbatch_options: Sequence[str]) -> str | None:
    """The cluster of Slurm that these options of a script name: the user's own template may name another one than the cluster
    file. None if they name none."""
    return next((option.partition("=")[2] for option in sbatch_options if option.startswith("--clusters=")), None)


def _escape_percent(path: Path) -> str:
    """A path, escaped for Slurm's patterns of file names, in which % has a meaning."""
    return str(path).replace("%", "%%")


def _observe_run(
    run: RunOnDisk, sending: Event | None, answer: JobsFound, unreadable_reasons: Mapping[str, str]
) -> ObservedRun:
    """The state of one run from its records and Slurm's answer.

    sending: the last event of the run that names its job or its submission; None if there is none.
    answer: Slurm's answer. unreadable_reasons: for each submission file that cannot be read, the reason, by the
    token of the submission; it is not known whether the jobs of these submissions exist.
    """
    if sending is None or sending.event == "refused":
        return ObservedRun(run.verdict, "-", "-")
    job_id = sending.data.get("job")
    if job_id is None:
        if run.verdict.state == "pending" and (unreadable_reason := unreadable_reasons.get(str(sending.data.get("token")))):
            return ObservedRun(
                JudgedState("unknown", f"{unreadable_reason}; `jobs status` says what to do"),
                "-",
                "not known whether Slurm accepted it",
            )
        return ObservedRun(run.verdict, "-", "not known whether Slurm accepted it: `jobs submit` finds out")
    job = answer.jobs.get(job_id)
    if job is not None and job.name != sending.data.get("token"):
        job = None  # Slurm has given the number of the run's job to another job
    if job is None:
        scheduler_words = f"Slurm does not answer: {answer.no_answer_reason}" if answer.no_answer_reason else "-"
        return ObservedRun(
            _judge_missing(run, sending, answer), job_id, scheduler_words, is_unanswered=bool(answer.no_answer_reason)
        )
    scheduler_words = (
        f"{job.state} ({job.reason})" if job.reason and states.translate_state(job.state) == "pending" else job.state
    )
    if answer.no_answer_reason:
        scheduler_words = f"{scheduler_words} in Slurm's accounting; the controller does not answer: {answer.no_answer_reason}"
    if run.verdict.state in FINAL_STATES and answer.no_answer_reason and states.translate_state(job.state) == "running":
        return ObservedRun(run.verdict, job_id, scheduler_words)  # the accounting may know the end later than the run's records
    learnt_end = find_learnt_end(run.events)
    if learnt_end is not None:
        run = _judge_by_records(run, run.events)  # Slurm may have started the run again
    if run.verdict.state not in FINAL_STATES and states.translate_state(job.state) not in ("pending", "running"):
        run = _reread_run(run)
    is_shared = claim.is_packed(run.events) or run.run.search is not None
    verdict = _combine_with_job(run, job, is_shared=is_shared)
    return ObservedRun(
        learnt_end if learnt_end is not None and verdict.state == "unknown" else verdict, job_id, scheduler_words
    )


def record_learnt_ends(workspace: Workspace, runs: Sequence[RunOnDisk], observed_runs: Sequence[ObservedRun]) -> None:
    """Record each final state that only Slurm knew as an event of its run, so that the state does not change if Slurm forgets
    the job or does not answer, and so that `collect` knows it too. An event with a state that is not final withdraws an earlier
    one, because Slurm starts the run again. Does nothing if this user may not act in the workspace."""
    learnt_pairs = [
        (run, observed_run)
        for run, observed_run in zip(runs, observed_runs, strict=True)
        if observed_run.verdict.state != run.verdict.state
        and (observed_run.verdict.state in FINAL_STATES or find_learnt_end(run.events) is not None)
    ]
    if not learnt_pairs or not workspace_trust.is_allowed(workspace):
        return
    for run, observed_run in learnt_pairs:
        with contextlib.suppress(WorkspaceError):  # for example, the file system is read-only
            events = run.run_dir.read_events()
            if run.run_dir.judge_with_result(events, run.run)[0].state != run.verdict.state:
                continue  # the run has gone on, or another command has recorded the state
            cluster, _, job_number = observed_run.job_id.rpartition(":")
            run.run_dir.write_event(
                "controller",
                ENDED_IN_SLURM,
                sync=False,
                state=observed_run.verdict.state,
                why=observed_run.verdict.why,
                job=job_number,
                cluster=cluster or None,
                records=count_starts_and_ends(events),
            )


def _reread_run(run: RunOnDisk) -> RunOnDisk:
    """Read the run again: it may have recorded its end after it was first read and before Slurm was asked."""
    return _judge_by_records(run, run.run_dir.read_events())


def _judge_by_records(run: RunOnDisk, events: Sequence[Event]) -> RunOnDisk:
    """The run with the state by these events of it, without what was learnt from Slurm earlier."""
    events = drop_learnt_ends(events)
    return RunOnDisk(run.run_dir, run.run, events, *run.run_dir.judge_with_result(events, run.run))


def _combine_with_job(run: RunOnDisk, job: Job, *, is_shared: bool) -> JudgedState:
    """Combine the records of a run with Slurm's state of its job.

    The records tell best how a run ended. Slurm tells why the records stop, and why Slurm ended the run. is_shared: whether the
    job contains other runs too.
    """
    verdict, slurm_state = run.verdict, states.translate_state(job.state)
    slurm_word = states.extract_state(job.state)
    has_started = any(event.event == "started" for event in run.events)
    if verdict.state in FINAL_STATES:
        return judge_after_end(run, job, is_shared=is_shared)
    if slurm_state == "pending":
        if verdict.held and (not job.reason or "held" in job.reason.lower()):
            return verdict
        return _judge_waiting(job, "started again by Slurm" if has_started else "")
    if slurm_state == "running":
        waiting_for = "waits for the earlier runs in its job" if is_shared else "its job is starting"
        return JudgedState("running") if has_started or verdict.state == "running" else JudgedState("pending", waiting_for)
    if slurm_state == "unknown":
        return JudgedState("unknown", f"Slurm says {job.state}")
    if not has_started and slurm_state in JOB_STATES_OF_OTHER_RUNS:
        end_clause = f"its job ended ({job.state}) before the run started"
        return JudgedState("failed", f"{end_clause}; `jobs retry` submits it again; see log/slurm-*.out")
    if slurm_state in ("completed", "failed"):
        why = f"its job ended ({job.state}), but the run did not record its end"
        return JudgedState("failed" if slurm_state == "failed" else "unknown", why)
    return JudgedState(slurm_state, states.CLAUSE_BY_END_STATE[slurm_word])


def _judge_waiting(job: Job, why: str) -> JudgedState:
    """The state of a run whose job waits: pending, and held if Slurm holds the job after a failed start. why: why the job waits
    again; ''."""
    pending_reason = job.reason if states.translate_state(job.state) == "pending" else ""
    why = "; ".join(filter(None, (why, slurm_waiting.explain_waiting(pending_reason, slurm_waiting.FOR_RUNS))))
    return JudgedState("pending", why, held=bool(slurm_waiting.HELD_AFTER_LAUNCH.match(pending_reason)))


def judge_after_end(run: RunOnDisk, job: Job, *, is_shared: bool) -> JudgedState:
    """The state of a run whose records have an end. Slurm may start the run again, or may know the reason of the end better."""
    verdict, slurm_state = run.verdict, states.translate_state(job.state)
    end_event = next((event for event in reversed(run.events) if event.event == "exited"), None)
    if end_event is None or verdict.state in ("completed", "cancelled"):
        return verdict
    end_reason = end_event.data.get("reason")
    has_begun_again = slurm_state == "running" and job.start_s is not None and job.start_s > end_event.wall_s
    if slurm_state == "pending" or has_begun_again:
        return _judge_waiting(
            job, f"started again by Slurm, after {'Slurm told it to end' if end_reason == TOLD_REASON else verdict.state}"
        )
    if slurm_state == "running" and not is_shared:  # Slurm may start the run again, and does not yet say why the run ended
        return JudgedState("running", f"its job is ending, after {verdict.state}: {verdict.why}")
    if slurm_state == "cancelled" and any(
        event.event == "requeued" and event.wall_s >= end_event.wall_s for event in run.events
    ):
        return JudgedState("cancelled", f"cancelled while it waited to be started again, after {verdict.state}")
    # If the run failed without a recorded reason, the reason for which Slurm ended the job may be the cause. If the job has
    # several runs, the job ended later than this run, so its reason counts only if Slurm told this run to end.
    if verdict.state != "failed" or end_reason not in (None, TOLD_REASON) or (is_shared and end_reason is None):
        return verdict
    if slurm_state not in STATES_ONLY_SLURM_KNOWS:
        return verdict
    return JudgedState(slurm_state, states.CLAUSE_BY_END_STATE[states.extract_state(job.state)])


def _judge_missing(run: RunOnDisk, sending: Event, answer: JobsFound) -> JudgedState:
    """The state of a run whose job is not in Slurm's answer."""
    if run.verdict.state in FINAL_STATES or answer.no_answer_reason or time.time() - sending.wall_s < ACCOUNTING_LAG_S:
        return run.verdict
    verdict, job = _reread_run(run).verdict, str(sending.data["job"])
    if verdict.state in FINAL_STATES:
        return verdict
    array_number, _, task_number = job.partition("_")
    is_array_known = any(
        listed_job.name == sending.data.get("token")
        for listed_id, listed_job in answer.jobs.items()
        if listed_id.startswith(f"{array_number}_")
    )
    if task_number and is_array_known and verdict.state == "pending" and answer.has_accounting:
        return JudgedState(
            "cancelled", f"removed from Slurm's queue: Slurm lists other tasks of the array {array_number}, but not it"
        )
    accounting_clause = f" (its accounting does not answer: {answer.accounting_error})" if answer.accounting_error else ""
    return JudgedState("unknown", f"Slurm does not know its job {job}{accounting_clause}, and the run did not record its end")
