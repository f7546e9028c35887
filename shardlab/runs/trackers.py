"""The experiment trackers, such as wandb, to which runs are logged while they are running (docs/exports.md)."""

from __future__ import annotations

import importlib.util

from shardlab.errors import MissingExtra, UnknownName

TRACKERS = ("mlflow", "tensorboard", "wandb")  # each name is also the name of the package and of shardlab's extra for it
TRACKER_FOLDER = "track"  # the folder of a workspace with the files that trackers write


def check_tracker_name(tracker_name: str, option_place: str) -> None:
    """Raise UnknownName if `tracker_name` is not in TRACKERS. option_place: the command-line option that names it, for the
    message."""
    if tracker_name not in TRACKERS:
        raise UnknownName("tracker", tracker_name, TRACKERS, place=option_place)


def check_tracker_installed(tracker_name: str, needed_for: str) -> None:
    """Raise MissingExtra if a package that the tracker needs is not installed. needed_for: the beginning of the message."""
    for needed_package in (tracker_name, "polars"):
        if importlib.util.find_spec(needed_package) is None:
            raise MissingExtra(needed_for, needed_package)
