"""Selects the Debian releases on which the tests of Slurm run. Each release has its own versions of Slurm and systemd.

`make test-all` runs these tests on the release of this machine, `make test-long` on all releases, and
SHARDLAB_RELEASES=trixie,sid only on the named releases. Tests of one release share a cluster, so tests are grouped by release.
"""

import os
from typing import get_args

import pytest
from support_long import LONG

from provision.practice import base
from shardlab.cluster.cluster import DebianRelease

OWN = "own"
OTHERS = tuple(name for name in get_args(DebianRelease) if base.is_other_release(name))
GIVEN = os.environ.get("SHARDLAB_RELEASES", "")
RELEASES = tuple(GIVEN.split(",")) if GIVEN else (OWN, *OTHERS) if LONG else (OWN,)
ON_EACH = ("test_practice_e2e", "test_slurm_e2e", "test_slurm_launchers")


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Run each test of the files in ON_EACH once for each selected release of Debian."""
    if metafunc.module.__name__.rpartition(".")[2] in ON_EACH and "release" in metafunc.fixturenames and RELEASES != (OWN,):
        metafunc.parametrize("release", RELEASES, indirect=True, scope="session")


def place(item: pytest.Item) -> int:
    """The sort key of a test: tests on this machine's release of Debian come first, then the tests of each other release."""
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("release", OWN) if callspec is not None else OWN
    return RELEASES.index(found) if found in RELEASES else -1
