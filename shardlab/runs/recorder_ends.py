"""Sentences about the sampler and the tracker of a run (processes that record the run beside its ranks) that ended too
early."""

from __future__ import annotations

from collections.abc import Iterable

from shardlab.runs.record import SAMPLER_ENDED, TRACKER_ENDED, Event


def describe_early_ends(events: Iterable[Event]) -> list[str]:
    """A clause for each host whose sampler ended while the run went on, and a clause if the tracker ended early.

    events: the events of one run, sorted by time. The state of the run does not change if one of these processes ends early,
    but telemetry or logged values are missing.
    """
    ends_by_host: dict[str, list[Event]] = {}
    tracker_end: Event | None = None
    for event in events:
        if event.event == SAMPLER_ENDED:
            ends_by_host.setdefault(event.host, []).append(event)
        elif event.event == TRACKER_ENDED:
            tracker_end = event
    clauses = []
    for host, end_events in ends_by_host.items():
        count_text = f"{len(end_events)} times" if len(end_events) > 1 else "once"
        clauses.append(
            f"the sampler of {host} ended {count_text} while the run went on{_format_exit_code(end_events[-1])}: "
            f"see log/sampler.{host}.log"
        )
    if tracker_end is not None:
        clauses.append(f"the tracker ended early{_format_exit_code(tracker_end)}: see log/tracker.log")
    return clauses


def _format_exit_code(event: Event) -> str:
    """The exit code in the event, in brackets; "" if the event has no code. A negative code stands for the signal that ended
    the process."""
    exit_code = event.data.get("code")
    return f" (exit code {exit_code})" if type(exit_code) is int else ""
