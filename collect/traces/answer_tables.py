"""Prints the tables of `collect trace` that explain why a step takes as long as it does, such as waiting for slow ranks."""

from __future__ import annotations

from collections.abc import Sequence

from collect import notation
from collect.traces.difference import StepDifference
from collect.traces.rank_analysis import RankAnalysis
from collect.traces.run_answers import RunAnswers
from shardlab.terminal.console import Output

SHOWN = 12  # the most rows that a table shows; the JSON document contains all rows
_MS = 1e6  # ns in a millisecond
_NO_CAUSE = "idle time by cause: the traces hold no calls that launch kernels, so the causes are not known."


def show(output: Output, answers: RunAnswers) -> None:
    """Print tables of the collectives by process group, of waiting for slow ranks, of idle time by cause, and of phases.

    If the waiting times or the causes of idle time are not known, a line says so in place of the table.
    """
    _collectives(output, answers)
    _waits(output, answers)
    _idle(output, answers.ranks)
    _phases(output, answers.ranks)


def why(output: Output, run: str, against: str, found: StepDifference) -> None:
    """Print a table that divides the difference in time between two runs into parts. The sum of the parts is the difference.

    run, against: the names of the two runs, for the title of the table.
    """
    more = found.difference_ns
    rows = [
        [
            one.label,
            *(ms(ns) for ns in (one.time_ns, one.against_ns)),
            signed(one.difference_ns),
            share(one.difference_ns, more),
        ]
        for one in found.parts
        if one.difference_ns
    ]
    rows.append([f"whole {found.per}", ms(found.time_ns), ms(found.against_ns), signed(more), share(more, more)])
    faster = "slower" if more > 0 else "faster" if more < 0 else "as fast"
    output.table(
        f"why {run} is {faster} than {against}: mean {found.per}, parts sum to the difference"
        if more
        else f"{run} and {against}: mean {found.per}",
        ["Part", "Time (ms)", "Against (ms)", "Difference (ms)", "Share (%)"],
        rows,
    )


def _collectives(output: Output, answers: RunAnswers) -> None:
    found = answers.collectives
    if not found:
        return
    rows = [
        [
            use.collective,
            use.group.label,
            f"{use.calls:,}",
            "" if use.message_bytes is None else notation.number(use.message_bytes / use.calls / notation.MIB),
            "" if use.sent_bytes is None else notation.number(use.sent_bytes / notation.MIB),
            ms(use.total_ns),
            notation.number(use.total_ns / use.calls / 1000),
            "" if use.transfer_ns is None else notation.number(use.transfer_ns / use.calls / 1000),
            number(use.hidden_pct),
            number(use.algorithm_gb_per_s),
            number(use.bus_gb_per_s),
            number(use.link_gb_per_s),
            number(use.link_pct),
        ]
        for use in found[:SHOWN]
    ]
    columns = [
        "Collective",
        "Process group",
        "Calls (n)",
        "Message (MiB)",
        "Sent (MiB)",
        "Total (ms)",
        "Mean (us)",
        "Transfer (us)",
    ]
    columns += ["Hidden (%)", "Algorithm (GB/s)", "Bus (GB/s)", "Link (GB/s)", "Of link (%)"]
    more = f"; {len(found) - SHOWN} more in --json" if len(found) > SHOWN else ""
    output.table(f"collectives by process group, all ranks together{more}", columns, rows)
    if any(use.message_bytes is None for use in found):
        output.line("blank bandwidth: the trace does not record the elements or the process group of each call.")


def _waits(output: Output, answers: RunAnswers) -> None:
    found = answers.waits
    if found.why:
        if answers.collectives:
            output.line(f"waiting for slow ranks: not known, because {found.why}.")
        return
    rows = [
        [
            str(one.rank),
            f"{one.calls:,}",
            f"{one.last:,}",
            ms(one.waited_ns),
            ms(one.lost_ns),
            number(one.lost_pct),
            ms(one.caused_ns),
        ]
        for one in found.ranks
    ]
    slowest = found.straggler
    tail = f"; rank {slowest.rank} lets the others wait the longest" if slowest else ""
    output.table(
        f"waiting for slow ranks: {number(found.lost_pct)} % of the time is lost{tail}",
        ["Rank", "Calls (n)", "Started last (n)", "Waited (ms)", "Lost (ms)", "Lost (%)", "Others waited for it (ms)"],
        rows,
    )
    if found.unmatched:
        output.line(f"{found.unmatched:,} calls are not matched over ranks: the ranks of the group called others in that step.")


def _idle(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    known = [(one, one.idle) for one in ranks if one.idle is not None]
    if not known:
        if any(one.idle_ns for one in ranks):
            output.line(_NO_CAUSE)
        return
    rows = [
        [
            "" if one.rank is None else str(one.rank),
            ms(one.idle_ns),
            ms(idle.host_ns),
            ms(idle.communication_ns),
            ms(idle.other_ns),
            *(
                ["", ""]
                if one.launches is None
                else [notation.number(ns / 1000) for ns in (one.launches.median_ns, one.launches.longest_ns)]
            ),
        ]
        for one, idle in known
    ]
    columns = ["Rank", "Idle (ms)", "Host launched nothing (ms)", "Waiting for communication (ms)", "Other (ms)"]
    output.table("idle time by cause", [*columns, "Launch delay, median (us)", "longest (us)"], rows)


def _phases(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    rows = [
        ["" if one.rank is None else str(one.rank), time.phase]
        + [ms(ns) for ns in (time.host_ns, time.device_ns, time.compute_ns, time.communication_ns)]
        for one in ranks
        for time in one.phases
    ]
    if rows:
        columns = ["Rank", "Phase", "Host (ms)", "GPU (ms)", "Compute (ms)", "Communication (ms)"]
        output.table("phases of the steps, by what launched the work", columns, rows)


def ms(ns: float | None) -> str:
    """A time in nanoseconds as a text in milliseconds; "" for None, which means that the time is not known."""
    return "" if ns is None else notation.number(ns / _MS)


def signed(ns: int) -> str:
    """A difference in nanoseconds as a text in milliseconds, with + in front of a positive number."""
    return f"{'+' if ns > 0 else ''}{notation.number(ns / _MS)}"


def share(part: int, whole: int) -> str:
    """A part of a difference in percent of the whole difference; "" if the whole difference is 0."""
    return notation.number(100 * part / whole, 3) if whole else ""


def number(value: float | None) -> str:
    """A number as text for a table, with four digits; "" for None, which means that the number is not known."""
    return "" if value is None else notation.number(value, 4)
