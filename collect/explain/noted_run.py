"""A run that notes what a metric reads of it, so that the files behind a value and the places in them are known without a
second formula."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec

from collect.explain import noted_values
from collect.explain.noted_values import KeyPath, Note
from collect.loading import records
from collect.loading.loaded_run import LoadedRun, Quantity
from collect.traces.run_traces import RunTraces
from shardlab.runs.prediction import Prediction

RUN, RESULT, PREDICTION, ENVIRONMENT, TRACES = "run.json", "result.json", "prediction.json", "env/{}", "trace"
_NOTES = "_notes"


class Notes(msgspec.Struct):
    """The attributes of a run that a metric read."""

    direct: set[str] = msgspec.field(default_factory=set)
    """Attributes that the metric itself read."""
    all_read: set[str] = msgspec.field(default_factory=set)
    """These attributes, and the attributes from which they are computed."""
    depth: int = 0
    """How many attributes are being computed."""
    keys: dict[str, set[KeyPath]] = msgspec.field(default_factory=dict)
    """JSON file in the folder of the run -> the paths of the keys that were read; TRACES -> the fields of the figures of ranks.
    """

    def get_note_function(self, file: str) -> Note:
        """The function that notes a path of this file."""
        return self.keys.setdefault(file, set()).add


class NotedRun(LoadedRun, dict=True):
    """A run that notes the names of the attributes that are read while `compute_noted` computes a metric."""

    def __getattribute__(self, name: str) -> Any:
        notes = None if name.startswith("_") else super().__getattribute__("__dict__").get(_NOTES)
        if notes is None:
            return super().__getattribute__(name)
        notes.all_read.add(name)
        if not notes.depth:
            notes.direct.add(name)
        notes.depth += 1
        try:
            return super().__getattribute__(name)
        finally:
            notes.depth -= 1

    @cached_property
    def predicted(self) -> Prediction | None:
        """As in `LoadedRun`, with noted keys."""
        predicted: Prediction | None = noted_values.wrap(super().predicted, self.__dict__[_NOTES].get_note_function(PREDICTION))
        return predicted

    @cached_property
    def traces(self) -> RunTraces:
        """As in `LoadedRun`; the fields of the figures of a rank that are read are noted."""
        plain_traces, note_field = super().traces, self.__dict__[_NOTES].get_note_function(TRACES)
        return RunTraces(
            *(
                [noted_values.wrap(figures, note_field) for figures in part]
                for part in (plain_traces.exact, plain_traces.analyses, plain_traces.like_hta)
            )
        )


def compute_noted(function: Callable[[LoadedRun], Quantity | None], run: LoadedRun) -> tuple[Quantity | None, NotedRun, Notes]:
    """Read the files of a run again and compute a metric. Returns (value, the newly read run, attributes that were read)."""
    noted = NotedRun.read(run.folder)
    noted.verdict, noted.reads_traces = run.verdict, run.reads_traces
    notes = Notes()
    noted.run = noted_values.wrap(noted.run, notes.get_note_function(RUN))
    noted.result = noted_values.wrap(noted.result, notes.get_note_function(RESULT))
    paths = sorted(run.folder.path.glob(ENVIRONMENT.format("*.json")))
    hosts = {ENVIRONMENT.format(path.name): records.read_host(str(path)) for path in paths}
    noted.hosts = [noted_values.wrap(host, notes.get_note_function(file)) for file, host in hosts.items() if host is not None]
    noted.__dict__[_NOTES] = notes
    quantity = function(noted)
    del noted.__dict__[_NOTES]
    # The keys are copied, because reading the attributes of `noted` from now on must not add to them.
    return quantity, noted, msgspec.structs.replace(notes, keys={file: set(paths) for file, paths in notes.keys.items()})
