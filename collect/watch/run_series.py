"""The curves of one run: loss, step times and telemetry, from the records that its ranks and samplers have written so far."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence

import msgspec

from collect.notation import GIB, MB
from collect.watch.curve import LiveCurve
from collect.watch.followed_records import FollowedRecords
from shardlab import suspension
from shardlab.progress import Progress
from shardlab.record import Sample, StepRecord
from shardlab.run import Run
from shardlab.rundir import RunDir
from shardlab.suspension import Pause

LOSS, STEP_TIME = "Loss", "Step time (ms)"
GPU_BUSY, GPU_MEMORY, GPU_POWER = "GPU busy (%)", "GPU memory in use (GiB)", "GPU power (W)"
CPU_BUSY, MEMORY, SENT = "Processors busy (%)", "Memory of the hosts in use (%)", "Sent on the network (MB/s)"
OF_STEPS = (LOSS, STEP_TIME)
OF_TIME = (GPU_BUSY, GPU_MEMORY, GPU_POWER, CPU_BUSY, MEMORY, SENT)
MOST_LINES = 16  # of a figure
MOST_WAITING = 200_000  # steps that some ranks have recorded and others have not, as where the records of a rank are missing
_HOST = re.compile(r"([^/]+)\.jsonl")
_UUID_CHARACTERS = 12  # of the UUID of a GPU, such as GPU-5c3f9a21: enough to tell the GPUs of a host apart


class WorldStep:
    """A step as far as ranks have recorded it."""

    __slots__ = ("_weighed_loss", "_weight", "ranks", "step_ms", "watched")

    def __init__(self) -> None:
        self.ranks, self.step_ms, self.watched = 0, 0.0, False
        self._weighed_loss, self._weight = 0.0, 0

    def add(self, record: StepRecord) -> None:
        """Add the record of a rank."""
        self.ranks += 1
        self.step_ms = max(self.step_ms, record.step_ms)
        self.watched |= record.watched
        if record.loss is not None:
            self._weighed_loss += record.loss * record.units
            self._weight += record.units

    @property
    def loss(self) -> float | None:
        """The mean over the global batch, as `collect.sources.steps.of_world` has it."""
        return self._weighed_loss / self._weight if self._weight else None


class Counters(msgspec.Struct, frozen=True):
    """The bytes that each interface of a host had sent at a moment."""

    t_s: float
    boot_id: str
    sent: dict[str, int]


class RunSeries:
    """What the records of a run say, read as they grow. pauses: known suspensions; began_s: when the run was started."""

    def __init__(self, folder: RunDir, run: Run, began_s: float, pauses: Sequence[Pause]) -> None:
        self.folder, self.run, self.began_s, self.pauses = folder, run, began_s, list(pauses)
        self._begin()

    def _begin(self) -> None:
        self.progress = Progress()
        self.last_record_s = 0.0  # by the clocks of the nodes
        self.left_out: dict[str, set[str]] = {}  # the lines that a figure has no room for
        self.curves: dict[str, dict[str, LiveCurve]] = {title: {} for title in (*OF_STEPS, *OF_TIME)}
        self._ranks = [FollowedRecords(str(self.folder.steps_file(rank)), StepRecord) for rank in range(self.run.cell.gpus)]
        self._hosts: dict[str, FollowedRecords[Sample]] = {}
        self._waiting: dict[int, WorldStep] = {}
        self._counters: dict[str, Counters] = {}

    def read_new(self) -> bool:
        """Read what was appended; returns whether there was anything."""
        changed = False
        while (part := self._read_part()) is not False:
            changed = True
            if part is None:  # a file was replaced, as where a run resumes from a checkpoint
                self._begin()
        return changed

    def _read_part(self) -> bool | None:
        """Read the next records of each file, so that no rank is far ahead of another; returns whether there were any."""
        changed = False
        if _is_folder(f"{self.folder.path}/steps"):
            for rank, file in enumerate(self._ranks):
                steps = file.new()
                if steps is None:
                    return None
                changed |= bool(steps)
                self._add_steps(rank, steps)
        for host in self._sampled_hosts():
            samples = self._hosts.setdefault(host, FollowedRecords(str(self.folder.samples_file(host)), Sample)).new()
            if samples is None:
                return None
            changed |= bool(samples)
            for sample in samples:
                self._add_sample(host, sample)
        return changed

    def _sampled_hosts(self) -> list[str]:
        path = f"{self.folder.path}/samples"
        names = sorted(os.listdir(path)) if _is_folder(path) else []  # noqa: PTH208 - names alone
        return [match[1] for name in names if (match := _HOST.fullmatch(name))]

    def _add_steps(self, rank: int, records: Sequence[StepRecord]) -> None:
        records = suspension.set_aside(records, self.pauses)
        if rank == 0:
            self.progress.add(records)
        for record in records:
            self.last_record_s = max(self.last_record_s, record.wall_s)
            if record.warmup:
                continue
            step = self._waiting.setdefault(record.step, WorldStep())
            step.add(record)
            if step.ranks == len(self._ranks):
                self._add_world(record.step, self._waiting.pop(record.step))
            elif len(self._waiting) > MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]

    def _add_world(self, number: int, step: WorldStep) -> None:
        if step.loss is not None:
            self._add(LOSS, "", number, step.loss)
        if not step.watched:
            self._add(STEP_TIME, "", number, step.step_ms)

    def _add_sample(self, host: str, sample: Sample) -> None:
        self.last_record_s = max(self.last_record_s, sample.wall_s)
        at_s = sample.wall_s - self.began_s
        self._add(CPU_BUSY, host, at_s, sample.cpu_pct)
        if sample.memory_used_bytes is not None and sample.memory_total_bytes:
            self._add(MEMORY, host, at_s, 100 * sample.memory_used_bytes / sample.memory_total_bytes)
        self._add(SENT, host, at_s, self._sent_mb_per_s(host, sample))
        for gpu in sample.gpus or ():
            line = f"{host} {gpu.uuid[:_UUID_CHARACTERS]}"
            self._add(GPU_BUSY, line, at_s, gpu.utilization_pct)
            self._add(GPU_MEMORY, line, at_s, gpu.memory_used_bytes / GIB if gpu.memory_used_bytes is not None else None)
            self._add(GPU_POWER, line, at_s, gpu.power_w)

    def _sent_mb_per_s(self, host: str, sample: Sample) -> float | None:
        """Since the sample before, over physical interfaces, or over virtual ones if the host has no physical one."""
        by_kind: dict[str, dict[str, int]] = {}
        for nic in sample.nics or ():
            if nic.tx_bytes is not None:
                by_kind.setdefault(nic.kind, {})[nic.name] = nic.tx_bytes
        now = Counters(sample.t_s, sample.boot_id, by_kind.get("physical") or by_kind.get("virtual") or {})
        before, self._counters[host] = self._counters.get(host), now
        if before is None or before.boot_id != now.boot_id or now.t_s <= before.t_s:
            return None
        grown = [value - before.sent[name] for name, value in now.sent.items() if name in before.sent]
        if not grown or min(grown) < 0:  # a counter began anew
            return None
        return sum(grown) / (now.t_s - before.t_s) / MB

    def _add(self, title: str, line: str, x: float, value: float | None) -> None:
        """Add a value to a line of a figure; None: it is not known."""
        if value is None:
            return
        lines = self.curves[title]
        if line not in lines:
            if len(lines) >= MOST_LINES:
                self.left_out.setdefault(title, set()).add(line)
                return
            lines[line] = LiveCurve()
        lines[line].add(x, value)


def _is_folder(path: str) -> bool:
    """Whether it is a folder and no link to a folder, which could lead out of the run."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
