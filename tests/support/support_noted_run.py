"""A run that notes what a metric reads of it, so that a test can compare what the metric declares with what it reads."""

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import msgspec

from collect.loading import records
from collect.loading.loaded_run import LoadedRun
from collect.traces.run_traces import RunTraces

KeyPath = tuple[str, ...]  # keys of JSON objects, from the outside to the inside; an entry of a list has the path of the list
_NOTES, _NOTING = "_notes", "_noting"


class Notes(msgspec.Struct):
    """What a metric read of a run."""

    direct: set[str] = msgspec.field(default_factory=set)
    """Attributes of the run that the metric itself read."""
    all_read: set[str] = msgspec.field(default_factory=set)
    """These attributes, and the attributes from which they are computed."""
    depth: int = 0
    """How many attributes are being computed."""
    keys: dict[str, set[KeyPath]] = msgspec.field(default_factory=dict)
    """`run`, `result`, `hosts`, `prediction` -> the paths of the keys that were read; `breakdown`, `trace` -> the fields of the
    figures of ranks."""

    def get_note_function(self, source: str) -> Callable[[KeyPath], None]:
        return self.keys.setdefault(source, set()).add

    def innermost(self, source: str) -> set[str]:
        """The keys that no other key continues, such as `a.b` and `c` of `a`, `a.b` and `c`."""
        paths = self.keys.get(source, set())
        return {".".join(path) for path in paths if path and not any(path == other[: len(path)] != other for other in paths)}


class NotedRun(LoadedRun, dict=True):
    """A run that notes the names of the attributes that are read while `compute_noted` computes a metric."""

    def __getattribute__(self, name):
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
    def predicted(self):
        return wrap(super().predicted, self.__dict__[_NOTES].get_note_function("prediction"))

    @cached_property
    def traces(self):
        plain_traces, notes = super().traces, self.__dict__[_NOTES]
        sources = ((plain_traces.exact, "breakdown"), (plain_traces.analyses, "trace"), (plain_traces.like_hta, "breakdown"))
        return RunTraces(*([wrap(rank, notes.get_note_function(source)) for rank in ranks] for ranks, source in sources))


def compute_noted(metric, run):
    """Compute a metric of a newly read run. Returns (value, what the metric read)."""
    noted = NotedRun.read(run.folder)
    noted.verdict, noted.trace_method = run.verdict, run.trace_method
    notes = Notes()
    noted.run = wrap(noted.run, notes.get_note_function("run"))
    noted.result = wrap(noted.result, notes.get_note_function("result"))
    hosts = [records.load_host(str(path)) for path in sorted(run.folder.path.glob("env/*.json"))]
    noted.hosts = [wrap(host, notes.get_note_function("hosts")) for host in hosts if host is not None]
    noted.__dict__[_NOTES] = notes
    return metric.of_run(noted), notes


class NotedDict(dict[str, Any]):
    """A mapping that notes the keys that are looked up. A loop over all entries reads the whole mapping, which was noted when
    the mapping itself was read."""

    def __init__(self, values, path, note):
        super().__init__(values)
        self._path, self._note = path, note

    def __contains__(self, key):
        self._note((*self._path, str(key)))
        return super().__contains__(key)

    def __getitem__(self, key):
        self._note(path := (*self._path, key))
        return wrap(super().__getitem__(key), self._note, path)

    def get(self, key, default=None):
        is_present = key in self
        return self[key] if is_present else default


def wrap(value, note, path=()):
    """A value that behaves like `value`, which was decoded from JSON, and calls `note` with the path of each key that is read.

    path: the path of the value itself in its file.
    """
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        wrapped = _make_noting_class(type(value))(**fields)
        wrapped.__dict__[_NOTING] = (path, note)
        return wrapped
    if isinstance(value, dict):
        return NotedDict(value, path, note)
    if isinstance(value, list) and any(isinstance(item, msgspec.Struct) for item in value):
        return [wrap(item, note, path) for item in value]
    return value


@cache
def _make_noting_class(kind):
    """A subclass of a struct type whose instances note the fields that are read. An instance without a note, such as a changed
    copy, is like an instance of `kind`."""
    names = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))

    def read(self, name):
        value = kind.__getattribute__(self, name)
        noting = kind.__getattribute__(self, "__dict__").get(_NOTING) if name in names else None
        if noting is None:
            return value
        (path, note), key = noting, names[name]
        note((*path, key))
        return wrap(value, note, (*path, key))

    return type(kind)(f"Noted{kind.__name__}", (kind,), {"__getattribute__": read}, dict=True)
