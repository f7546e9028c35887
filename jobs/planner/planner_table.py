"""Writes predictions as text: the columns of `jobs plan` (without columns in which no value is known), and sums over all
runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jobs.planner.advise import Advice, AdviceReport
from jobs.planner.scale_out import ScaledCell
from shardlab.runs.prediction import PredictedRange, Prediction, sum_ranges
from shardlab.terminal import moments
from shardlab.terminal.console import Output

GIB = 1 << 30
MEMORY_FROM = "memory from"  # the heading of the column that says whether a formula or a rehearsal gave the memory


def format_size(value: float) -> str:
    """A number of bytes as text in GiB, such as `12.3 GiB`, or in MiB if it is below 0.1 GiB."""
    return f"{value / GIB:,.1f} GiB" if value >= GIB / 10 else f"{value / 2**20:,.1f} MiB"


def make_columns(predictions: Sequence[Prediction]) -> dict[str, list[str]]:
    """The columns of a table of predictions: for each heading, the text for each prediction; '' if the number is not known."""
    texts_by_heading = {heading: [text(prediction) for prediction in predictions] for heading, text in _COLUMNS.items()}
    if not any(prediction.memory_from == "rehearsal" for prediction in predictions):
        del texts_by_heading[MEMORY_FROM]  # the column would say `formula` in every row
    return {heading: values for heading, values in texts_by_heading.items() if any(values)}


def describe_sums(predictions: Mapping[str, Prediction], runs: Mapping[str, int]) -> list[str]:
    """Sentences with the predicted sums over all runs. runs: the number of runs of each cell, by the name of the cell."""
    sentences = []
    unfit, unlikely = (sum(prediction.fits == fits for prediction in predictions.values()) for fits in ("no", "unlikely"))
    if unfit:
        sentences.append(
            f"predicted: {unfit} of {len(predictions)} cell(s) do not fit the memory of a GPU; `jobs submit` leaves them "
            "out, unless they expect oom, or with --no-fit-check."
        )
    if unlikely:
        sentences.append(f"predicted: {unlikely} of {len(predictions)} cell(s) are unlikely to fit the memory of a GPU.")
    if unfit or unlikely:
        sentences.append(
            "Out of memory is a result, so --adapt changes no batch size. The column `largest micro` has the micro-batch that "
            "is likely to fit, where it is known; `search: {key: gpu_batch_size, for: largest_that_fits}` finds it."
        )
    for field, words, text in _SUMS:
        values = {name: value for name, prediction in predictions.items() if (value := getattr(prediction, field)) is not None}
        if values:
            summed = sum_ranges({name: value.times(runs[name]) for name, value in values.items()})
            share = "" if len(values) == len(predictions) else f" for {len(values)} of {len(predictions)} cells"
            sentences.append(f"predicted: {text(summed.likely)}{words}{share} ({text(summed.low)} to {text(summed.high)}).")
    return sentences


def print_scale_out(out: Output, scaled: Mapping[str, Sequence[ScaledCell]]) -> None:
    """Print the predictions of each measured cell for the numbers of GPUs that --scale-out names."""
    rows = [
        [
            name,
            str(scaled_cell.gpus),
            _format_memory(scaled_cell.predicted),
            _format_range(format_duration, scaled_cell.step_s),
            _format_range(_format_times, scaled_cell.speedup),
            scaled_cell.trust,
        ]
        for name, scaled_cells in scaled.items()
        for scaled_cell in scaled_cells
    ]
    out.print_table("scale-out, with the same batch per GPU", ["cell", "GPUs", "memory", "step", "speed-up", "trust"], rows)


def print_advice(out: Output, report: AdviceReport) -> None:
    """Print the result of `jobs advise`: the ranked strategies, and the rules of the studies whose condition is true."""
    rows = [
        [
            str(rank) if ranked_advice.items_per_s is not None else "-",
            ranked_advice.cell.strategy,
            _format_mesh(ranked_advice),
            "full" if ranked_advice.cell.activation_checkpointing == "full" else "none",
            _format_memory(ranked_advice.predicted),
            ranked_advice.predicted.memory_from or "",
            "" if ranked_advice.predicted.largest_micro_batch is None else str(ranked_advice.predicted.largest_micro_batch),
            "" if not ranked_advice.fits else str(ranked_advice.cell.micro_batch_size),
            _format_range(format_duration, ranked_advice.predicted.step_s) if ranked_advice.fits else "",
            _format_range(
                _format_thousands,
                None if ranked_advice.range_per_s is None else ranked_advice.range_per_s.times(ranked_advice.cell.seq_len or 1),
            ),
            "; ".join(ranked_advice.reasons),
        ]
        for rank, ranked_advice in enumerate(report.ranked, 1)
    ]
    heads = ["rank", "strategy", "mesh", "checkpointing", "memory", MEMORY_FROM, "largest micro", "micro", "step", "units/s"]
    out.print_table("strategies", [*heads, "reasons"], rows)
    for judged in report.rules:
        verdict = "agrees" if judged.agrees else "DISAGREES"
        rule = judged.rule
        out.print_line(f"study {rule.study}, {rule.where}: {rule.says}. The planner {verdict}: {judged.why}.")


def _format_mesh(ranked_advice: Advice) -> str:
    sizes = {"dp": ranked_advice.cell.dp, "tp": ranked_advice.cell.tp, "pp": ranked_advice.cell.pp}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "dp=1"


def _format_thousands(value: float) -> str:
    return f"{value:,.0f}"


def _format_times(value: float) -> str:
    return f"{value:.3g}x"


def format_duration(seconds: float) -> str:
    """A duration as text, such as `350 ms` or `12 s`; from a minute on, in the format of `moments.format_duration`."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 60 else moments.format_duration(seconds)


def _format_memory(prediction: Prediction) -> str:
    if prediction.memory_bytes is None:
        return ""
    if prediction.memory_from == "formula" and prediction.formula_tensor_bytes is None:  # activations are not known
        return f"more than {format_size(prediction.memory_bytes.low)}"
    return format_size(prediction.memory_bytes.likely)


def _format_range(text: Callable[[float], str], span: PredictedRange | None) -> str:
    return "" if span is None else f"{text(span.likely)} ({text(span.low)} to {text(span.high)})"


def _format_number(value: float) -> str:
    return f"{value:.3g}"


_COLUMNS: dict[str, Callable[[Prediction], str]] = {
    "memory": _format_memory,
    MEMORY_FROM: lambda prediction: prediction.memory_from or "",
    "fits": lambda prediction: prediction.fits or "",
    "largest micro": lambda prediction: "" if prediction.largest_micro_batch is None else str(prediction.largest_micro_batch),
    "step": lambda prediction: _format_range(format_duration, prediction.step_s),
    "time": lambda prediction: _format_range(format_duration, prediction.time_s),
    "GPU hours": lambda prediction: "" if prediction.gpu_hours is None else _format_number(prediction.gpu_hours.likely),
    "kWh": lambda prediction: "" if prediction.energy_kwh is None else _format_number(prediction.energy_kwh.likely),
    "cost": lambda prediction: "" if prediction.cost is None else f"{prediction.cost.likely:.2f}",
    "bottleneck": lambda prediction: prediction.bottleneck or "",
}
_SUMS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("time_s", " for all runs in sequence", format_duration),
    ("gpu_hours", " GPU hours", _format_number),
    ("energy_kwh", " kWh of the GPUs", _format_number),
    ("cost", " by price_per_gpu_hour", lambda value: f"{value:.2f}"),
)
