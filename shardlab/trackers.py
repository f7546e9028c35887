"""The experiment trackers to which runs are logged while they go on (docs/exports.md)."""

from __future__ import annotations

import importlib.util

from shardlab.errors import MissingExtra, UnknownName

TRACKERS = ("mlflow", "tensorboard", "wandb")  # each is also the name of the extra that installs it, and of its package
FOLDER = "track"  # of a workspace: what trackers write


def must_be_known(tracker: str, where: str) -> None:
    """Raises UnknownName. where: the option that names the tracker."""
    if tracker not in TRACKERS:
        raise UnknownName("tracker", tracker, TRACKERS, where=where)


def must_be_installed(tracker: str, needed_for: str) -> None:
    """Raises MissingExtra if a package that the tracker needs is not installed."""
    for extra, package in ((tracker, tracker), ("report", "polars")):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(extra, needed_for, package)
