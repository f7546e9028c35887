"""Samples GPUs through the program nvidia-smi, if it is installed but the library NVML cannot be loaded.

A line with an unexpected format is left out and counted. One process of nvidia-smi runs in a loop of its own, because starting
nvidia-smi takes half a second to several seconds.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

from collect.sampler.source import TelemetrySource
from shardlab.hardware.nvml import convert_throttle_bits
from shardlab.runs.record import GpuSample, Sample

MIB = 2**20
SMI_PROGRAM = "nvidia-smi"
MOST_LINE_BYTES = 4096  # a line with more bytes than this is not treated as output of nvidia-smi
MOST_SAMPLE_BYTES = 1 << 20  # the most bytes that are read for one sample
MOST_GPUS = 64
_GPU_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z-]{1,64}")
_PLAIN_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?")
_PR_SET_PDEATHSIG = 1


def parse_number(number_text: str) -> float:
    """Parse a number that nvidia-smi printed without a unit. Raises ValueError for other texts, such as [N/A]."""
    if not _PLAIN_NUMBER.fullmatch(number_text):
        raise ValueError(f"{number_text!r} is no measured value")
    return float(number_text)


class SmiColumn(NamedTuple):
    """A column of the output of `nvidia-smi --query-gpu`."""

    query: str
    """The name that nvidia-smi gives the column."""
    sample_field: str
    """The field of GpuSample that gets the value."""
    parse: Callable[[str], Any]
    """Converts the text in the column into the value."""


SMI_COLUMNS = (
    SmiColumn("utilization.gpu", "utilization_pct", parse_number),
    SmiColumn("memory.used", "memory_used_bytes", lambda text: int(parse_number(text) * MIB)),
    SmiColumn("power.draw", "power_w", parse_number),
    SmiColumn("temperature.gpu", "temperature_c", parse_number),
    SmiColumn("clocks.sm", "sm_clock_mhz", parse_number),
    SmiColumn("clocks.mem", "memory_clock_mhz", parse_number),
    SmiColumn("ecc.errors.corrected.volatile.total", "ecc_corrected", lambda text: int(parse_number(text))),
    SmiColumn("ecc.errors.uncorrected.volatile.total", "ecc_uncorrected", lambda text: int(parse_number(text))),
    SmiColumn("clocks_throttle_reasons.active", "throttled", lambda text: convert_throttle_bits(int(text, 16))),
)


class SmiSource(TelemetrySource):
    """Adds to each sample a `GpuSample` for every GPU for which nvidia-smi wrote a line since the previous sample.

    why_absent: why nvidia-smi cannot be used; None if nvidia-smi can be used.
    """

    def __init__(self, hz: float) -> None:
        super().__init__()
        self.why_absent: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._unparsed_bytes = b""
        self._lost_uuids: set[str] = set()
        program_path = shutil.which(SMI_PROGRAM)
        if program_path is None:
            self.why_absent = f"{SMI_PROGRAM} is not installed"
            return
        query_columns = ",".join(["uuid", *(column.query for column in SMI_COLUMNS)])
        period_ms = max(round(1000 / hz), 1)
        command = [program_path, f"--query-gpu={query_columns}", "--format=csv,noheader,nounits", f"--loop-ms={period_ms}"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        except OSError as error:
            self.why_absent = f"{SMI_PROGRAM} cannot be started: {error.strerror}"
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def fill(self, sample: Sample) -> None:
        """Set the field `gpus` of the sample from the last line of nvidia-smi for each GPU; None if there is no new line."""
        latest_sample_by_uuid: dict[str, GpuSample] = {}
        for line in self._read_new_lines():
            if (gpu_sample := self._parse_gpu(line)) is not None and (
                gpu_sample.uuid in latest_sample_by_uuid or len(latest_sample_by_uuid) < MOST_GPUS
            ):
                latest_sample_by_uuid[gpu_sample.uuid] = gpu_sample
        sample.gpus = list(latest_sample_by_uuid.values()) or None

    def close(self) -> None:
        """End the process of nvidia-smi."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _read_new_lines(self) -> list[str]:
        """The complete lines that nvidia-smi wrote since the last call of this function."""
        if self._process is None or self._process.stdout is None:
            return []
        with contextlib.suppress(BlockingIOError):
            while len(self._unparsed_bytes) < MOST_SAMPLE_BYTES and (part := os.read(self._process.stdout.fileno(), 65536)):
                self._unparsed_bytes += part
        complete_lines, last_newline, self._unparsed_bytes = self._unparsed_bytes.rpartition(b"\n")
        if len(self._unparsed_bytes) > MOST_LINE_BYTES:
            self._unparsed_bytes = b""
            self.failures[f"line of {SMI_PROGRAM}"] += 1
        if self._process.poll() is not None:
            self.remarks.append(f"{SMI_PROGRAM} ended with code {self._process.returncode}")
            self.close()
        return complete_lines.decode(errors="replace").splitlines() if last_newline else []

    def _parse_gpu(self, line: str) -> GpuSample | None:
        """None if the line does not have the queried columns. A field stays None if its column cannot be parsed."""
        try:
            (cells,) = csv.reader([line[:MOST_LINE_BYTES]], skipinitialspace=True)
        except (csv.Error, ValueError):
            cells = []
        if len(cells) != len(SMI_COLUMNS) + 1 or not _GPU_UUID.fullmatch(cells[0]):
            self.failures[f"line of {SMI_PROGRAM}"] += 1
            return None
        gpu_sample = GpuSample(uuid=cells[0])
        for column, cell_text in zip(SMI_COLUMNS, cells[1:], strict=True):
            if "lost" in cell_text.lower():
                gpu_sample.lost = True
            with contextlib.suppress(ValueError):
                setattr(gpu_sample, column.sample_field, column.parse(cell_text))
        if gpu_sample.lost and gpu_sample.uuid not in self._lost_uuids:
            self._lost_uuids.add(gpu_sample.uuid)
            self.remarks.append(f"{gpu_sample.uuid} was lost")
        return GpuSample(uuid=gpu_sample.uuid, lost=True) if gpu_sample.lost else gpu_sample


def _die_with_parent() -> None:
    """Ask the kernel, in the new process, to kill nvidia-smi when the sampler ends, even if the sampler is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
