"""Writes the table of docs/papers.md that says what of the five studies is drawn, measurable and decided.

python tools/record_studies.py                 # the table, from the matrices and docs/results/rehearsals.json
python tools/record_studies.py WORKSPACE...    # first record these rehearsals: jobs submit --matrix paper1 --scale tiny --wait
"""

import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from collect.metric import load_metrics
from jobs.planning.claim_lint import has_instrument
from jobs.planning.resolve import resolve_cells
from shardlab.matrix import cell_names, matrix, metric_names
from shardlab.matrix.cell import Cell
from shardlab.matrix.expression import Expression
from shardlab.matrix.matrix import Matrix

ROOT = Path(__file__).parents[1]
PAGE, RECORD = ROOT / "docs/papers.md", ROOT / "docs/results/rehearsals.json"
BEGIN, END = "<!-- written by tools/record_studies.py -->", "<!-- end of what tools/record_studies.py writes -->"
STUDIES = [f"paper{number}" for number in range(1, 6)]
FEWEST_NUMBERS = 3  # places of a study with fewer numbers are no table in the report
NOT_RUN = "not run"
DIAGRAM = "diagrams of how something works, without a number"
# The figures of each study: (their numbers in the study, how many, the figure of the report or the reason why there is none).
FIGURES: dict[str, list[tuple[str, int, str]]] = {
    "paper1": [("1, 2", 2, "theory"), ("3", 1, "gpus"), ("4, 5", 2, "telemetry"), ("6", 1, "a table of text")],
    "paper2": [
        ("section 4.2.2", 1, "allocator_active"), ("section 4.2.3", 1, "allocator_segments"),
        ("section 4.2.4", 1, "allocator_state"),
    ],
    "paper3": [("1 to 9", 9, DIAGRAM), ("10, 15, 20, 21", 4, "utilization"), ("11 to 14, 16 to 19", 8, "gpus")],
    "paper4": [],
    "paper5": [
        ("1 to 3", 3, DIAGRAM), ("4", 1, "a table of text"), ("5, 6", 2, "epoch_time"), ("7 to 11", 5, "memory_timeline"),
        ("12 to 14", 3, "memory_of_categories"), ("histograms", 4, "epoch_histogram"),
    ],
}  # fmt: skip
UNBROKEN: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
NO_GPU, NO_RECORD = "it needs a GPU", "no rehearsal with it is recorded"
WHY_NOT_AT_TINY = {
    "gpus": NO_GPU, "utilization": NO_GPU, "allocator_active": NO_GPU, "allocator_segments": NO_GPU,
    "allocator_state": NO_GPU, "epoch_histogram": "it needs 3 epochs, and a rehearsal has 2",
}  # fmt: skip


def record_rehearsal(workspace: Path) -> tuple[str, dict[str, Any]]:
    """Returns (name of the study, what its rehearsal in a workspace measured and decided)."""
    summary = json.loads((workspace / "report/summary.json").read_text())
    drawn = set(re.findall(r'id="figure-([a-z0-9-]+)', (workspace / "report/index.html").read_text()))
    kinds = {figure for entries in FIGURES.values() for _, _, figure in entries}
    unmeasured = [entry for entry in summary["reported"] if entry.get("measured") is None]
    states = Counter[str]()
    for row in summary["rows"]:
        states.update(row["states"])
    places = {entry["where"] for entry in summary["reported"] if entry.get("measured") is not None}
    places |= {entry["where"] for entry in summary["tables"] if any(row["values"] or row["best"] for row in entry["rows"])}
    return summary["matrix"].removesuffix("-tiny"), {
        "runs": dict(sorted(states.items())),
        "verdicts": dict(sorted(Counter(verdict["verdict"] for verdict in summary["verdicts"]).items())),
        "decided": [verdict["id"] for verdict in summary["verdicts"] if is_decided_exactly(verdict)],
        "unmeasured": dict(sorted(Counter(map(name_gap, unmeasured)).items())),
        "places": sorted(places),
        "figures": sorted(kind for kind in kinds if any(f"{name}-".startswith(f"{kind.replace('_', '-')}-") for name in drawn)),
    }


def name_gap(entry: dict[str, Any]) -> str:
    """The metric of a number that a rehearsal did not measure, or `not run` if its cell has no completed run."""
    return entry["metric"] if "was not measured" in entry.get("why", "") else NOT_RUN


def is_decided_exactly(verdict: dict[str, Any]) -> bool:
    """Whether a claim is decided, and by counts or by sizes that are the same in every repeat, so that no speed matters."""
    if verdict["verdict"] not in ("reproduced", "contradicted"):
        return False
    numbers = [number for number in verdict.get("numbers", ()) if not isinstance(number["value"], str)]
    return bool(numbers) and all(
        number.get("how", "").startswith("exact") or number["value"] == number.get("low") == number.get("high")
        for number in numbers
    )


def write_table(record: dict[str, Any]) -> str:
    """The table with one row for each study and kind, and the gaps below it."""
    builders: list[Callable[..., tuple[str, list[int], list[str]]]] = [count_claims, count_numbers, count_tables, count_figures]
    rows = ["| study | | total | drawn | measurable | at tiny scale | only on GPUs |", "|---|---|---|---|---|---|---|"]
    gaps = []
    for name in STUDIES:
        study = matrix.load_matrix(matrix.find_matrix_file(name))
        cells = resolve_cells(study)
        rehearsal = record.get(name, {"runs": {}, "decided": [], "unmeasured": {}, "places": [], "figures": []})
        for build in builders:
            kind, counts, reasons = build(study, cells, rehearsal)
            rows.append(f"| {name} | {kind} | {' | '.join(map(str, counts))} |")
            gaps += [
                textwrap.fill(f"- {name}, {kind}: {reason}.", 118, subsequent_indent="  ", **UNBROKEN) for reason in reasons
            ]
    runs = [
        f"{name}: {', '.join(f'{count} {state}' for state, count in record[name]['runs'].items())}"
        if name in record
        else f"{name}: none"
        for name in STUDIES
    ]
    return "\n".join([*rows, "", textwrap.fill(f"Runs of the recorded rehearsals: {'; '.join(runs)}.", 118), "", *gaps])


def count_claims(study: Matrix, cells: list[Cell], rehearsal: dict[str, Any]) -> tuple[str, list[int], list[str]]:
    claims = study.file.claims
    measurable = [claim for claim in claims if all(is_measured(cells, *call) for call in Expression(claim.test).call_arguments)]
    others = [claim for claim in measurable if claim.id not in rehearsal["decided"]]
    exact_metrics = {metric.name for metric in load_metrics() if metric.exact}
    causes = Counter(metric for claim in others for metric in Expression(claim.test).calls - exact_metrics)
    reasons = [f"{len(others)} compare {list_counts(causes)}; a rehearsal does not decide them"] * bool(others)
    not_run = rehearsal.get("verdicts", {}).get(NOT_RUN, 0)
    reasons += [f"{not_run} have no verdict of the rehearsal, because a cell did not run or a metric has no value"] * bool(
        not_run
    )
    return "claims", [len(claims), len(claims), len(measurable), len(measurable) - len(others), len(others)], reasons


def count_numbers(study: Matrix, cells: list[Cell], rehearsal: dict[str, Any]) -> tuple[str, list[int], list[str]]:
    entries = study.file.reported
    measurable = [
        entry
        for entry in entries
        if all(is_measured(cells, entry.metric, cell) for cell in (entry.cell, entry.against) if cell)
    ]
    gaps = {metric: count for metric, count in rehearsal["unmeasured"].items() if metric != NOT_RUN}
    not_run = rehearsal["unmeasured"].get(NOT_RUN, 0) if rehearsal["runs"] else len(entries)
    excluded = len(entries) - len(measurable)
    at_tiny = len(entries) - not_run - sum(gaps.values())
    reasons = (
        [f"{excluded} are of a cell that the matrix excludes ({study.excluded[0].why})"] if excluded and study.excluded else []
    )
    reasons += [f"{sum(gaps.values())} have no value without a GPU: {list_counts(gaps)}"] * bool(gaps)
    reasons += [f"{not_run - excluded} are of cells whose rehearsal did not run, or ended otherwise"] * (not_run > excluded)
    return "numbers", [len(entries), len(entries), len(measurable), at_tiny, len(measurable) - at_tiny], reasons


def count_tables(study: Matrix, cells: list[Cell], rehearsal: dict[str, Any]) -> tuple[str, list[int], list[str]]:
    """Tables of text, and places of the study with so many numbers that the report makes a table of them."""
    numbers = Counter(entry.where for entry in study.file.reported)
    measured = Counter(entry.where for entry in study.file.reported if is_measured(cells, entry.metric, entry.cell))
    places = [where for where, count in numbers.items() if count >= FEWEST_NUMBERS]
    text_tables = [(table.where, bool(table.measured or table.choice)) for table in study.file.tables]
    tables = [*text_tables, *((where, bool(measured[where])) for where in places)]
    measurable = [where for where, has_numbers in tables if has_numbers]
    at_tiny = sum(where in rehearsal["places"] for where in measurable)
    words = [where for where, has_numbers in tables if not has_numbers]
    reasons = [f"only words, or numbers that a test recomputes: {', '.join(words)}"] * bool(words)
    missing = [where for where in measurable if where not in rehearsal["places"]]
    reasons += [f"no number of a rehearsal: {', '.join(missing)}"] * bool(missing)
    return "tables", [len(tables), len(tables), len(measurable), at_tiny, len(missing)], reasons


def count_figures(study: Matrix, cells: list[Cell], rehearsal: dict[str, Any]) -> tuple[str, list[int], list[str]]:
    total = drawn = measurable = at_tiny = 0
    reasons = []
    for names, count, figure in FIGURES[study.name]:
        total += count
        is_figure = figure.replace("_", "").isalpha()
        drawn += count * (figure != DIAGRAM)
        measurable += count * is_figure
        is_in_rehearsal = is_figure and figure in rehearsal["figures"]
        at_tiny += count * is_in_rehearsal
        if not is_figure:
            reasons.append(f"{names}: {figure}")
        elif not is_in_rehearsal:
            reasons.append(f"{names}: `{figure}` is not drawn from a rehearsal: {WHY_NOT_AT_TINY.get(figure, NO_RECORD)}")
    return "figures", [total, drawn, measurable, at_tiny, measurable - at_tiny], reasons


def is_measured(cells: Iterable[Cell], metric: str, selector: dict[str, Any]) -> bool:
    """Whether cells of the matrix have these values, and the instrument that the metric needs."""
    names = {name: value for name, value in selector.items() if name not in cell_names.METRIC_ARGUMENTS}
    selected = [cell for cell in cells if cell_names.matches_cell(msgspec.to_builtins(cell), names)]
    instrument = metric_names.INSTRUMENTS.get(metric)
    return bool(selected) and all(not instrument or has_instrument(cell.instruments, instrument) for cell in selected)


def list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"`{name}` ({count})" for name, count in sorted(counts.items()))


def main(workspaces: list[str]) -> None:
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record |= dict(record_rehearsal(Path(workspace)) for workspace in workspaces)
    RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{write_table(record)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main(sys.argv[1:])
