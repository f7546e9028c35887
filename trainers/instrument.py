"""The interface of instruments. An instrument measures a run, either between steps or inside some of its steps.

A measurement between steps does not change the step times. Steps with a measurement inside are marked as `watched`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from shardlab.runs.instrument_span import InstrumentAct


class Instrument(ABC):
    """A measurement of a run. Steps are numbered from 1 and are timed steps, not warm-up steps.

    All ranks that train call the same methods in the same order, so the methods may use collectives.
    """

    name: str

    def watches_step(self, step: int) -> bool:
        """Whether the instrument measures inside this step, which slows the step down. All ranks return the same value, even if
        only one rank measures."""
        return False

    def before_step(self, step: int) -> None:  # noqa: B027 - most instruments act only after a step
        """Called before each step for which `watches_step` is true."""

    def is_due(self, step: int) -> bool:
        """Whether `after_step` has to be called after this step."""
        return self.watches_step(step)

    @abstractmethod
    def after_step(self, step: int) -> None:
        """Called after a step and its optimizer update, if `is_due` is true for the step."""

    def ends_run(self, step: int) -> bool:
        """Whether the instrument ends the run early, after this step. All ranks return the same value."""
        return False

    def end_run(self, step: int) -> Exception:
        """Prepare for the end of the run and return the exception with which the rank ends. Called if `ends_run` is true."""
        raise NotImplementedError

    def collect_results(self) -> dict[str, Any]:
        """The results for result.json. Called on every rank after the last step; the results of rank 0 are written."""
        return {}


class TrainTime:
    """The wall-clock time of the timed steps on this rank, without the time of instruments between steps."""

    def __init__(self) -> None:
        self.earlier_steps_s = 0.0  # the time of the steps before the checkpoint, if the run resumed from a checkpoint
        self._start_s, self._excluded_s = 0.0, 0.0

    def start(self) -> None:
        """Start to measure the time. Called when the first timed step starts."""
        self._start_s, self._excluded_s = time.perf_counter(), 0.0

    def exclude(self, instrument_s: float) -> None:
        """Subtract the time that an instrument took between steps."""
        self._excluded_s += instrument_s

    def read_seconds(self) -> float:
        """The time of all steps so far, in seconds."""
        return self.earlier_steps_s + time.perf_counter() - self._start_s - self._excluded_s


class RunInstruments:
    """The instruments of a run, and the seconds that each of them took outside of steps."""

    def __init__(
        self,
        instruments: Sequence[Instrument],
        device: torch.device,
        train_time: TrainTime | None = None,
        report: Callable[[InstrumentAct], None] | None = None,
    ) -> None:
        """report: a function that is called each time an instrument has done something between steps; it may record this
        act."""
        self._instruments, self._device, self._report = instruments, device, report
        self.train_time = train_time or TrainTime()
        self.cost_s = {instrument.name: 0.0 for instrument in instruments}
        self._ending_instruments: list[Instrument] = []
        self._watched_steps: dict[str, list[int]] = {instrument.name: [] for instrument in instruments}

    def watches_step(self, step: int) -> bool:
        """Whether any instrument measures inside this step."""
        return any(instrument.watches_step(step) for instrument in self._instruments)

    def before_step(self, step: int) -> None:
        for instrument in self._instruments:
            if instrument.watches_step(step):
                self._watched_steps[instrument.name].append(step)
                self._call_timed(instrument, "before", step)

    def is_due(self, step: int) -> bool:
        """Whether any instrument has something to do after this step."""
        return any(instrument.is_due(step) for instrument in self._instruments)

    def after_step(self, step: int) -> None:
        for instrument in self._instruments:
            if instrument.is_due(step):
                self._call_timed(instrument, "after", step)

    def ends_run(self, step: int) -> bool:
        """Whether any instrument ends the run after this step."""
        self._ending_instruments = [instrument for instrument in self._instruments if instrument.ends_run(step)]
        return bool(self._ending_instruments)

    def end_run(self, step: int) -> Exception:
        """The exception with which the rank ends after this step."""
        start_s = time.perf_counter()
        exception = self._ending_instruments[0].end_run(step)
        self._report_act(self._ending_instruments[0], "after", step, time.perf_counter() - start_s)
        return exception

    def collect_results(self) -> dict[str, dict[str, Any]]:
        """The results of each instrument, by its name. Added to them are `cost_s`, the seconds that the instrument took on this
        rank between steps, and `watched`, the steps that the instrument slowed down, if there are any."""
        results = {}
        for instrument in self._instruments:
            watched_steps = self._watched_steps[instrument.name]
            costs = {
                "cost_s": round(self.cost_s[instrument.name], 6),
                **({"watched_steps": watched_steps} if watched_steps else {}),
            }
            results[instrument.name] = {**costs, **instrument.collect_results()}
        return results

    def _call_timed(self, instrument: Instrument, when: Literal["before", "after"], step: int) -> None:
        self._synchronize()  # work that is still queued on the device belongs to the step and not to the instrument
        start_s = time.perf_counter()
        (instrument.before_step if when == "before" else instrument.after_step)(step)
        self._synchronize()
        self._report_act(instrument, when, step, time.perf_counter() - start_s)
        duration_s = time.perf_counter() - start_s
        self.cost_s[instrument.name] += duration_s
        self.train_time.exclude(duration_s)

    def _report_act(self, instrument: Instrument, when: Literal["before", "after"], step: int, duration_s: float) -> None:
        if self._report is not None:
            self._report(InstrumentAct(instrument.name, when, step, round(duration_s, 6)))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
