"""On which releases of Debian the tests of Slurm run: each brings its own Slurm and systemd.

`make test` runs them on this machine's release, `make test-long` on all, and SHARDLAB_RELEASES=trixie,sid on those alone. One
cluster is up at a time, so tests of a release follow each other.
"""

import os
from typing import get_args

import pytest
from support_long import LONG

from provision.practice import base
from shardlab.cluster import Release

OWN = "own"
OTHERS = tuple(name for name in get_args(Release) if base.is_other(name))
GIVEN = os.environ.get("SHARDLAB_RELEASES", "")
RELEASES = tuple(GIVEN.split(",")) if GIVEN else (OWN, *OTHERS) if LONG else (OWN,)
ON_EACH = ("test_practice_line", "test_slurm_line", "test_slurm_launchers")


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Run a test of these files once for each release."""
    if metafunc.module.__name__.rpartition(".")[2] in ON_EACH and "release" in metafunc.fixturenames and RELEASES != (OWN,):
        metafunc.parametrize("release", RELEASES, indirect=True, scope="session")


def place(item: pytest.Item) -> int:
    """By which tests are sorted: after those of this machine's own release."""
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("release", OWN) if callspec is not None else OWN
    return RELEASES.index(found) if found in RELEASES else -1
