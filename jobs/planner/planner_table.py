"""Writes predictions as text: the columns of `jobs plan` (without columns in which no value is known), and sums over all
runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jobs.planner.advise import Advice, AdviceReport
from jobs.planner.scale_out import ScaledCell
from shardlab.runs.prediction import PredictedRange, Prediction, total
from shardlab.terminal import moments
from shardlab.terminal.console import Output

GIB = 1 << 30
MEMORY_FROM = "memory from"  # the heading of the column that says whether a formula or a rehearsal gave the memory


def size(value: float) -> str:
    """A number of bytes as text in GiB, such as `12.3 GiB`, or in MiB if it is below 0.1 GiB."""
    return f"{value / GIB:,.1f} GiB" if value >= GIB / 10 else f"{value / 2**20:,.1f} MiB"


def columns(predictions: Sequence[Prediction]) -> dict[str, list[str]]:
    """The columns of a table of predictions: for each heading, the text for each prediction; '' if the number is not known."""
    found = {heading: [text(one) for one in predictions] for heading, text in _COLUMNS.items()}
    if not any(one.memory_from == "rehearsal" for one in predictions):
        del found[MEMORY_FROM]  # the column would say `formula` in every row
    return {heading: values for heading, values in found.items() if any(values)}


def sums(predictions: Mapping[str, Prediction], runs: Mapping[str, int]) -> list[str]:
    """Sentences with the predicted sums over all runs. runs: the number of runs of each cell, by the name of the cell."""
    said = []
    unfit, unlikely = (sum(one.fits == fits for one in predictions.values()) for fits in ("no", "unlikely"))
    if unfit:
        said.append(
            f"predicted: {unfit} of {len(predictions)} cell(s) do not fit the memory of a GPU; `jobs submit` leaves them "
            "out, unless they expect oom, or with --no-fit-check."
        )
    if unlikely:
        said.append(f"predicted: {unlikely} of {len(predictions)} cell(s) are unlikely to fit the memory of a GPU.")
    if unfit or unlikely:
        said.append(
            "Out of memory is a result, so --adapt changes no batch size. The column `largest micro` has the micro-batch that "
            "is likely to fit, where it is known; `search: {key: gpu_batch_size, for: largest_that_fits}` finds it."
        )
    for field, words, text in _SUMS:
        known = {name: value for name, one in predictions.items() if (value := getattr(one, field)) is not None}
        if known:
            every = total({name: value.times(runs[name]) for name, value in known.items()})
            share = "" if len(known) == len(predictions) else f" for {len(known)} of {len(predictions)} cells"
            said.append(f"predicted: {text(every.likely)}{words}{share} ({text(every.low)} to {text(every.high)}).")
    return said


def scale_out(out: Output, scaled: Mapping[str, Sequence[ScaledCell]]) -> None:
    """Print the predictions of each measured cell for the numbers of GPUs that --scale-out names."""
    rows = [
        [name, str(one.gpus), _memory(one.predicted), _range(duration, one.step_s), _range(_times, one.speedup), one.trust]
        for name, several in scaled.items()
        for one in several
    ]
    out.table("scale-out, with the same batch per GPU", ["cell", "GPUs", "memory", "step", "speed-up", "trust"], rows)


def advice(out: Output, report: AdviceReport) -> None:
    """Print the result of `jobs advise`: the ranked strategies, and the rules of the studies whose condition is true."""
    rows = [
        [
            str(place) if one.items_per_s is not None else "-",
            one.cell.strategy,
            _mesh(one),
            "full" if one.cell.activation_checkpointing == "full" else "none",
            _memory(one.predicted),
            one.predicted.memory_from or "",
            "" if one.predicted.largest_micro_batch is None else str(one.predicted.largest_micro_batch),
            "" if not one.fits else str(one.cell.micro_batch_size),
            _range(duration, one.predicted.step_s) if one.fits else "",
            _range(_thousands, None if one.range_per_s is None else one.range_per_s.times(one.cell.seq_len or 1)),
            "; ".join(one.reasons),
        ]
        for place, one in enumerate(report.ranked, 1)
    ]
    heads = ["rank", "strategy", "mesh", "checkpointing", "memory", MEMORY_FROM, "largest micro", "micro", "step", "units/s"]
    out.table("strategies", [*heads, "reasons"], rows)
    for judged in report.rules:
        verdict = "agrees" if judged.agrees else "DISAGREES"
        rule = judged.rule
        out.line(f"study {rule.study}, {rule.where}: {rule.says}. The planner {verdict}: {judged.why}.")


def _mesh(one: Advice) -> str:
    sizes = {"dp": one.cell.dp, "tp": one.cell.tp, "pp": one.cell.pp}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "dp=1"


def _thousands(value: float) -> str:
    return f"{value:,.0f}"


def _times(value: float) -> str:
    return f"{value:.3g}x"


def duration(seconds: float) -> str:
    """A duration as text, such as `350 ms` or `12 s`; from a minute on, in the format of `moments.duration`."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 60 else moments.duration(seconds)


def _memory(one: Prediction) -> str:
    if one.memory_bytes is None:
        return ""
    if one.memory_from == "formula" and one.formula_tensor_bytes is None:  # the memory of activations is not known
        return f"more than {size(one.memory_bytes.low)}"
    return size(one.memory_bytes.likely)


def _range(text: Callable[[float], str], span: PredictedRange | None) -> str:
    return "" if span is None else f"{text(span.likely)} ({text(span.low)} to {text(span.high)})"


def _number(value: float) -> str:
    return f"{value:.3g}"


_COLUMNS: dict[str, Callable[[Prediction], str]] = {
    "memory": _memory,
    MEMORY_FROM: lambda one: one.memory_from or "",
    "fits": lambda one: one.fits or "",
    "largest micro": lambda one: "" if one.largest_micro_batch is None else str(one.largest_micro_batch),
    "step": lambda one: _range(duration, one.step_s),
    "time": lambda one: _range(duration, one.time_s),
    "GPU hours": lambda one: "" if one.gpu_hours is None else _number(one.gpu_hours.likely),
    "kWh": lambda one: "" if one.energy_kwh is None else _number(one.energy_kwh.likely),
    "cost": lambda one: "" if one.cost is None else f"{one.cost.likely:.2f}",
    "bottleneck": lambda one: one.bottleneck or "",
}
_SUMS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("time_s", " for all runs in sequence", duration),
    ("gpu_hours", " GPU hours", _number),
    ("energy_kwh", " kWh of the GPUs", _number),
    ("cost", " by price_per_gpu_hour", lambda value: f"{value:.2f}"),
)
