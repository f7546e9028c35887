"""The instrument `checkpoints`: saves checkpoints at intervals and before the time limit of the job.

A run that is started again resumes from the newest checkpoint. How long before the time limit it saves: `LAST_SAVE_S` in
jobs/supervisor/attempt.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from shardlab.errors import InputError
from shardlab.files import files
from shardlab.runs import checkpoint, suspension
from shardlab.runs.checkpoint import CheckpointManifest
from shardlab.runs.record import SCHEMA, StepRecord
from shardlab.runs.run import SAVE_AT, Run
from shardlab.runs.rundir import RunDir
from trainers import menu
from trainers.checkpointing.saver import CheckpointSaver
from trainers.instrument import Instrument, TrainTime

if TYPE_CHECKING:
    from shardlab.matrix.cell import CheckpointSettings
    from trainers.engine import Checkpointable
    from trainers.ranks.ranks import Peers, Ranks


# How many seconds a rank waits if the run may have been suspended. The supervisor resumes at the same time as the rank, and
# needs less than this time to record the suspension as an event.
RECORDED_WITHIN_S = 1.0


class OutOfTime(Exception):
    """Raised when all ranks have saved a checkpoint and must end, because of a signal or because the time limit is near. The
    message says why, and after which step. signal: the name of the signal that this rank received, or ''."""

    def __init__(self, message: str, signal: str) -> None:
        super().__init__(message)
        self.signal = signal


class ResumePoint(msgspec.Struct, frozen=True):
    """The point from which a run resumes."""

    step: int
    """Number of timed steps before this point."""
    records: Sequence[StepRecord]
    """The records of these steps on this rank; empty if the checkpoint is from a run of another cell."""


class Checkpoints(Instrument):
    """Saves a checkpoint of the run after every n-th step, and at the end of the available time.

    After SIGUSR1 or SIGTERM to any rank, or at the time in the variable SHARDLAB_SAVE_AT, all ranks save and end after the same
    step. They agree on this step by an all-reduce that starts after one step and is read after the next step, so that no rank
    waits for it. A second SIGTERM ends the rank at once.
    """

    name = "checkpoints"

    def __init__(
        self,
        settings: CheckpointSettings,
        engine: Checkpointable,
        run: Run,
        run_dir: RunDir,
        ranks: Ranks,
        peers: Peers,
        steps_per_epoch: int,
        train_time: TrainTime,
    ) -> None:
        self._settings, self._engine, self._run, self._run_dir = settings, engine, run, run_dir
        self._rank, self._peers, self._world = ranks.rank, peers, run.training_cell.gpus
        # If the nodes share no folder, each node has its own part of a checkpoint. One rank per node creates this part and
        # gives it its final name.
        self._leads_node = run.separate_folders and ranks.local_rank == 0 and ranks.rank != 0
        self._interval_steps = settings.interval_steps(steps_per_epoch)
        # Parameter servers are not in the group and do not call new_group, so the group needs local synchronization. Without
        # parameter servers all ranks call new_group, and torch can give the group a safer name.
        has_servers = self._world < ranks.world_size
        group = dist.new_group(list(range(self._world)), backend="gloo", use_local_synchronization=has_servers)
        assert group is not None
        self._group, self._saver = group, CheckpointSaver(engine, ranks.rank, self._world, ranks.device, group)
        self._train_time = train_time
        self._load_s: float | None = None
        self._saved_step, self._save_count, self._checkpoint_bytes, self._save_s, self._agreement_s = 0, 0, 0, 0.0, 0.0
        self._end_reason = ""  # why the run has to end; empty as long as this rank knows no reason
        self._end_signal = ""  # the name of the last signal that this rank received; empty if it received none
        self._pending_agreement: tuple[torch.Tensor, dist.Work] | None = None
        self._save_at = self._first_save_at = float(os.environ.get(SAVE_AT, "inf"))
        self._began_s, self._last_check_s = time.time(), time.monotonic()
        for signal_number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(signal_number, self._handle_signal)

    def _handle_signal(self, signal_number: int, _frame: object) -> None:
        self._end_signal = signal.Signals(signal_number).name
        self._end_reason = f"signal {self._end_signal}"
        if signal_number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def resume(self) -> ResumePoint | None:
        """Load the newest undamaged checkpoint of this run, or of the earlier attempts that run.json names, into the engine.

        Returns None if there is no checkpoint. Otherwise the step file of each rank afterwards contains the records up to the
        checkpoint and no later records. A collective.

        Raises InputError if the run has records but no checkpoint from which it can resume, or if its nodes share no folder and
        none of the checkpoints that run.json names can be used.
        """
        run_dirs = [self._run_dir, *(RunDir(self._run_dir.path.parent / name) for name in self._run.resume)]
        for candidate_run, folder in self._list_candidates(run_dirs):
            manifest = checkpoint.read_manifest(folder)
            damage = manifest if isinstance(manifest, str) else self._find_damage(folder, manifest, candidate_run)
            if self._is_true_on_any_rank(damage is not None):
                if damage is not None:
                    self._write_event("checkpoint_passed_over", why=damage)
                continue
            assert isinstance(manifest, CheckpointManifest)
            is_same_cell = manifest.cell_hash == self._run.cell_hash
            records = _read_records(candidate_run, self._rank, manifest.step) if is_same_cell else []
            files.make_folder(self._run_dir.steps_file(self._rank).parent)
            record_lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
            files.write_atomic(self._run_dir.steps_file(self._rank), record_lines)
            self._load_checkpoint(folder, manifest)
            if self._rank == 0:
                for begin, end in (
                    suspension.read_suspensions(candidate_run.read_events())
                    if is_same_cell and candidate_run is not self._run_dir
                    else ()
                ):
                    # The suspensions of the earlier attempt are copied, because its records and times are part of this run now.
                    self._write_event(suspension.SUSPENDED_EVENT, seconds=end - begin, ended_s=end)
                self._write_event("resumed", step=manifest.step, run=candidate_run.run_id)
            self._saved_step = manifest.step if candidate_run is self._run_dir else 0
            self._train_time.earlier_steps_s = manifest.train_time_s if is_same_cell else 0.0
            return ResumePoint(manifest.step, records)
        # If the nodes share no folder, the first node has checked a checkpoint and sent it to the other nodes. So all nodes
        # should have a usable checkpoint, and it is an error if they have none.
        if self._run.separate_folders and self._run.resume:
            raise InputError(f"no checkpoint of {', '.join(self._run.resume)} can be used on all nodes; see the run's events.")
        if self._run_dir.steps(self._rank).records:
            raise InputError(f"{self._run_dir.path}: has records, but no usable checkpoint to resume from; see its events.")
        return None

    def _load_checkpoint(self, folder: Path, manifest: CheckpointManifest) -> None:
        """Load a checkpoint into the engine, and measure how long it takes until all ranks have loaded it. A collective."""
        start_s = time.perf_counter()
        self._saver.load(folder, manifest)
        self._peers.barrier()
        self._load_s = time.perf_counter() - start_s

    def _find_damage(self, folder: Path, manifest: CheckpointManifest, run_dir: RunDir) -> str | None:
        """Why this run cannot resume from a checkpoint, as a sentence, or None if it can. Each rank checks its share of the
        files and its own records. run_dir: the run that saved the checkpoint."""
        if manifest.cell_hash == self._run.cell_hash:
            timed_steps = [record.step for record in _read_records(run_dir, self._rank, manifest.step) if not record.warmup]
            if timed_steps != list(range(manifest.step - len(timed_steps) + 1, manifest.step + 1)) or not timed_steps:
                return f"{folder}: the records of rank {self._rank} end before step {manifest.step} of the checkpoint"
        else:
            options = [option.name for option in menu.find_workload_of_cell(self._run.training_cell).options]
            if (
                why := checkpoint.explain_refused_resume(run_dir.read_run().cell, self._run.cell, manifest.layout, options)
            ) is not None:
                return f"{folder}: {why}"
        return checkpoint.find_damage(folder, manifest.files[self._rank :: self._world])

    def is_due(self, step: int) -> bool:
        return step % self._interval_steps == 0

    def after_step(self, step: int) -> None:
        start_s, train_time_s = time.perf_counter(), self._train_time.read_seconds()
        if self._rank == 0 or self._leads_node:
            checkpoint.begin_checkpoint(self._run_dir.path, step)
        self._peers.barrier()
        checkpoint_files, size = self._saver.save(checkpoint.make_temp_path(self._run_dir.path, step), self._settings.layout)
        if self._run.separate_folders:
            if self._leads_node:
                checkpoint.publish_checkpoint(self._run_dir.path, step)
            self._peers.barrier()  # the manifest, which is written last, says that the parts of all nodes are complete
        if self._rank == 0:
            manifest = CheckpointManifest(
                schema=SCHEMA,
                step=step,
                world=self._world,
                layout=self._settings.layout,
                strategy=self._run.cell.strategy,
                tp=self._run.training_cell.tp,
                cell_hash=self._run.cell_hash,
                train_time_s=train_time_s,
                numbers=self._engine.collect_numbers(),
                files=checkpoint_files,
            )
            checkpoint.commit_checkpoint(self._run_dir.path, manifest, self._settings.keep)
        self._peers.barrier()
        if self._leads_node:
            checkpoint.remove_old_checkpoints(self._run_dir.path, self._settings.keep)
        self._saved_step, self._save_count, self._checkpoint_bytes = step, self._save_count + 1, size
        self._save_s += time.perf_counter() - start_s

    def ends_run(self, step: int) -> bool:
        """Whether all ranks save a checkpoint and end after this step. All ranks return the same."""
        start_s = time.perf_counter()
        if not self._end_reason and self._is_save_time():
            self._end_reason = "its time limit is near"
        must_end = self._agree_to_end()
        self._agreement_s += time.perf_counter() - start_s
        return must_end

    def _is_save_time(self) -> bool:
        """Whether the time in the variable SHARDLAB_SAVE_AT has come. The durations of suspensions are added to this time as
        soon as the supervisor has recorded them."""
        elapsed_s, self._last_check_s = time.monotonic() - self._last_check_s, time.monotonic()
        if time.time() < self._save_at:
            return False
        if elapsed_s > suspension.MIN_SUSPENSION_S:  # the last call was long ago: the run may have been suspended since
            time.sleep(RECORDED_WITHIN_S)
        new_suspensions = [
            suspended_span
            for suspended_span in suspension.read_suspensions(self._run_dir.read_events())
            if suspended_span[1] > self._began_s
        ]
        self._save_at = self._first_save_at + suspension.sum_durations_s(new_suspensions)
        return time.time() >= self._save_at

    def _agree_to_end(self) -> bool:
        must_end = False
        if self._pending_agreement is not None:
            flag, all_reduce_work = self._pending_agreement
            all_reduce_work.wait()
            must_end = bool(flag.item())
        flag = torch.tensor([float(bool(self._end_reason))])
        all_reduce_work = dist.all_reduce(flag, group=self._group, async_op=True)
        assert all_reduce_work is not None
        self._pending_agreement = (flag, all_reduce_work)
        return must_end

    def end_run(self, step: int) -> OutOfTime:
        """Save a checkpoint, unless this step is already saved, and return the exception with which the rank ends."""
        if self._saved_step != step:
            self.after_step(step)
        end_reason = self._end_reason or "another rank was told to end"
        return OutOfTime(f"{end_reason}: saved after step {step}", self._end_signal)

    def collect_results(self) -> dict[str, Any]:
        """saves: number of saved checkpoints. bytes: size of the last checkpoint. save_s: mean seconds of this rank per
        checkpoint. load_s: seconds of this rank to load a checkpoint, without the check of its checksums; absent if none was
        loaded. agreeing_s: seconds of this rank, in all steps together, for the agreement whether to end. A collective."""
        if self._pending_agreement is not None:
            self._pending_agreement[1].wait()  # no collective may be unfinished when the process group is destroyed
        results: dict[str, Any] = {"saves": self._save_count, "agreeing_s": round(self._agreement_s, 6)}
        if self._save_count:
            results |= {"bytes": self._checkpoint_bytes, "save_s": round(self._save_s / self._save_count, 6)}
        # If the nodes share no folder, only the first node has the manifest.
        if self._settings.time_loading and self._saved_step and not self._run.separate_folders:
            folder = checkpoint.make_checkpoint_path(self._run_dir.path, self._saved_step)
            manifest = checkpoint.read_manifest(folder)
            if isinstance(manifest, str):
                raise InputError(manifest)
            self._load_checkpoint(folder, manifest)
        return results if self._load_s is None else {**results, "load_s": round(self._load_s, 6)}

    def _list_candidates(self, run_dirs: Sequence[RunDir]) -> Iterator[tuple[RunDir, Path]]:
        """Yields (run, path) for each checkpoint that rank 0 finds: for each run in the order of `run_dirs`, the newest
        first. A
        collective: all ranks use the list of rank 0, because a network file system may show other files to other nodes."""
        local_checkpoints = [
            (run_index, path) for run_index, run in enumerate(run_dirs) for path in checkpoint.list_checkpoints(run.path)
        ]
        for position in range(int(self._peers.all_gather_numbers([float(len(local_checkpoints))])[0, 0])):
            candidate = [0.0, 0.0]
            if self._rank == 0:
                candidate = [
                    float(local_checkpoints[position][0]),
                    float(checkpoint.parse_checkpoint_step(local_checkpoints[position][1])),
                ]
            run_number, step = (int(value) for value in self._peers.all_gather_numbers(candidate)[0])
            yield run_dirs[run_number], checkpoint.make_checkpoint_path(run_dirs[run_number].path, step)

    def _is_true_on_any_rank(self, flag: bool) -> bool:
        return bool(self._peers.all_gather_numbers([float(flag)]).max())

    def _write_event(self, event_kind: str, **data: Any) -> None:
        self._run_dir.write_event(f"rank-{self._rank:05d}", event_kind, **data)


def _read_records(run_dir: RunDir, rank: int, step: int) -> list[StepRecord]:
    """A rank's warm-up records, and its timed records up to a step. If a step was recorded twice, the last record is used."""
    record_by_step = {
        (not record.warmup, record.step): record
        for record in run_dir.steps(rank).records
        if record.warmup or record.step <= step
    }
    return [record_by_step[order_key] for order_key in sorted(record_by_step)]
