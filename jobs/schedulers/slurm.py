"""A Slurm cluster as a scheduler: like runs go as one array, one question tells of all, and nothing is sent twice."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from jobs import claim, scripts
from jobs.scheduler import Full, How, Own, Seen
from jobs.slurm import query, states, submission
from jobs.slurm.commands import Away, call, number
from jobs.slurm.query import Found, Job
from jobs.slurm.submission import Kind, Submission
from shardlab import files
from shardlab.errors import ShardlabError
from shardlab.record import Event
from shardlab.rundir import RunDir
from shardlab.state import FINAL, Verdict, last_sending
from shardlab.workspace import Workspace

NAME = "slurm"
TEMPLATE = "launch/slurm.sbatch.j2"
SCRIPT = "job.sbatch"
POLL_S = 5.0  # the controller is everybody's
TOGETHER = {"array": "launch/slurm_array.sbatch.j2", "pack": "launch/slurm_pack.sbatch.j2"}
TEMPLATES = (TEMPLATE, *TOGETHER.values())
# A limit counts the tasks of an array: of one that is over it, so small a part is tried next, and in the end a single run.
CUT = 4
# The accounts lag behind by so much at most before a job that they do not know is one that is not there.
LAG_S = 120.0
# Ends that a run's own records may show as a failure without a reason.
TOLD_OF = ("oom", "node_fail", "preempted", "cancelled", "timeout")
_OPTION = "#SBATCH "
_TIME = re.compile(r"^--time=(\d+)$")


def submit(workspace: Workspace, folders: Sequence[RunDir], how: How) -> None:
    """Raises Refused, Away, and Full once it has no room for a single one more."""
    before = _unended(workspace, how.after)
    largest = len(folders) if how.pack or len(folders) == 1 else max(1, number("MaxArraySize", 1001))
    left = _alike(folders)
    while left:
        alike = left[0]
        part = alike if how.pack else alike[:largest]
        try:
            job = _send(workspace, part, how, before)
        except submission.NoRoom as none:
            if how.pack or len(part) == 1:
                raise Full("Slurm", none.why, [folder for group in left for folder in group]) from None
            largest = max(1, len(part) // CUT)
            continue
        left[:1] = [rest] if (rest := alike[len(part) :]) else []
        if how.at_once is not None and job is not None:
            before = [job]  # jobs that ask for other things wait for each other, or more would run at once


def resolve(workspace: Workspace) -> list[str]:
    sentences = []
    for one in submission.interrupted(workspace):
        try:
            sentences.append(submission.settle(workspace, one))
        except submission.NoRoom as none:
            sentences.append(f"{one.token}: had not come to be, and Slurm takes no more for now ({none.why}).")
        except submission.Refused as refused:
            sentences.append(f"{one.token}: this job was never created. {refused}")
    return sentences


def damaged(workspace: Workspace) -> list[str]:
    return submission.damaged(workspace)


def observe(workspace: Workspace, runs: Sequence[Own]) -> list[Seen]:
    notes = [_note(one.events) for one in runs]
    masters = sorted({str(note.data["job"]).split("_")[0] for note in notes if note is not None and note.data.get("job")})
    since = min((note.wall_s for note in notes if note is not None), default=0.0)
    found = query.of(masters, since, _at_work(runs, notes))
    packs = _packs_at_work(workspace) if any(note is not None and note.data.get("kind") == "pack" for note in notes) else set()
    is_open = any(note is not None and note.event == "submitting" for note in notes)
    unreadable = submission.unreadable(workspace) if is_open else {}
    seen = []
    for one, note in zip(runs, notes, strict=True):
        told = _seen(one, note, found, unreadable)
        seen.append(msgspec.structs.replace(told, leftover=told.id not in packs and _is_leftover(one, found.jobs.get(told.id))))
    return seen


def _is_leftover(one: Own, job: Job | None) -> bool:
    """Whether Slurm still has a job to start for a run that has ended for good.

    Slurm requeues the job of a completed run if it lost a node, or its own controller lost contact, before it noted the end.
    """
    return (
        job is not None
        and one.verdict.state in ("completed", "cancelled")
        and job.name in {event.data.get("token") for event in one.events if event.event == "submitted"}
        and states.ours(job.state) == "pending"
    )


def _packs_at_work(workspace: Workspace) -> set[str]:
    """The jobs that hold several runs, of which some have not ended."""
    return {one.job for one in submission.all_of(workspace) if one.kind == "pack" and one.job and _unfinished(workspace, one)}


def _at_work(runs: Sequence[Own], notes: Sequence[Event | None]) -> set[str]:
    """While any run waits or is at work: the numbers of all whose state takes Slurm's word, as it does but of a good end."""
    if all(one.verdict.state in FINAL for one in runs):
        return set()
    return {
        str(note.data["job"])
        for one, note in zip(runs, notes, strict=True)
        if note is not None and note.data.get("job") and one.verdict.state not in ("completed", "cancelled")
    }


def cancel(workspace: Workspace, runs: Sequence[Own]) -> None:
    """Raises Away if Slurm could not be told to cancel the jobs; the runs are marked as cancelled all the same."""
    ended = {one.run.run_id for one in runs}
    whole = {one.job for one in submission.all_of(workspace) if one.kind == "pack" and ended >= _unfinished(workspace, one)}
    jobs: list[str] = []
    for one in runs:
        note = _note(one.events)
        if one.verdict.state not in ("planned", "pending") or not claim.withhold(one.folder):
            one.folder.write_event("controller", "cancel_requested")
        job = note.data.get("job") if note is not None else None
        # Of a packed allocation the other runs go on: a run at work in it ends by its own supervisor, which looks for the word.
        if note is not None and job is not None and (note.data.get("kind") != "pack" or job in whole):
            jobs.append(str(job))
    jobs = list(dict.fromkeys(jobs))
    for begin in range(0, len(jobs), 500):
        answer = call(["scancel", *jobs[begin : begin + 500]])
        if answer.code != 0 and query.is_away(answer):
            raise Away(
                answer.says,
                "The runs are marked as cancelled in the workspace: none of them starts any more, and those at work end by "
                "themselves. Their jobs may stay in Slurm's queue; the same command cancels them when Slurm is back.",
            )


def cancel_jobs(jobs: Sequence[str]) -> str:
    answer = call(["scancel", *jobs])
    return "" if answer.code == 0 else answer.says


def _unfinished(workspace: Workspace, one: Submission) -> set[str]:
    """The runs of a submission that have not ended, by their own records; one that cannot be read counts as such."""
    return {run for run in one.runs if not _has_ended(RunDir(workspace.runs / run))}


def _has_ended(folder: RunDir) -> bool:
    try:
        return folder.judge().state in FINAL
    except ShardlabError:
        return False


def attend(workspace: Workspace) -> None:
    """Slurm needs nobody who waits."""


def _unended(workspace: Workspace, runs: Sequence[str]) -> list[str]:
    """The numbers of the jobs of runs that have not ended: one that Slurm has forgotten would be no condition at all."""
    found: dict[str, None] = {}
    for run in runs:
        folder = RunDir(workspace.runs / run)
        note = _note(folder.events())
        if not _has_ended(folder) and note is not None and note.data.get("job"):
            found[str(note.data["job"])] = None
    return list(found)


def _alike(folders: Sequence[RunDir]) -> list[list[RunDir]]:
    """Runs apart by what they ask for, in the order in which they came."""
    found: dict[tuple[str, ...], list[RunDir]] = {}
    for folder in folders:
        found.setdefault(_asked(folder), []).append(folder)
    return list(found.values())


def _asked(folder: RunDir) -> tuple[str, ...]:
    """The options in a run's script, which sbatch reads up to the first line that is neither comment nor empty: below it stands
    the name of the folder, with whatever lines are in it."""
    lines = itertools.takewhile(
        lambda line: not line.strip() or line.lstrip().startswith("#"), (folder.path / SCRIPT).read_text().split("\n")
    )
    return tuple(line.removeprefix(_OPTION).strip() for line in lines if line.startswith(_OPTION))


def _send(workspace: Workspace, folders: Sequence[RunDir], how: How, before: Sequence[str]) -> str | None:
    """Send runs that ask for the same as one job that waits for those before; its number."""
    first = folders[0].read_run()
    kind: Kind = "one" if len(folders) == 1 else "pack" if how.pack else "array"
    token = submission.token(folders[0].run_id if kind == "one" else first.matrix)
    own = submission.folder(workspace) / token
    options: list[str] = []
    if kind == "one":
        script = folders[0].path / SCRIPT
        options.append(f"--output={_literal(folders[0].log)}/slurm-%j.out")
    else:
        asked = _asked(folders[0])
        if kind == "pack":
            asked = tuple(_TIME.sub(lambda match: f"--time={int(match[1]) * len(folders)}", option) for option in asked)
        files.make_folder(own)
        script = own / f"{kind}.sbatch"
        text = scripts.render(
            TOGETHER[kind], workspace.own_templates, options=asked, folders=[str(one.path) for one in folders], script=SCRIPT
        )
        files.write_atomic(script, text.encode(), mode=0o755)
        options.append(f"--output={_literal(own)}/slurm-%{'a' if kind == 'array' else 'j'}.out")
    if kind == "array":
        throttle = f"%{how.at_once}" if how.at_once is not None and how.at_once < len(folders) else ""
        options.append(f"--array=0-{len(folders) - 1}{throttle}")
    options += [f"--dependency=afterany:{':'.join(before)}"] if before else []
    one = Submission(
        token=token,
        kind=kind,
        runs=[folder.run_id for folder in folders],
        script=str(script),
        options=options,
        created_s=time.time(),
    )
    submission.intend(workspace, one)
    submission.send(workspace, one)
    return one.job


def _literal(path: Path) -> str:
    """A path in one of Slurm's patterns of file names."""
    return str(path).replace("%", "%%")


def _note(events: Sequence[Event]) -> Event | None:
    """The last word on which job a run is."""
    return last_sending(events)


def _seen(one: Own, note: Event | None, found: Found, unreadable: Mapping[str, str]) -> Seen:
    """unreadable: why submission files cannot be read, by token. Nobody finds out whether their jobs exist."""
    if note is None or note.event == "refused":
        return Seen(one.verdict, "-", "-")
    job_id = note.data.get("job")
    if job_id is None:
        if one.verdict.state == "pending" and (why := unreadable.get(str(note.data.get("token")))):
            return Seen(Verdict("unknown", f"{why}; `jobs status` says what to do"), "-", "not known to be sent")
        return Seen(one.verdict, "-", "not known to be sent: `jobs submit` finds out")
    job = found.jobs.get(job_id)
    if job is not None and job.name != note.data.get("token"):
        job = None  # a number that Slurm has given out again
    if job is None:
        raw = f"Slurm does not answer: {found.why_not}" if found.why_not else "-"
        return Seen(_missing(one, note, found), job_id, raw)
    raw = f"{job.state} ({job.reason})" if job.reason and states.ours(job.state) == "pending" else job.state
    if found.why_not:
        raw = f"{raw} by the accounts; the controller does not answer: {found.why_not}"
    if one.verdict.state in FINAL and found.why_not and states.ours(job.state) == "running":
        return Seen(one.verdict, job_id, raw)  # the accounts may lag behind the end that is on record
    if one.verdict.state not in FINAL and states.ours(job.state) not in ("pending", "running"):
        one = _again(one)
    return Seen(_together(one, job, shared=note.data.get("kind") == "pack"), job_id, raw)


def _again(one: Own) -> Own:
    """A run read once more: it may have written its end between the first look and the question to Slurm."""
    events = one.folder.events()
    return Own(one.folder, one.run, events, *one.folder.told(events, one.run))


def _together(one: Own, job: Job, *, shared: bool) -> Verdict:
    """The run's records and Slurm's word. Records know best how a run ended; Slurm knows why records stop, and why a run was
    told to end. shared: the job is that of other runs as well."""
    own, theirs = one.verdict, states.ours(job.state)
    state = states.word(job.state)
    started = any(event.event == "started" for event in one.events)
    if own.state in FINAL:
        return _after_an_end(one, job, shared=shared)
    if theirs == "pending":
        return Verdict("pending", "started again by Slurm" if started else "")
    if theirs == "running":
        waits = "waits for its turn in its job" if shared else "its job is starting"
        return Verdict("running") if started or own.state == "running" else Verdict("pending", waits)
    if theirs == "unknown":
        return Verdict("unknown", f"Slurm says {job.state}")
    if theirs in ("completed", "failed"):
        if not started:
            return Verdict("failed", f"its job ended ({job.state}) before the run started; see log/slurm-*.out")
        why = f"its job ended ({job.state}), but the run wrote no end"
        return Verdict("failed" if theirs == "failed" else "unknown", why)
    return Verdict(theirs, states.WHY[state])


def _after_an_end(one: Own, job: Job, *, shared: bool) -> Verdict:
    """Of a run whose records have an end: whether that was its last, and whether Slurm knows better why it came."""
    own, theirs = one.verdict, states.ours(job.state)
    ended = next((event for event in reversed(one.events) if event.event == "exited"), None)
    if ended is None or own.state in ("completed", "cancelled"):
        return own
    reason = ended.data.get("reason")
    begun_since = theirs == "running" and job.start_s is not None and job.start_s > ended.wall_s
    if theirs == "pending" or begun_since:
        return Verdict("pending", f"started again by Slurm, after {'it told it to end' if reason == 'told' else own.state}")
    if theirs == "running" and not shared:  # it may be started again, and Slurm has yet to say why it ended
        return Verdict("running", f"its job is ending, after {own.state}: {own.why}")
    if theirs == "cancelled" and any(event.event == "requeued" and event.wall_s >= ended.wall_s for event in one.events):
        return Verdict("cancelled", f"cancelled while it waited to go on, after {own.state}")
    # A failure without a reason of its own may be of what ended the job. What else happens to a job of several runs was after
    # this one, unless this one was told to end.
    if own.state != "failed" or reason not in (None, "told") or (shared and reason is None):
        return own
    return Verdict(theirs, states.WHY[states.word(job.state)]) if theirs in TOLD_OF else own


def _missing(one: Own, note: Event, found: Found) -> Verdict:
    """A run whose job Slurm does not show."""
    if one.verdict.state in FINAL or not found.complete or time.time() - note.wall_s < LAG_S:
        return one.verdict
    own = _again(one).verdict
    if own.state in FINAL:
        return own
    return Verdict("unknown", f"Slurm does not know its job {note.data['job']}, and the run wrote no end")
