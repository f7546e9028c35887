"""Prints the tables of `collect trace` that explain why a step takes as long as it does, such as waiting for slow ranks."""

from __future__ import annotations

from collections.abc import Sequence

from collect import notation
from collect.traces.difference import StepDifference
from collect.traces.rank_analysis import RankAnalysis
from collect.traces.run_answers import RunAnswers
from shardlab.terminal.console import Output

MOST_ROWS = 12  # the most rows that a table shows; the JSON document contains all rows
_MS = 1e6  # ns in a millisecond
_NO_CAUSE = "idle time by cause: the traces hold no calls that launch kernels, so the causes are not known."


def print_answer_tables(output: Output, answers: RunAnswers) -> None:
    """Print tables of the collectives by process group, of waiting for slow ranks, of idle time by cause, and of phases.

    If the waiting times or the causes of idle time are not known, a line says so in place of the table.
    """
    _print_collectives(output, answers)
    _print_waits(output, answers)
    _print_idle_causes(output, answers.ranks)
    _print_phases(output, answers.ranks)


def print_step_difference(output: Output, run: str, against: str, step: StepDifference) -> None:
    """Print a table that divides the difference in time between two runs into parts. The sum of the parts is the difference.

    run, against: the names of the two runs, for the title of the table.
    """
    difference_ns = step.difference_ns
    rows = [
        [
            part.label,
            *(ms_text(ns) for ns in (part.time_ns, part.against_ns)),
            signed_ms_text(part.difference_ns),
            percent_text(part.difference_ns, difference_ns),
        ]
        for part in step.parts
        if part.difference_ns
    ]
    change = [signed_ms_text(difference_ns), percent_text(difference_ns, difference_ns)]
    rows.append([f"whole {step.per}", ms_text(step.time_ns), ms_text(step.against_ns), *change])
    faster = "slower" if difference_ns > 0 else "faster" if difference_ns < 0 else "as fast"
    output.print_table(
        f"why {run} is {faster} than {against}: mean {step.per}, parts sum to the difference"
        if difference_ns
        else f"{run} and {against}: mean {step.per}",
        ["Part", "Time (ms)", "Against (ms)", "Difference (ms)", "Share (%)"],
        rows,
    )


def _print_collectives(output: Output, answers: RunAnswers) -> None:
    uses = answers.collectives
    if not uses:
        return
    rows = [
        [
            use.collective,
            use.group.label,
            f"{use.calls:,}",
            "" if use.message_bytes is None else notation.format_number(use.message_bytes / use.calls / notation.MIB),
            "" if use.sent_bytes is None else notation.format_number(use.sent_bytes / notation.MIB),
            ms_text(use.total_ns),
            notation.format_number(use.total_ns / use.calls / 1000),
            "" if use.transfer_ns is None else notation.format_number(use.transfer_ns / use.calls / 1000),
            number_text(use.hidden_pct),
            number_text(use.algorithm_gb_per_s),
            number_text(use.bus_gb_per_s),
            number_text(use.link_gb_per_s),
            number_text(use.link_pct),
        ]
        for use in uses[:MOST_ROWS]
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
    omitted_note = f"; {len(uses) - MOST_ROWS} more in --json" if len(uses) > MOST_ROWS else ""
    output.print_table(f"collectives by process group, all ranks together{omitted_note}", columns, rows)
    if any(use.message_bytes is None for use in uses):
        output.print_line("blank bandwidth: the trace does not record the elements or the process group of each call.")


def _print_waits(output: Output, answers: RunAnswers) -> None:
    waits = answers.waits
    if waits.why:
        if answers.collectives:
            output.print_line(f"waiting for slow ranks: not known, because {waits.why}.")
        return
    rows = [
        [
            str(rank_wait.rank),
            f"{rank_wait.calls:,}",
            f"{rank_wait.last:,}",
            ms_text(rank_wait.waited_ns),
            ms_text(rank_wait.lost_ns),
            number_text(rank_wait.lost_pct),
            ms_text(rank_wait.caused_ns),
        ]
        for rank_wait in waits.ranks
    ]
    slowest = waits.straggler
    straggler_note = f"; rank {slowest.rank} lets the others wait the longest" if slowest else ""
    output.print_table(
        f"waiting for slow ranks: {number_text(waits.lost_pct)} % of the time is lost{straggler_note}",
        ["Rank", "Calls (n)", "Started last (n)", "Waited (ms)", "Lost (ms)", "Lost (%)", "Others waited for it (ms)"],
        rows,
    )
    if waits.unmatched:
        output.print_line(
            f"{waits.unmatched:,} calls are not matched over ranks: the ranks of the group called others in that step."
        )


def _print_idle_causes(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    ranks_with_causes = [(analysis, analysis.idle) for analysis in ranks if analysis.idle is not None]
    if not ranks_with_causes:
        if any(analysis.idle_ns for analysis in ranks):
            output.print_line(_NO_CAUSE)
        return
    rows = [
        [
            "" if analysis.rank is None else str(analysis.rank),
            ms_text(analysis.idle_ns),
            ms_text(idle.host_ns),
            ms_text(idle.communication_ns),
            ms_text(idle.other_ns),
            *(
                ["", ""]
                if analysis.launches is None
                else [notation.format_number(ns / 1000) for ns in (analysis.launches.median_ns, analysis.launches.longest_ns)]
            ),
        ]
        for analysis, idle in ranks_with_causes
    ]
    columns = ["Rank", "Idle (ms)", "Host launched nothing (ms)", "Waiting for communication (ms)", "Other (ms)"]
    output.print_table("idle time by cause", [*columns, "Launch delay, median (us)", "longest (us)"], rows)


def _print_phases(output: Output, ranks: Sequence[RankAnalysis]) -> None:
    rows = [
        ["" if analysis.rank is None else str(analysis.rank), phase_time.phase]
        + [ms_text(ns) for ns in (phase_time.host_ns, phase_time.device_ns, phase_time.compute_ns, phase_time.communication_ns)]
        for analysis in ranks
        for phase_time in analysis.phases
    ]
    if rows:
        columns = ["Rank", "Phase", "Host (ms)", "GPU (ms)", "Compute (ms)", "Communication (ms)"]
        output.print_table("phases of the steps, by what launched the work", columns, rows)


def ms_text(ns: float | None) -> str:
    """A time in nanoseconds as a text in milliseconds; "" for None, which means that the time is not known."""
    return "" if ns is None else notation.format_number(ns / _MS)


def signed_ms_text(ns: int) -> str:
    """A difference in nanoseconds as a text in milliseconds, with + in front of a positive number."""
    return f"{'+' if ns > 0 else ''}{notation.format_number(ns / _MS)}"


def percent_text(part: int, whole: int) -> str:
    """A part of a difference in percent of the whole difference; "" if the whole difference is 0."""
    return notation.format_number(100 * part / whole, 3) if whole else ""


def number_text(value: float | None) -> str:
    """A number as text for a table, with four digits; "" for None, which means that the number is not known."""
    return "" if value is None else notation.format_number(value, 4)
