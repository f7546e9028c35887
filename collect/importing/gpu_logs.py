"""Reads telemetry of GPUs: nvidia-smi (--query-gpu, dmon, pmon), dcgmi dmon, and the text of dcgm-exporter."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence

from collect.importing.log_columns import DMON_COLUMNS, GPU_COLUMNS, split_column_unit
from collect.importing.log_rows import LogRows
from shardlab.terminal import printable

_GPU_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z-]{1,64}")
_METRIC_LABEL = re.compile(r'(\w+)="([^"]{0,200})"')
_METRIC_LINE = re.compile(r"DCGM_FI_(?:DEV|PROF)_(\w+)\{(.*)\}\s+(\S+)(?:\s+(\d+))?\s*")
DATE_NAMES, TIME_NAMES = ("date", "yyyymmdd"), ("time",)


def name_gpu(uuid: object, gpu_number: object) -> str | None:
    """The name of a GPU: its UUID, or its number on the host; None if neither is known."""
    if isinstance(uuid, str) and _GPU_UUID.fullmatch(uuid.strip()):
        return uuid.strip()
    number_text = str(gpu_number).strip()
    return f"gpu{int(number_text)}" if number_text.isdecimal() and len(number_text) < 6 else None


def read_query_csv(log_rows: LogRows, lines: Sequence[str], column_names: Sequence[str] | None) -> None:
    """Read the output of `nvidia-smi --query-gpu`, with or without units. column_names: the names of the columns if there is no
    heading."""
    headings = [split_column_unit(column_name) for column_name in column_names] if column_names else []
    for line in lines:
        try:
            (cell_texts,) = csv.reader([line], skipinitialspace=True)
        except (csv.Error, ValueError):
            cell_texts = []
        if is_query_heading(line):
            headings = (
                headings if column_names else [split_column_unit(cell) for cell in cell_texts]
            )  # the heading occurs again if the program was started again
            continue
        value_by_column = {
            column_name: f"{cell_text.strip()} {column_unit}" if cell_text.strip()[-1:].isdigit() else cell_text.strip()
            for (column_name, column_unit), cell_text in zip(headings, cell_texts)
        }
        plain = {column_name: cell_text.strip() for (column_name, _), cell_text in zip(headings, cell_texts)}
        gpu_name = name_gpu(plain.get("uuid", plain.get("gpu_uuid")), plain.get("index", plain.get("gpu_index")))
        if gpu_name is None and not {"uuid", "gpu_uuid", "index", "gpu_index"} & plain.keys():
            gpu_name = plain.get("pci.bus_id", plain.get("gpu_bus_id", "gpu0"))[:40]
        if gpu_name is None or len(cell_texts) != len(headings) or not headings:
            log_rows.unread_count += 1
            continue
        wall_s = log_rows.start_moment(plain.get("timestamp"), gpu_name)
        if wall_s is not None:
            log_rows.add_gpu(wall_s, gpu_name, value_by_column, GPU_COLUMNS)


def is_query_heading(line: str) -> bool:
    """Whether a line has the names of columns of `nvidia-smi --query-gpu`, with or without units."""
    heading_names = [split_column_unit(cell)[0] for cell in line.split(",")]
    column_names = {"timestamp", "uuid", "gpu_uuid", "index", "name", "gpu_name", "pstate", "pci.bus_id", *GPU_COLUMNS}
    return any("." in name and name in GPU_COLUMNS for name in heading_names) or (
        len(heading_names) > 1 and all(name in column_names for name in heading_names)
    )


def read_dmon_table(log_rows: LogRows, lines: Sequence[str]) -> None:
    """Read the tables of `nvidia-smi dmon` and `pmon` and of `dcgmi dmon`, whose headings begin with #."""
    column_names: list[str] = []
    for line in lines:
        cell_texts = re.split(r"\s*,\s*|\s+", line.lstrip("# ").strip()) if line.strip() else []
        if line.startswith("#"):
            if "gpu" in (lowered_texts := [cell.lower() for cell in cell_texts]) or lowered_texts[:1] == ["entity"]:
                column_names = lowered_texts
            continue  # a second line of the heading has the units
        if not cell_texts or line.split()[:1] == ["ID"]:
            continue
        if column_names[:1] == ["entity"]:  # its cells are `GPU 0`, and other entities, such as links, are not read
            if cell_texts[0].lower() != "gpu":
                log_rows.unread_count += cell_texts[0].lower() not in ("gpu-i", "gpu-ci", "switch", "link", "cpu", "core", "sw")
                continue
            cell_texts = cell_texts[1:]
        values = dict(zip(column_names, cell_texts))
        gpu_name = name_gpu(None, values.get("gpu", values.get("entity", "")))
        if gpu_name is None or len(cell_texts) < len(column_names) - ("command" in column_names):
            log_rows.unread_count += 1
            continue
        time_text = next((values[name] for name in TIME_NAMES if name in values), None)
        if (date_text := next((values[name] for name in DATE_NAMES if name in values), None)) is not None:
            time_text = f"{date_text} {time_text}"
        wall_s = log_rows.start_moment(time_text, f"{gpu_name} {values.get('pid', '')}")
        if wall_s is None:
            continue
        if "pid" not in values:
            log_rows.add_gpu(wall_s, gpu_name, values, DMON_COLUMNS)
        else:
            sample = log_rows.add_gpu(wall_s, gpu_name, {}, {})
            sample.processes = (sample.processes or 0) + (values["pid"].isdecimal() and "c" in values.get("type", "").lower())


def read_exporter_text(log_rows: LogRows, lines: Sequence[str]) -> None:
    """Read what dcgm-exporter answers to Prometheus. A file may have the answers of several moments, one after the other."""
    for line in lines:
        if line.startswith("#") or not line.strip():
            continue
        metric_match = _METRIC_LINE.fullmatch(line)
        labels = dict(_METRIC_LABEL.findall(metric_match[2])) if metric_match else {}
        gpu_name = name_gpu(labels.get("UUID", labels.get("uuid")), labels.get("gpu"))
        if metric_match is None or gpu_name is None or labels.get("GPU_I_ID"):
            log_rows.unread_count += 1
            continue
        wall_s = log_rows.start_moment(metric_match[4], f"{metric_match[1]} {gpu_name}")
        if wall_s is None:
            continue
        metric_name, host_name = (metric_match[1].lower(), printable.clean_to_one_line(labels.get("Hostname", "")) or None)
        gpu_sample = log_rows.add_gpu(wall_s, gpu_name, {metric_name: metric_match[3]}, GPU_COLUMNS, host_name)
        if metric_name == "xid_errors" and re.fullmatch(r"[1-9]\d{0,4}(\.0*)?", metric_match[3]):
            gpu_sample.xids = [int(float(metric_match[3]))]
