"""The interface of instruments, which measure a run between steps (at no cost for step times) or inside some of its steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch


class Instrument(ABC):
    """A measurement of a run. All ranks that train call it alike, so it may use collectives. Steps are timed steps."""

    name: str

    def watches(self, step: int) -> bool:
        """Whether it measures inside this step and so slows it down. The same on every rank, even if only one rank measures."""
        return False

    def before(self, step: int) -> None:  # noqa: B027 - most look only after a step
        """Called before a step that it watches."""

    def due(self, step: int) -> bool:
        """Whether `after` has something to do."""
        return self.watches(step)

    @abstractmethod
    def after(self, step: int) -> None:
        """Called after a step and its update, if `due`."""

    def ends(self, step: int) -> bool:
        """Whether the run ends after this step although it is not the last one: the same answer on every rank."""
        return False

    def end(self, step: int) -> Exception:
        """Called if it `ends` after this step: prepare for the end and return the exception with which the rank ends."""
        raise NotImplementedError

    def found(self) -> dict[str, Any]:
        """The results for result.json. Called on every rank after the last step; those of rank 0 are written."""
        return {}


class TrainTime:
    """The wall-clock time of the timed steps on this rank, without the time of instruments between steps."""

    def __init__(self) -> None:
        self.before_s = 0.0  # of the steps before the checkpoint from which the run resumed
        self._started, self._left_out_s = 0.0, 0.0

    def start(self) -> None:
        """The first step starts now."""
        self._started, self._left_out_s = time.perf_counter(), 0.0

    def leave_out(self, seconds: float) -> None:
        """An instrument took this time between steps."""
        self._left_out_s += seconds

    def seconds(self) -> float:
        """The time of all steps so far."""
        return self.before_s + time.perf_counter() - self._started - self._left_out_s


class RunInstruments:
    """The instruments of a run, and the seconds that each of them took outside of steps."""

    def __init__(self, instruments: Sequence[Instrument], device: torch.device, train_time: TrainTime | None = None) -> None:
        self._instruments, self._device = instruments, device
        self.train_time = train_time or TrainTime()
        self.cost_s = {instrument.name: 0.0 for instrument in instruments}
        self._ending: list[Instrument] = []
        self._watched: dict[str, list[int]] = {instrument.name: [] for instrument in instruments}

    def watches(self, step: int) -> bool:
        """Whether any instrument measures inside this step."""
        return any(instrument.watches(step) for instrument in self._instruments)

    def before(self, step: int) -> None:
        for instrument in self._instruments:
            if instrument.watches(step):
                self._watched[instrument.name].append(step)
                self._timed(instrument, instrument.before, step)

    def due(self, step: int) -> bool:
        """Whether any instrument has something to do after this step."""
        return any(instrument.due(step) for instrument in self._instruments)

    def after(self, step: int) -> None:
        for instrument in self._instruments:
            if instrument.due(step):
                self._timed(instrument, instrument.after, step)

    def ends(self, step: int) -> bool:
        """Whether any instrument ends the run after this step."""
        self._ending = [instrument for instrument in self._instruments if instrument.ends(step)]
        return bool(self._ending)

    def end(self, step: int) -> Exception:
        """The exception with which the rank ends after this step."""
        return self._ending[0].end(step)

    def found(self) -> dict[str, dict[str, Any]]:
        """By instrument: its results; cost_s: seconds of this rank between steps; watched_steps: steps that it slowed down."""
        found = {}
        for instrument in self._instruments:
            watched = self._watched[instrument.name]
            cost = {"cost_s": round(self.cost_s[instrument.name], 6), **({"watched_steps": watched} if watched else {})}
            found[instrument.name] = {**cost, **instrument.found()}
        return found

    def _timed(self, instrument: Instrument, act: Any, step: int) -> None:
        self._wait()  # what the device still does is the step's, not the instrument's
        started = time.perf_counter()
        act(step)
        self._wait()
        took_s = time.perf_counter() - started
        self.cost_s[instrument.name] += took_s
        self.train_time.leave_out(took_s)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
