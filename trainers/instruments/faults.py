"""Faults on purpose: slows one rank in every step, or ends the process of one rank before a step.

They measure nothing. They are instruments because they too make a run differ from the same run without them."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import torch

from shardlab.matrix.faults import ENDED_ON_PURPOSE, LostWorker, SlowedRank
from trainers.instrument import Instrument

if TYPE_CHECKING:
    from shardlab.runs.rundir import RunDir


class StragglerDelay:
    """The delay of `instruments.straggler` on one rank. It does nothing on all other ranks."""

    def __init__(self, settings: SlowedRank | None, rank: int, device: torch.device) -> None:
        self._delay_s = settings.delay_ms / 1000 if settings is not None and settings.rank == rank else 0.0
        self._device = device

    def wait(self) -> None:
        """Sleep on the host, when the device has nothing left to do. Called in every step before the forward pass.

        A GPU still computes the step before when the host begins a step. If the rank slept at once, the GPU would hide the
        delay behind this work.
        """
        if not self._delay_s:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        time.sleep(self._delay_s)


class LostRank(Instrument):
    """Ends the process of one rank on purpose (`instruments.lost_worker`), with SIGKILL, as a machine or the kernel would.

    It must be the last instrument, so that all others have acted after the last step of this rank.
    """

    name = "lost_worker"

    def __init__(self, settings: LostWorker, rank: int, run_dir: RunDir) -> None:
        """rank: the rank of this process."""
        self._settings, self._rank, self._run_dir = settings, rank, run_dir

    def is_due(self, step: int) -> bool:
        return step == self._settings.step - 1

    def after_step(self, step: int) -> None:
        if self._rank != self._settings.rank:
            return
        print(self._settings.why, flush=True)  # goes to the log of this rank
        self._run_dir.write_event(f"rank-{self._rank:05d}", ENDED_ON_PURPOSE, why=self._settings.why)
        os.kill(os.getpid(), signal.SIGKILL)
