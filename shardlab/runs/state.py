"""The states of a run, and how the state of a run follows from its events. The state `unknown` never counts as success.

Others write these events: that memory ran out is seen by a rank (trainers/ranks/out_of_memory.py), by the job's own counter
(jobs/node/node_processes.py), or told by Slurm (jobs/slurm/states.py).
Why the command of a user failed is said by jobs/node/command_rank.py.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import msgspec

from shardlab.matrix.faults import ENDED_ON_PURPOSE
from shardlab.runs.record import Event

STATE_MEANINGS = {
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
    "imported": "made from logs of another program by `collect import`; nothing proves that it completed",
    "unknown": "its records are damaged, or contradict the scheduler",
}
# events of a submission; refused: the scheduler or a node rejected the run
SENDING_EVENTS = ("submitting", "submitted", "refused")
HOLDING_EVENTS = ("held", "released")  # held: the run must not start before a person releases it; released: it may start again
TOLD_REASON = "told"  # the reason of an end: Slurm told the run to end, and only Slurm knows why
ENDED_IN_SLURM = "ended_in_slurm"  # the event with which a command records a final state that it learnt from Slurm
# The event of a node: the kernel's OOM killer ended a process of the machine, and it is not known whether of this run.
OOM_ON_MACHINE = "oom_on_machine"
IMPORTED = "imported"  # the only event of a run that was made from logs of another program, and the state of the run
STARTS_AND_ENDS = ("started", "exited")
FINAL_STATES = frozenset(STATE_MEANINGS) - {"planned", "pending", "running", "unknown"}  # the states in which a run can end


class JudgedState(msgspec.Struct, frozen=True):
    """The state of a run, one of STATE_MEANINGS."""

    state: str
    why: str = ""
    """The reason for the state, as a sentence; empty if there is nothing to explain."""
    held: bool = False
    """Whether the run, which is pending or planned, starts only after a person releases it."""


def judge(events: Sequence[Event], *, has_result: bool, steps: int, required_steps: int | None) -> JudgedState:
    """The state of a run according to its own events. `jobs` combines this state with what the scheduler reports.

    events: the events of the run, of all processes that write events.
    has_result: whether result.json of the run exists.
    steps: the number of timed steps that every rank has recorded.
    required_steps: the number of timed steps that the run must have; None: not known, because the length of the run is given in
    epochs and there is no result.json, which would contain the number.
    """
    if [event.event for event in events] == [IMPORTED]:
        return JudgedState(IMPORTED, str(events[0].data.get("why", "")))
    if (learnt_end := find_learnt_end(events)) is not None:
        return learnt_end
    ordered_events = sorted(events, key=lambda e: e.wall_s)
    # If the ranks were started again in the same folder, only the events since the last start count.
    start_positions = [position for position, event in enumerate(ordered_events) if event.event == "started"]
    ordered_events = ordered_events[start_positions[-1] :] if len(start_positions) > 1 else ordered_events
    event_by_name = {event.event: event for event in ordered_events}
    # If several ranks failed, the first failure is the reason: the other ranks failed because the first failed rank had ended.
    event_by_name.update({event.event: event for event in reversed(ordered_events) if event.event == "failed"})
    exited_event = event_by_name.get("exited")
    if exited_event is None:
        if "cancelled" in event_by_name:
            return JudgedState("cancelled", "cancelled before it started")
        last_event, last_hold = find_last_sending(ordered_events), _find_last_hold(ordered_events)
        is_unsent = last_event is None or last_event.event == "refused"
        if (
            last_event is not None
            and is_unsent
            and "started" not in event_by_name
            and (last_hold is None or last_hold.wall_s < last_event.wall_s)
        ):
            return JudgedState("planned", str(last_event.data.get("why", "")))
        if last_hold is not None and "started" not in event_by_name:
            # A run that the scheduler does not have is held because of the lease. A run in the scheduler's queue is held
            # because packages changed.
            return JudgedState("planned" if is_unsent else "pending", str(last_hold.data.get("why", "")), held=True)
        for name, state in (("started", "running"), *((name, "pending") for name in SENDING_EVENTS), ("rendered", "planned")):
            if name in event_by_name:
                waiting_event = event_by_name.get("waiting") if name == "started" and "met" not in event_by_name else None
                return JudgedState(state, f"waits: {waiting_event.data.get('why', '')}" if waiting_event else "")
        return JudgedState("unknown", "no event says that it was rendered")
    return _judge_ended(event_by_name, exited_event, has_result, steps, required_steps)


def find_learnt_end(events: Sequence[Event]) -> JudgedState | None:
    """The final state of a run that a command learnt from Slurm and recorded; None if there is none, or if the run has started
    or recorded its end since. events: the events of the run.

    The event holds how many starts and ends the run had, because the clocks of nodes differ from the clock of the command.
    """
    record_count = count_starts_and_ends(events)
    learnt_events = [event for event in events if event.event == ENDED_IN_SLURM and event.data.get("records") == record_count]
    end_data = max(learnt_events, key=lambda event: event.wall_s).data if learnt_events else {}
    state_name = str(end_data.get("state"))
    return JudgedState(state_name, str(end_data.get("why", ""))) if state_name in FINAL_STATES - {"completed"} else None


def drop_learnt_ends(events: Sequence[Event]) -> list[Event]:
    """The events of a run without the final states that were learnt from Slurm."""
    return [event for event in events if event.event != ENDED_IN_SLURM]


def count_starts_and_ends(events: Sequence[Event]) -> int:
    """How often the supervisors of a run recorded a start or an end. events: the events of the run."""
    return sum(event.event in STARTS_AND_ENDS for event in events)


def _find_last_hold(ordered_events: Sequence[Event]) -> Event | None:
    """The last event `held` of a run; None if the run was never held, or if it was released after this event.

    ordered_events: the events of the run, sorted by time.
    """
    last_holding = next((event for event in reversed(ordered_events) if event.event in HOLDING_EVENTS), None)
    return last_holding if last_holding is not None and last_holding.event == "held" else None


def find_last_sending(ordered_events: Sequence[Event]) -> Event | None:
    """The last event of the kinds SENDING_EVENTS, which says whether the run is in the scheduler; None if there is none.

    ordered_events: the events of the run, sorted by time. The node that writes `refused` and the controller that writes
    `submitted` have different clocks, so the order of these two events may be wrong. Each submission has a token. If both
    events contain a token, `refused` counts only for the submission with the same token, and the times are ignored."""
    sending_events = [event for event in ordered_events if event.event in SENDING_EVENTS]
    sent_index, sent_event = next(
        ((i, e) for i, e in reversed(list(enumerate(sending_events))) if e.event != "refused"), (-1, None)
    )
    sent_token = sent_event.data.get("token") if sent_event is not None else None

    def is_of_sent(position: int, refused_event: Event) -> bool:
        refused_token = refused_event.data.get("token")
        return refused_token == sent_token if refused_token and sent_token else position > sent_index

    refusals = [event for i, event in enumerate(sending_events) if event.event == "refused" and is_of_sent(i, event)]
    return refusals[-1] if refusals else sent_event


def find_sent_job(sending_event: Event | None) -> tuple[str, str]:
    """(job, token) of a run in Slurm, the job as `name_job` names it; two empty texts if it has none. sending_event: from
    `find_last_sending`."""
    data = sending_event.data if sending_event is not None else {}
    return (name_job(data["job"], data.get("cluster")), data["token"]) if data.get("job") and data.get("token") else ("", "")


def name_job(job_number: str, cluster: str | None) -> str:
    """The name of a job of Slurm for people and for our own commands, such as `101`, or `cm4:101` if it was submitted to a
    cluster that is not the default. Each cluster numbers its own jobs."""
    return job_number if cluster is None else f"{cluster}:{job_number}"


def _judge_ended(
    event_by_name: dict[str, Event], exited_event: Event, has_result: bool, steps: int, required_steps: int | None
) -> JudgedState:
    end_reason, exit_code = exited_event.data.get("reason"), exited_event.data.get("code")
    purpose_text = str(event_by_name[ENDED_ON_PURPOSE].data.get("why", "")) if ENDED_ON_PURPOSE in event_by_name else ""
    if end_reason in FINAL_STATES - {"completed"}:
        return JudgedState(str(end_reason), str(exited_event.data.get("why", "")))
    if exit_code == 0:
        if not has_result:
            return JudgedState("failed", "exit code 0, but there is no result.json")
        if required_steps is None or steps < required_steps:
            return JudgedState(
                "failed", f"exit code 0, but {steps} steps are recorded of {required_steps or 'an unknown number'}"
            )
        return JudgedState("completed", purpose_text)
    if "oom" in event_by_name:
        return JudgedState("oom", str(event_by_name["oom"].data.get("why", "out of memory")))
    # Ranks that Slurm tells to end save a checkpoint as at a time limit.
    if "timeout" in event_by_name and end_reason != TOLD_REASON:
        return JudgedState("timeout", str(event_by_name["timeout"].data.get("why", "")))
    if purpose_text:  # the other ranks failed because this rank was gone
        return JudgedState("failed", purpose_text)
    # The supervisor knows why a rank that was killed wrote nothing; the other ranks only saw that it was gone.
    recorded_reasons = (event.data.get("why") for event in (exited_event, event_by_name.get("failed")) if event is not None)
    why = str(next(filter(None, recorded_reasons), _describe_exit_code(exit_code)))
    return JudgedState(
        "failed", f"{why}; {event_by_name[OOM_ON_MACHINE].data.get('why')}" if OOM_ON_MACHINE in event_by_name else why
    )


def _describe_exit_code(exit_code: object) -> str:
    """An exit code, with the name of the signal that ended the process if the exit code is 128 + the number of a signal."""
    names = [f" ({number.name})" for number in signal.Signals if isinstance(exit_code, int) and number == exit_code - 128]
    return f"exit code {exit_code}{''.join(names)}"
