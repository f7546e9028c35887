"""The states of a run, and how the state of a run follows from its events. The state `unknown` never counts as success."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import msgspec

from shardlab.matrix.faults import ENDED_ON_PURPOSE
from shardlab.runs.record import Event

STATES = {
    "planned": "rendered, not sent",
    "pending": "sent, waiting for its turn",
    "running": "its ranks are at work",
    "completed": "exit code 0, a result, and every step asked for",
    "oom": "ran out of memory, on a GPU or on the host",
    "timeout": "ended at its time limit",
    "failed": "ended with an error",
    "cancelled": "ended by a person",
    "node_fail": "a machine failed or restarted while it ran",
    "preempted": "ended by the scheduler in favour of another job",
    "hung": "made no progress for its hang limit and was ended",
    "unknown": "its records are damaged, or contradict the scheduler",
}
SENDING = ("submitting", "submitted", "refused")  # events of a submission; refused: the scheduler or a node rejected the run
HOLDING = ("held", "released")  # held: the run must not start before a person releases it; released: it may start again
TOLD = "told"  # the reason of an end: Slurm told the run to end, and only Slurm knows why
ENDED_IN_SLURM = "ended_in_slurm"  # the event with which a command records a final state that it learnt from Slurm
# The event of a node: the kernel's OOM killer ended a process of the machine, and it is not known whether of this run.
OOM_ON_MACHINE = "oom_on_machine"
STARTS_AND_ENDS = ("started", "exited")
FINAL = frozenset(STATES) - {"planned", "pending", "running", "unknown"}  # the states in which a run can end


class JudgedState(msgspec.Struct, frozen=True):
    """The state of a run, one of STATES."""

    state: str
    why: str = ""
    """The reason for the state, as a sentence; empty if there is nothing to explain."""
    held: bool = False
    """Whether the run, which is pending or planned, starts only after a person releases it."""


def judge(events: Sequence[Event], *, has_result: bool, steps: int, steps_asked: int | None) -> JudgedState:
    """The state of a run according to its own events. `jobs` combines this state with what the scheduler reports.

    events: the events of the run, of all processes that write events.
    has_result: whether result.json of the run exists.
    steps: the number of timed steps that every rank has recorded.
    steps_asked: the number of timed steps that the run must have; None: not known, because the length of the run is given in
    epochs and there is no result.json, which would contain the number.
    """
    if (learnt := find_learnt_end(events)) is not None:
        return learnt
    ordered = sorted(events, key=lambda e: e.wall_s)
    # If the ranks were started again in the same folder, only the events since the last start count.
    starts = [position for position, event in enumerate(ordered) if event.event == "started"]
    ordered = ordered[starts[-1] :] if len(starts) > 1 else ordered
    by_name = {event.event: event for event in ordered}
    # If several ranks failed, the first failure is the reason: the other ranks failed because the first failed rank had ended.
    by_name.update({event.event: event for event in reversed(ordered) if event.event == "failed"})
    exited = by_name.get("exited")
    if exited is None:
        if "cancelled" in by_name:
            return JudgedState("cancelled", "cancelled before it started")
        last_event, hold = find_last_sending(ordered), _find_last_hold(ordered)
        is_unsent = last_event is None or last_event.event == "refused"
        if (
            last_event is not None
            and is_unsent
            and "started" not in by_name
            and (hold is None or hold.wall_s < last_event.wall_s)
        ):
            return JudgedState("planned", str(last_event.data.get("why", "")))
        if hold is not None and "started" not in by_name:
            # A run that the scheduler does not have is held because of the lease. A run in the scheduler's queue is held
            # because packages changed.
            return JudgedState("planned" if is_unsent else "pending", str(hold.data.get("why", "")), held=True)
        for name, state in (("started", "running"), *((name, "pending") for name in SENDING), ("rendered", "planned")):
            if name in by_name:
                waiting_event = by_name.get("waiting") if name == "started" and "met" not in by_name else None
                return JudgedState(state, f"waits: {waiting_event.data.get('why', '')}" if waiting_event else "")
        return JudgedState("unknown", "no event says that it was rendered")
    return _judge_ended(by_name, exited, has_result, steps, steps_asked)


def find_learnt_end(events: Sequence[Event]) -> JudgedState | None:
    """The final state of a run that a command learnt from Slurm and recorded; None if there is none, or if the run has started
    or recorded its end since. events: the events of the run.

    The event holds how many starts and ends the run had, because the clocks of nodes differ from the clock of the command.
    """
    records = count_starts_and_ends(events)
    learnt = [event for event in events if event.event == ENDED_IN_SLURM and event.data.get("records") == records]
    data = max(learnt, key=lambda event: event.wall_s).data if learnt else {}
    state = str(data.get("state"))
    return JudgedState(state, str(data.get("why", ""))) if state in FINAL - {"completed"} else None


def drop_learnt_ends(events: Sequence[Event]) -> list[Event]:
    """The events of a run without the final states that were learnt from Slurm."""
    return [event for event in events if event.event != ENDED_IN_SLURM]


def count_starts_and_ends(events: Sequence[Event]) -> int:
    """How often the supervisors of a run recorded a start or an end. events: the events of the run."""
    return sum(event.event in STARTS_AND_ENDS for event in events)


def _find_last_hold(ordered: Sequence[Event]) -> Event | None:
    """The last event `held` of a run; None if the run was never held, or if it was released after this event.

    ordered: the events of the run, sorted by time.
    """
    last = next((event for event in reversed(ordered) if event.event in HOLDING), None)
    return last if last is not None and last.event == "held" else None


def find_last_sending(ordered: Sequence[Event]) -> Event | None:
    """The last event of the kinds SENDING, which says whether the run is in the scheduler; None if there is no such event.

    ordered: the events of the run, sorted by time. The node that writes `refused` and the controller that writes `submitted`
    have different clocks, so the order of these two events may be wrong. Each submission has a token. If both events contain a
    token, `refused` counts only for the submission with the same token, and the times are ignored.
    """
    sending = [event for event in ordered if event.event in SENDING]
    sent_index, sent_event = next(((i, e) for i, e in reversed(list(enumerate(sending))) if e.event != "refused"), (-1, None))
    token = sent_event.data.get("token") if sent_event is not None else None

    def is_of_sent(position: int, refused_event: Event) -> bool:
        refused_token = refused_event.data.get("token")
        return refused_token == token if refused_token and token else position > sent_index

    refusals = [event for i, event in enumerate(sending) if event.event == "refused" and is_of_sent(i, event)]
    return refusals[-1] if refusals else sent_event


def sent_job(sending: Event | None) -> tuple[str, str]:
    """(job, token) of a run in Slurm, the job as `name_job` names it; two empty texts if it has none. sending: from
    `find_last_sending`."""
    data = sending.data if sending is not None else {}
    return (name_job(data["job"], data.get("cluster")), data["token"]) if data.get("job") and data.get("token") else ("", "")


def name_job(number: str, cluster: str | None) -> str:
    """The name of a job of Slurm for people and for our own commands, such as `101`, or `cm4:101` if it was submitted to a
    cluster that is not the default. Each cluster numbers its own jobs."""
    return number if cluster is None else f"{cluster}:{number}"


def _judge_ended(
    by_name: dict[str, Event], exited: Event, has_result: bool, steps: int, steps_asked: int | None
) -> JudgedState:
    reason, code = exited.data.get("reason"), exited.data.get("code")
    purpose_text = str(by_name[ENDED_ON_PURPOSE].data.get("why", "")) if ENDED_ON_PURPOSE in by_name else ""
    if reason in FINAL - {"completed"}:
        return JudgedState(str(reason), str(exited.data.get("why", "")))
    if code == 0:
        if not has_result:
            return JudgedState("failed", "exit code 0, but there is no result.json")
        if steps_asked is None or steps < steps_asked:
            return JudgedState("failed", f"exit code 0, but {steps} steps are recorded of {steps_asked or 'an unknown number'}")
        return JudgedState("completed", purpose_text)
    if "oom" in by_name:
        return JudgedState("oom", str(by_name["oom"].data.get("why", "out of memory")))
    if "timeout" in by_name and reason != TOLD:  # ranks that Slurm tells to end save a checkpoint as at a time limit
        return JudgedState("timeout", str(by_name["timeout"].data.get("why", "")))
    if purpose_text:  # the other ranks failed because this rank was gone
        return JudgedState("failed", purpose_text)
    # The supervisor knows why a rank that was killed wrote nothing; the other ranks only saw that it was gone.
    reasons = (event.data.get("why") for event in (exited, by_name.get("failed")) if event is not None)
    why = str(next(filter(None, reasons), _describe_exit_code(code)))
    return JudgedState("failed", f"{why}; {by_name[OOM_ON_MACHINE].data.get('why')}" if OOM_ON_MACHINE in by_name else why)


def _describe_exit_code(code: object) -> str:
    """An exit code, with the name of the signal that ended the process if the exit code is 128 + the number of a signal."""
    names = [f" ({number.name})" for number in signal.Signals if isinstance(code, int) and number == code - 128]
    return f"exit code {code}{''.join(names)}"
