"""The report as one self-contained page: what it shows is the summary's, how it looks is the template's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from markupsafe import Markup

from collect import choice_text, columns, excerpt, figure, notation, terminal, verdict_text
from collect.columns import Column
from collect.figures import (
    accuracy,
    batch_scaling,
    breakdown,
    bubble,
    collectives,
    epoch_histogram,
    epoch_time,
    head_to_head,
    loss,
    memory,
    memory_by_run,
    memory_categories,
    memory_timeline,
    operator_differences,
    overlap,
    scaling,
    sharding,
    step_time,
    telemetry,
    throughput,
    utilization,
)
from collect.load import Loaded
from collect.metric import menu
from collect.row import Row
from collect.summary import Summary
from shardlab import __version__
from templates import render

TEMPLATE = "report/index.html.j2"
WIDE = (
    "telemetry", "memory_timeline", "breakdown", "collectives", "operator_differences", "memory_categories", "sharding",
    "head_to_head",
)  # fmt: skip  # figures that take a whole row
# in the order of the page
FIGURES: tuple[ModuleType, ...] = (
    head_to_head,
    throughput, scaling, batch_scaling, step_time, epoch_time, epoch_histogram, memory, memory_by_run, loss, accuracy,
    breakdown, overlap, collectives, operator_differences, bubble, memory_categories, sharding, memory_timeline, utilization,
    telemetry,
)  # fmt: skip


def draw(loaded: Loaded, summary: Summary, folder: Path, runs: Path) -> str:
    """The page for a report that will lie in `folder`; links to runs are relative, so that both can move together."""
    shown = excerpt.of(summary)
    kept = {row.id for row in shown.rows}
    drawn = Loaded(loaded.expansion, [cell for cell in loaded.cells if cell.id in kept])
    figures = _figures(drawn, shown)
    table = columns.table(summary.rows, shown.rows)
    label_of = dict(zip((row.id for row in summary.rows), columns.labels(summary.rows), strict=True))
    return render(
        TEMPLATE,
        summary=shown,
        whole=summary,
        version=__version__,
        created=notation.moment(summary.created_s),
        labels=[label_of[row.id] for row in shown.rows],
        label_of=label_of,
        place_of={row.id: place for place, row in enumerate(shown.rows)},
        text=verdict_text,
        reported=verdict_text.reported(summary, label_of),
        common=table.common,
        columns=table.columns,
        sent=table.sent,
        also=table.also,
        runs_path=Path(os.path.relpath(runs, folder)).as_posix(),
        run_columns=_run_columns(table.columns),
        run_value=_run_value,
        state_class=_state_class,
        head_to_head=[entry for entry in figures if entry[0].name == "head_to_head"],
        figures=[entry for entry in figures if entry[0].name != "head_to_head"],
        choices=choice_text,
        number=notation.number,
        places=_places(loaded),
        hosts=_hosts(loaded),
        worst=_worst_coverage(summary),
        metrics=menu(),
        plotly=Markup(_bundle()),
    )


def _bundle() -> str:
    """plotly's own script, once for the page."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    assert "</script" not in script.lower()
    return script


def _figures(loaded: Loaded, summary: Summary) -> list[tuple[figure.Figure, str, bool, Markup]]:
    """(figure, its title, whether it takes a whole row, its JSON fit to stand in a script element)."""
    groups = figure.groups(loaded, summary)
    drawn: list[tuple[figure.Figure, str]] = []
    for module in FIGURES:
        for group in groups:
            found: figure.Figure | None = module.draw(group)
            if found is not None:
                if group.left_out:
                    found.caption += f" Of {len(group.marks) + group.left_out:,} cells the first {len(group.marks)}."
                title = f"{found.title}, {group.workload}" if len(groups) > 1 else found.title
                drawn.append((found, title))
    narrow = [index for index, (found, _) in enumerate(drawn) if found.name not in WIDE]
    alone = narrow[-1] if len(narrow) % 2 else None  # two stand side by side: the last of an odd number has no partner
    return [
        (found, title, index not in narrow or index == alone, _script_json({"data": found.data, "layout": found.layout}))
        for index, (found, title) in enumerate(drawn)
    ]


def _script_json(value: Any) -> Markup:
    """JSON in which no text can end the script element that it stands in."""
    text = msgspec.json.encode(value).decode()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def _run_columns(shown: Sequence[Column]) -> list[Column]:
    """The measured columns that a single run has too."""
    return [column for column in shown if column.name in ("throughput_per_s", "step_time_ms", "final_loss")]


def _run_value(metrics: dict[str, float], name: str) -> str:
    return notation.number(metrics[name]) if name in metrics else ""


def _state_class(row: Row) -> str:
    """The state that decides a row's colour: the worst that it has."""
    known = [state for state in terminal.STYLES if state in row.states]
    return known[0] if known else next(iter(row.states), "unknown")


def _places(loaded: Loaded) -> list[tuple[str, list[str]]]:
    """What the runs say they were made with: (what, every value that occurs)."""
    runs = [run for run in loaded.runs if run.run]
    found: dict[str, list[str]] = {"Cluster": [], "Launchers": [], "Git commit": [], "Versions": [], "Data": []}
    for run in runs:
        assert run.run is not None
        found["Cluster"].append(", ".join(f"{key} {value}" for key, value in run.run.cluster.items()))
        found["Launchers"].append(run.run.launcher)
        found["Git commit"].append(run.run.git_commit or "not in a git repository")
        versions = (run.result.versions if run.result else {}) or run.run.versions
        found["Versions"].append(", ".join(f"{name} {version}" for name, version in sorted(versions.items())))
        if run.result and run.result.data:
            data = run.result.data
            synthetic = " (synthetic)" if data.get("synthetic") else ""
            found["Data"].append(f"{data.get('name', 'unnamed')}{synthetic}, SHA-256 {data.get('sha256', 'unknown')}")
    return [(what, list(dict.fromkeys(values))) for what, values in found.items() if values]


def _hosts(loaded: Loaded) -> list[tuple[str, list[tuple[str, str]]]]:
    """(host, what it is) for every host and boot that a run was on."""
    hosts = {(host.host, host.boot_id): host for run in loaded.runs for host in run.hosts}
    found = []
    for host in hosts.values():
        gpus = ", ".join(f"{gpu.name} ({gpu.uuid})" for gpu in host.gpus or ())
        nics = [f"{nic.name} ({nic.kind}{f', {nic.speed_mbps} Mbit/s' if nic.speed_mbps else ''})" for nic in host.nics]
        about = [
            ("Processors", f"{host.cpus_allowed} of {host.cpus}, {host.cpu_model or 'model unknown'}"),
            ("Memory", f"{notation.number(host.memory_bytes / notation.GIB, 3)} GiB"),
            ("GPUs", gpus or f"no GPU{f' ({host.gpu_why_absent})' if host.gpu_why_absent else ''}"),
            ("Network", ", ".join(nics) or "no interface"),
            ("System", f"{host.system}, kernel {host.kernel}"),
            ("Python", ", ".join([host.python, *(f"{name} {version}" for name, version in sorted(host.packages.items()))])),
        ]
        found.append((host.host, about))
    return found


def _worst_coverage(summary: Summary) -> list[tuple[str, int, int, str, str]]:
    """(host, runs, samples, lowest coverage, largest gap) per host: the number that everything else is better than."""
    found = []
    for host in dict.fromkeys(entry.host for entry in summary.telemetry):
        entries = [entry for entry in summary.telemetry if entry.host == host]
        shares = [entry.coverage_pct for entry in entries if entry.coverage_pct is not None]
        gaps = [entry.largest_gap_s for entry in entries if entry.largest_gap_s is not None]
        lowest = f"{notation.number(min(shares), 3)} %" if shares else ""
        largest = f"{notation.number(max(gaps), 2)} s" if gaps else ""
        found.append((host, len(entries), sum(entry.samples for entry in entries), lowest, largest))
    return found
