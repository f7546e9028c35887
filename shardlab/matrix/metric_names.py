"""The names of the metrics that are allowed in `claims` and `reported` of a matrix file.

`collect/metrics` defines the metrics. The names are repeated here, so that `jobs` can check a matrix file without importing
`collect`; `tests/shardlab/matrix/test_metric_names.py` checks that both lists are equal.
"""

from __future__ import annotations

STATE_METRIC = "state"  # the end state of a cell; it is not a metric, but a claim names it in the same way as a metric
PLAIN_METRICS = (
    "final_accuracy_pct", "additional_compute_ms", "additional_exposed_communication_ms", "additional_waiting_ms",
    "additional_idle_ms", "additional_non_compute_ms", "overhead_ms", "compute_loss_pct", "speed_gain_pct",
    "memory_change_pct", "accuracy_gain_pct", "memory_share_pct", "memory_efficiency_pct", "bubble_theory_pct", "bubble_pct",
    "pipeline_time_theory", "pipeline_ideal_time_theory", "pipeline_throughput_theory", "sent_theory_bytes",
    "sent_counted_bytes",
    "sent_textbook_bytes", "energy_j", "energy_per_unit_j", "idle_power_w", "final_loss", "peak_memory_bytes",
    "reserved_memory_bytes",
    "oom_allocated_bytes", "oom_reserved_bytes", "oom_requested_bytes",
    "memory_parameter_bytes", "memory_gathered_bytes", "memory_gradient_bytes",
    "memory_optimizer_state_bytes", "memory_master_parameter_bytes", "memory_activation_bytes", "memory_buffer_bytes",
    "memory_temporary_bytes", "memory_weight_bytes", "estimated_memory_bytes", "memory_over_estimate", "mfu_pct", "hfu_pct",
    "network_bytes",
    "network_received_bytes", "rdma_bytes", "network_faults", "pause_frames", "rdma_faults", "limited_packets",
    "rdma_retransmissions", "nvlink_bytes",
    "pcie_bytes", "rank_read_bytes", "rank_written_bytes", "loopback_bytes", "wire_difference_pct", "sent_traced_bytes",
    "traced_difference_pct", "parameters", "speed_up", "scaling_efficiency_pct", "staleness_mean", "staleness_max",
    "step_time_ms", "step_time_p5_ms", "step_time_p95_ms", "throughput_per_s", "rank_throughput_per_s",
    "phase_waiting_ms", "compute_ms", "communication_ms",
    "exposed_communication_ms", "memory_operations_ms", "non_compute_ms", "idle_ms", "kernel_ms", "overlap_pct",
    "compute_pct", "communication_pct", "non_compute_pct", "idle_pct", "collective_count", "collective_ms",
    "collective_mean_ms", "idle_host_ms", "idle_launching_ms", "idle_communication_ms", "idle_other_ms", "launch_delay_us",
    "waiting_ms", "waiting_pct", "collective_skew_us", "train_time_s", "epoch_time_s", "epoch_time_median_s", "cpu_pct",
    "cpu_peak_pct", "rank_cpu_pct", "gpu_pct", "gpu_memory_pct", "step_time_over_prediction", "memory_over_prediction",
    "sent_over_prediction", "energy_over_prediction",
    "checkpoint_save_s", "checkpoint_load_s", "checkpoint_bytes",
    "profiled_peak_bytes", "profiled_reserved_bytes", "matrix_product_flops_per_s", "largest_batch",
)  # fmt: skip
WITH_ARGUMENT = {  # the name of each metric that needs an argument -> the name of the argument
    "time_to_accuracy_s": "accuracy_pct",
    "operator_count": "of",
    "operator_ms": "of",
    "operator_difference_ms": "of",
    "algorithm_bandwidth_gb_per_s": "of",
    "bus_bandwidth_gb_per_s": "of",
    "collective_pass_count": "of",
    "collective_pass_ms": "of",
    "collective_call_ms": "of",
    "hidden_pct": "of",
    "phase_ms": "of",
    "layer_ms": "of",
    "attention_ms": "of",
}
KNOWN_METRICS = (STATE_METRIC, *PLAIN_METRICS, *WITH_ARGUMENT)
CATEGORIES = "memory: categories"
_BY_INSTRUMENT = {  # an instrument of a cell -> the metrics that have no value without it
    "profile": (
        "additional_compute_ms", "additional_exposed_communication_ms", "additional_waiting_ms", "additional_idle_ms",
        "additional_non_compute_ms", "overhead_ms", "compute_loss_pct", "compute_ms", "communication_ms",
        "exposed_communication_ms", "memory_operations_ms", "non_compute_ms", "idle_ms", "kernel_ms", "overlap_pct",
        "profiled_peak_bytes", "profiled_reserved_bytes", "matrix_product_flops_per_s", "compute_pct", "communication_pct",
        "non_compute_pct", "idle_pct", "collective_count", "collective_ms", "collective_mean_ms", "idle_host_ms",
        "idle_launching_ms", "idle_communication_ms", "idle_other_ms", "launch_delay_us", "waiting_ms", "waiting_pct",
        "collective_skew_us", "sent_traced_bytes", "traced_difference_pct",
    ),
    CATEGORIES: (
        "memory_parameter_bytes", "memory_gathered_bytes", "memory_gradient_bytes", "memory_optimizer_state_bytes",
        "memory_master_parameter_bytes", "memory_activation_bytes", "memory_buffer_bytes", "memory_temporary_bytes",
        "memory_weight_bytes", "estimated_memory_bytes", "memory_over_estimate",
    ),
    "checkpoints": ("checkpoint_save_s", "checkpoint_load_s", "checkpoint_bytes"),
    "validation": ("final_accuracy_pct", "accuracy_gain_pct", "time_to_accuracy_s"),
}  # fmt: skip
INSTRUMENTS = {metric: instrument for instrument, metrics in _BY_INSTRUMENT.items() for metric in metrics}
INSTRUMENTS |= {metric: "profile" for metric, argument in WITH_ARGUMENT.items() if argument == "of"}
