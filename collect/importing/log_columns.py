"""The names of columns in logs of other programs, and the fields of our records that their values become.

A name that is not here is not read, and its field stays blank.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from collect.importing.log_values import MIB
from collect.sampler.nvidia_smi import SMI_COLUMNS

GIB = 2**30
KIB = 1024


class LogColumn(NamedTuple):
    """What the values of a column of a log mean."""

    field: str
    """The field of a record, or of `log_rows.StepRow`."""
    default_scale: float = 1.0
    """The factor from the unit of the column to the unit of the field, for values that name no unit."""
    is_rate: bool = False
    """Whether the value is the mean per second since the previous line, and the field is a counter."""


def _key_by_column_name(*names_and_columns: tuple[str, LogColumn]) -> dict[str, LogColumn]:
    """{name of a column: what it means}. names_and_columns: (names that are separated by spaces, what they mean)."""
    return {column_name: log_column for column_names, log_column in names_and_columns for column_name in column_names.split()}


_SMI_LOG_COLUMNS = {
    column.query: LogColumn(column.sample_field, MIB if column.query == "memory.used" else 1) for column in SMI_COLUMNS
}
# Names of nvidia-smi --query-gpu, of nvidia-smi dmon, of dcgmi dmon, and of dcgm-exporter without the prefix DCGM_FI_DEV_.
GPU_COLUMNS = _SMI_LOG_COLUMNS | _key_by_column_name(
    ("utilization.gpu gputl gpu_util", LogColumn("utilization_pct")),
    ("memory.total fbttl fb_total", LogColumn("memory_total_bytes", MIB)),
    ("fb fbusd fb_used", LogColumn("memory_used_bytes", MIB)),
    ("power.draw.instant power.draw.average pwr power power_usage", LogColumn("power_w")),
    ("gtemp tmptr gpu_temp", LogColumn("temperature_c")),
    ("clocks.current.sm pclk smclk sm_clock", LogColumn("sm_clock_mhz")),
    ("clocks.current.memory mclk mmclk mem_clock", LogColumn("memory_clock_mhz")),
    ("totec total_energy_consumption", LogColumn("energy_j", 1e-3)),
    ("sbecc ecc_sbe_vol_total", LogColumn("ecc_corrected")),
    ("dbecc ecc_dbe_vol_total", LogColumn("ecc_uncorrected")),
    ("clocks_event_reasons.active clocks_throttle_reasons", LogColumn("throttled")),
)
DMON_COLUMNS = GPU_COLUMNS | {"sm": LogColumn("utilization_pct")}
# Names of sar, of sadf -d (as sar), of sadf -j, and of columns with values of psutil.
HOST_COLUMNS = _key_by_column_name(
    ("%idle idle", LogColumn("idle_pct")),
    ("%iowait iowait", LogColumn("iowait_pct")),
    ("cpu_percent cpu_pct cpu% cpu_usage_percent", LogColumn("cpu_pct")),
    ("kbmemused", LogColumn("memory_used_bytes", KIB)),
    ("memused", LogColumn("memory_used_bytes", KIB)),
    ("memory_used mem_used virtual_memory.used memory.used ram_used", LogColumn("memory_used_bytes")),
    ("memory_total mem_total virtual_memory.total memory.total", LogColumn("memory_total_bytes")),
    ("disk_read_bytes read_bytes", LogColumn("disk_read_bytes")),
    ("disk_write_bytes write_bytes", LogColumn("disk_write_bytes")),
)
NIC_COLUMNS = _key_by_column_name(
    ("rxkb/s rxkb", LogColumn("rx_bytes", KIB, is_rate=True)),
    ("txkb/s txkb", LogColumn("tx_bytes", KIB, is_rate=True)),
    ("bytes_recv net_bytes_recv net_recv_bytes rx_bytes", LogColumn("rx_bytes")),
    ("bytes_sent net_bytes_sent net_sent_bytes tx_bytes", LogColumn("tx_bytes")),
    ("rx_packets packets_recv", LogColumn("rx_packets")),
    ("tx_packets packets_sent", LogColumn("tx_packets")),
    ("rx_errors errin", LogColumn("rx_errors")),
    ("tx_errors errout", LogColumn("tx_errors")),
    ("rx_dropped dropin", LogColumn("rx_dropped")),
    ("tx_dropped dropout", LogColumn("tx_dropped")),
)
# Names in step logs, after `normalize_column_name`. torchtitan, nanotron, Megatron-LM, the Trainer of transformers and
# Lightning use some of them.
STEP_COLUMNS = _key_by_column_name(
    ("step steps iteration iter global_step _step train/global_step trainer/global_step", LogColumn("step")),
    ("rank", LogColumn("rank")),
    ("loss train_loss train/loss training_loss lm_loss loss/train train_loss_step loss_metrics/global_avg_loss",
     LogColumn("loss")),
    ("step_ms step_time_ms iter_time_ms iteration_time_ms time_per_iteration_ms elapsed_time_per_iteration_ms time_ms",
     LogColumn("step_ms")),
    ("step_s step_time_s iter_time_s iteration_time_s time_per_step_s seconds_per_step sec_per_step time_metrics/end_to_end_s",
     LogColumn("step_ms", 1e3)),
    ("step_time iter_time iteration_time time_per_step time_per_iteration", LogColumn("step_time")),
    ("tokens tokens_per_step num_tokens ntokens", LogColumn("tokens")),
    ("samples images examples samples_per_step images_per_step", LogColumn("samples")),
    ("tokens_per_second tokens_per_sec tokens_per_s tokens/s tokens/sec tok/s tok_per_s", LogColumn("tokens_per_s")),
    ("tps throughput_tps tokens_per_sec_per_gpu tokens_per_second_per_gpu tokens/s/gpu", LogColumn("device_tokens_per_s")),
    ("samples_per_second samples_per_sec samples/s images_per_second images/s images_per_sec", LogColumn("samples_per_s")),
    ("allocated_bytes peak_memory_bytes max_memory_allocated", LogColumn("allocated_bytes")),
    ("allocated_gib peak_memory_gib memory/max_active_gib", LogColumn("allocated_bytes", GIB)),
    ("reserved_bytes max_memory_reserved", LogColumn("reserved_bytes")),
    ("memory memory/max_reserved_gib", LogColumn("reserved_bytes", GIB)),
)  # fmt: skip
TIME_COLUMNS = ("timestamp", "wall_s", "wall_time", "_timestamp", "time", "datetime", "date", "created_at")


def normalize_column_name(column_name: str) -> str:
    """The name of a column in the form that the tables of this file have: `Step time (ms)` becomes `step_time_ms`."""
    return re.sub(r"[\s-]+", "_", re.sub(r"\s*[\[(](\w+)[\])]\s*$", r"_\1", column_name.strip().lower()))[:80]


def split_column_unit(column_heading: str) -> tuple[str, str]:
    """The name and the unit in the heading of a column: `memory.used [MiB]` gives (memory.used, MiB)."""
    heading_match = re.fullmatch(r"\s*([^\[]*?)\s*(?:\[([^\]]*)\])?\s*", column_heading)
    return (heading_match[1].lower(), heading_match[2] or "") if heading_match else (column_heading.strip().lower(), "")
