"""Lists folders in an order in which no file system needs to list them: by name, from the last name to the first."""

import os
from pathlib import Path


class _Listing(list):
    """The entries of a folder, as os.scandir gives them: an iterator that is also a context manager."""

    def __init__(self, entries):
        super().__init__(entries)
        self._rest = iter(self)

    def __next__(self):
        return next(self._rest)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Does nothing: the folder was read at once."""


def reverse(monkeypatch, *, descending=True):
    """Make os.scandir and os.listdir list every folder by name, from the last to the first. os.walk and pathlib use them.

    descending: False: from the first name to the last. Returns a set that then contains each folder with at least two entries
    that was listed, so that a test can check that the order was changed where it matters.
    """
    listed = set()
    scandir, listdir = os.scandir, os.listdir

    def note(path, names):
        if len(names) > 1 and not isinstance(path, int):
            listed.add(Path(os.fspath(path)))

    def scan(path="."):
        with scandir(path) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name, reverse=descending)
        note(path, ordered)
        return _Listing(ordered)

    def names_of(path="."):
        ordered = sorted(listdir(path), reverse=descending)
        note(path, ordered)
        return ordered

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(os, "listdir", names_of)
    return listed
