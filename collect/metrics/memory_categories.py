"""Metrics of the memory by category, which the instrument `memory: categories` records, and of the estimate that papers use."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads
from collect.metric_values import make_result_metric, read_result_value

# Category of memory -> its description. docs/instruments.md uses the same words, and says how the category of the storage of a
# tensor is determined.
DESCRIPTION_BY_CATEGORY = {
    "parameter": "what a rank keeps of the weights from step to step",
    "gathered": "weights for use: gathered from the ranks that keep them, or copied in 16 bits",
    "gradient": "gradients as the optimizer takes them",
    "optimizer_state": "what the optimizer remembers of earlier steps",
    "master_parameter": "the optimizer's own copy of the weights",
    "activation": "what forward made and backward needs",
    "buffer": "what stays from step to step and is none of the other categories",
    "temporary": "what is used and dropped, and what collectives work on",
}

ESTIMATE_KEY, PEAK_KEY = "instruments.memory.estimate_bytes", "instruments.memory.peak_bytes"  # keys of result.json
LARGEST_KEY = "instruments.memory.largest_bytes"
_CATEGORY_HEADINGS = ("Parameters", "Gathered", "Gradients", "Optimizer", "Master copy", "Activations", "Buffers", "Temporary")


def sum_estimated_memory(run: LoadedRun) -> Quantity | None:
    """The estimated size of parameters, gradients and optimizer state on a rank, in bytes; None if the run has no estimate."""
    bytes_by_part = read_result_value(run, ESTIMATE_KEY)
    return Quantity(sum(bytes_by_part.values()), "bytes") if bytes_by_part else None


def compute_peak_over_estimate(run: LoadedRun) -> Quantity | None:
    """The sum of all categories at the memory peak of the observed step, divided by the estimate."""
    estimate, peak_bytes = sum_estimated_memory(run), read_result_value(run, PEAK_KEY)
    return Quantity(sum(peak_bytes.values()) / estimate.value, "x") if estimate and estimate.value and peak_bytes else None


def sum_weight_memory(run: LoadedRun) -> Quantity | None:
    """All copies of the weights on a rank, in bytes: their largest sizes together. What a rank keeps and the optimizer's copy
    do not change during a step, so this sum is reached when most weights are gathered."""
    sizes = [read_result_value(run, f"{LARGEST_KEY}.{category}") for category in ("parameter", "gathered", "master_parameter")]
    return None if None in sizes else Quantity(sum(sizes), "bytes")


METRICS = (
    *(
        make_result_metric(
            f"{LARGEST_KEY}.{category}",
            name=f"memory_{category}_bytes",
            column=MetricColumn("memory", 10 * position, heading),
            unit="bytes",
            direction="lower is better",
            definition=f"Largest size, during the one observed step, of {description}; on the rank with the highest "
            "peak (`memory: categories`, docs/instruments.md). Categories reach their largest size at different "
            "moments, so these sizes do not add up to the peak.",
            # The sizes of these categories are the same in every repeat. Those of other categories depend on timing.
            exact=category in ("parameter", "optimizer_state", "master_parameter"),
        )
        for position, ((category, description), heading) in enumerate(
            zip(DESCRIPTION_BY_CATEGORY.items(), _CATEGORY_HEADINGS, strict=True), 1
        )
    ),
    Metric(
        name="memory_weight_bytes",
        unit="bytes",
        direction="lower is better",
        definition="All copies of the weights on one rank: what it keeps, gathers, and the optimizer's own copy, as "
        "the memory timeline of PyTorch's profiler counts parameters (study 5).",
        of_run=sum_weight_memory,
        reads=Reads(result=(LARGEST_KEY,)),
    ),
    Metric(
        name="estimated_memory_bytes",
        unit="bytes",
        direction="lower is better",
        definition="Estimated bytes of parameters, gradients and optimizer state on one rank, sharded over ranks as "
        "in the ZeRO paper (Rajbhandari et al., 2020, section 3): 4 bytes per parameter, 4 for its gradient, 8 for "
        "Adam. Without activations.",
        of_run=sum_estimated_memory,
        reads=Reads(result=(ESTIMATE_KEY,)),
        exact=True,
    ),
    Metric(
        name="memory_over_estimate",
        column=MetricColumn("memory", 90, "Peak / estimate", 3),
        unit="x",
        direction="lower is better",
        definition="All categories together at the peak of the observed step, divided by the estimate. Activations, "
        "buffers and temporary storage are not in the estimate.",
        of_run=compute_peak_over_estimate,
        reads=Reads(result=(ESTIMATE_KEY, PEAK_KEY)),
    ),
)
