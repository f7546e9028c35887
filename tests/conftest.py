"""Settings and fixtures that all tests share.

Hypothesis has no deadline for an example, so no test fails because the machine is slow. In CI, Hypothesis uses the same
examples in each run, so a failure there is caused by the change under test. Elsewhere its examples are random.
Processes that tests start keep the bytecode of our packages, even if the machine's environment forbids that: a command takes
twice the processor time if it has to compile them each time.
If a shell starts pytest in the background, pytest and its child processes ignore Ctrl-C (SIGINT). This file makes them react to
SIGINT again.
The user's umask, and a TMPDIR whose path is long or contains a space, are replaced: tests write shell scripts and sockets into
temporary folders, and let other users read them. tests/project/test_surroundings.py holds that commands work in such
surroundings. All tests that need a cluster share one practice cluster."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import support_lanes
import support_releases
import support_tiers
from hypothesis import settings
from support_e2e import processes_of
from support_practice import WHY, clusters
from support_skips import CI, pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401 - two hooks of pytest
from support_slurm import SlurmCluster

from jobs.rendering import frozen_source
from shardlab import run_guard

# Some test modules use these modules as plugins and others import them. pytest rewrites the assertions of a plugin, and warns
# if the module was imported before. So without this line, tests would depend on their order.
pytest.register_assert_rewrite("support_trainers", "support_fake_gpus", "support_nvml")
pytest_plugins = ["support_torch", "support_order"]
settings.register_profile("any-machine", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if CI else "any-machine")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.umask(0o022)
if not re.fullmatch(r"[\w./-]{1,40}", tempfile.gettempdir()):
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


CHANGED = pytest.StashKey[bool]()  # whether a test used the nodes of the shared practice cluster itself, not only its Slurm


def pytest_addoption(parser):
    support_tiers.add_option(parser)


def pytest_configure(config):
    """Keep the sockets of fork servers in a folder of this session: its workers share a fork server, other sessions do not."""
    if not support_lanes.on_worker(config):
        folder = Path(tempfile.mkdtemp(prefix="sl-", dir="/tmp"))
        os.environ["XDG_RUNTIME_DIR"] = str(folder)
        config.add_cleanup(lambda: _remove(folder))


def _remove(folder):
    for process in processes_of(folder):
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)  # a process that was just killed may still close its files


def pytest_ignore_collect(collection_path, config):
    is_file = collection_path.suffix == ".py"
    return (is_file and support_tiers.is_without_tests(collection_path.stem, config.getoption("--tier"))) or None


def pytest_xdist_auto_num_workers(config):
    return support_lanes.workers(config.getoption("--tier"))


def pytest_xdist_make_scheduler(config, log):
    return support_lanes.Units(config, log)


def pytest_generate_tests(metafunc):
    support_releases.parametrize(metafunc)


@pytest.hookimpl(trylast=True)  # sort last: pytest itself sorts the tests by the parameters of fixtures
def pytest_collection_modifyitems(config, items):
    support_tiers.deselect_other_tier(config, items)
    items.sort(key=support_releases.place)
    if support_lanes.on_worker(config):
        items.sort(key=lambda item: support_lanes.place(item.nodeid))


def pytest_runtest_setup(item):
    if {"practice", "slurm"} & set(getattr(item, "fixturenames", ())):
        support_lanes.must_be_on_practice_nodes(item.nodeid)
    if "practice" in getattr(item, "fixturenames", ()):
        item.session.stash[CHANGED] = True


@pytest.fixture(scope="session", autouse=True)
def _defects_keep_their_traceback():
    """Commands set a run aside if the work on it raises an exception that nobody expected. In our tests, such an exception is a
    defect that must be seen."""
    expected, run_guard.UNEXPECTED = run_guard.UNEXPECTED, ()
    yield
    run_guard.UNEXPECTED = expected


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory):
    """Sets XDG_STATE_HOME to a temporary folder, so that tests do not use the user's own key, which marks workspaces as
    trusted."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    os.environ.pop("XDG_STATE_HOME")
    if before is not None:
        os.environ["XDG_STATE_HOME"] = before


@pytest.fixture(autouse=True)
def _menu_without_own_metrics():
    """Removes the metrics of a workspace from the menu of this process, which later tests read. Commands that a test calls in
    this process put them there."""
    yield
    if metric := sys.modules.get("collect.metric"):
        metric.set_workspace_metrics([])


@pytest.fixture(scope="session")
def _first_source_copy(tmp_path_factory):
    copy = tmp_path_factory.mktemp("source") / "copy"
    frozen_source._copy_source(copy)
    return copy


@pytest.fixture
def source_copied_faster(_first_source_copy, monkeypatch):
    """Lets `jobs`, in this process, copy its source from a copy that it made once, which takes a fifth of the processor time.
    `jobs` still checks the digest of each copy. For tests that submit much and are not about the copy, as
    test_frozen_source.py is."""

    def copy_again(new_folder):
        subprocess.run(["cp", "--archive", f"{_first_source_copy}/.", new_folder], check=True)

    monkeypatch.setattr(frozen_source, "_copy_source", copy_again)


@pytest.fixture
def short():
    """A folder whose path is short enough for a socket, wherever the temporary folders of pytest are."""
    with tempfile.TemporaryDirectory(prefix="sl-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def release(request):
    """The release of Debian that the practice nodes run; None means the release of this machine."""
    found = getattr(request, "param", support_releases.OWN)
    return None if found == support_releases.OWN else found


@pytest.fixture(scope="session")
def practice(release):
    if WHY is not None:
        pytest.skip(WHY)
    # The folder is not below /tmp, because the user of the nodes has no access to the temporary folders of pytest.
    yield from clusters(Path("/srv") / f"shardlab-test-{os.getpid()}", release=release)


@pytest.fixture(scope="session")
def slurm(request, release):
    """The Slurm cluster that tests use: the cluster of the workspace in the variable SHARDLAB_SLURM if it is set, otherwise the
    shared practice cluster."""
    if given := os.environ.get("SHARDLAB_SLURM"):
        return SlurmCluster(Path(given))
    found = request.getfixturevalue("practice")
    if request.session.stash.get(CHANGED, False):
        found.verify()  # `provision` repairs what these tests changed
    return SlurmCluster(found.folder)
