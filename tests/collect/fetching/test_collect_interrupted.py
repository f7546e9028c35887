"""Interrupts `collect fetch` at random points: the connection breaks, the disk is full, or the command is killed.

The test checks the workspace after each interruption, and again after the same command is repeated: no file is lost, no file
outside of the workspace changes, and each run that counts as fetched is identical to the run on the cluster, byte by byte.
With SHARDLAB_TESTS=long there are 200 interruptions instead of 20.
"""

import os
import random
import shutil
import stat
import subprocess

import pytest
import support_collect as support
from support_fetch import Cluster, contents, copy_run, tree
from support_long import LONG

TURNS = {"cut": 67, "full": 66, "killed": 67} if LONG else {"cut": 7, "full": 6, "killed": 7}
DISK_MIB = 48
# Roughly how many bytes of the conversation come before the files of runs. Three of ten interruptions are there.
SMALL = 3000
TOUCHES = 150  # roughly how many file operations a fetch of one or two runs executes


def point(rng, size):
    """A number of bytes after which the conversation is interrupted. size: the number of bytes of the files that are new."""
    return rng.randrange(SMALL) if rng.random() < 0.3 else SMALL + rng.randrange(size)


def names(folder):
    return {path.name for path in folder.iterdir()}


class Study:
    """A growing number of runs on a cluster, and their copies on this machine."""

    def __init__(self, cluster, desk, rng):
        self.cluster, self.desk, self.rng = cluster, desk, rng
        self.runs, self.whole, self.going = cluster.there.runs, set(), {}
        finished = support.completed(cluster.there, support.cell())
        self.pattern = finished.path
        going = support.prepare(cluster.there, support.cell(), repeat=2)
        support.event(going, "started", 0)
        self.steps = going.steps_file(0)
        self.steps.parent.mkdir()
        self.steps.write_bytes(finished.steps_file(0).read_bytes())
        (desk / "beside/folder").mkdir(parents=True)
        (desk / "beside/folder/file").write_bytes(rng.randbytes(1000))
        (desk / "beside/link").symlink_to("folder")
        self.beside = tree(desk / "beside")

    def grow(self, turn):
        """Change the runs on the cluster: one more run ends, whose files have various modes, and one run continues.

        Returns the size of the new log in bytes.
        """
        size = self.rng.randrange(20_000, 200_000)
        run = copy_run(self.pattern, f"{self.pattern.name}-a{turn + 2}")
        (run / "manifest.json").unlink(missing_ok=True)
        (run / "log").mkdir()
        (run / "log/rank-00000.log").write_bytes(self.rng.randbytes(size))
        for path in run.rglob("*.*"):
            path.chmod(self.rng.choice([0o400, 0o600, 0o666, 0o755, 0o4755]))
        with self.steps.open("ab") as steps:
            steps.write(b'{"schema":1,"step":1,"t_s":1.0,"wall_s":2.0,"units":1,"step_ms":1.0}\n' * self.rng.randrange(1, 50))
        self.there = tree(self.runs, "manifest.json")
        return size

    def check(self):
        """Check that all fetched runs on this machine equal the runs on the cluster.

        Files outside of the workspace and files that were fetched earlier must be unchanged.
        """
        assert tree(self.desk / "beside") == self.beside
        assert names(self.desk) == {"beside", "ws"}
        assert tree(self.runs, "manifest.json") == self.there
        here = self.cluster.here.runs
        fetched = {path.parent.name for path in here.glob("[!.]*/manifest.json")} if here.exists() else set()
        for name in fetched - {self.steps.parent.parent.name}:
            assert contents(here / name) == contents(self.runs / name)
        assert self.whole <= fetched
        for path, before in self.going.items():
            now = path.read_bytes()
            assert now.startswith(before)
            assert (self.runs / path.relative_to(here)).read_bytes().startswith(now)

    def check_all(self):
        """Check that this machine has a copy of every run of the cluster and nothing else. Files have mode 644, folders 755."""
        self.check()
        here = self.cluster.here.runs
        assert names(here) == names(self.runs)
        for name in names(here):
            assert contents(here / name) == contents(self.runs / name)
        kinds = {(stat.S_IFMT(path.lstat().st_mode), stat.S_IMODE(path.lstat().st_mode)) for path in here.rglob("*")}
        assert kinds == {(stat.S_IFREG, 0o644), (stat.S_IFDIR, 0o755)}
        self.whole = names(here)
        self.going = {path: path.read_bytes() for path in (here / self.steps.parent.parent.name / "steps").iterdir()}

    def forget(self):
        """Delete the copies on this machine, so that the next fetch copies every run again."""
        shutil.rmtree(self.cluster.here.runs)
        self.whole, self.going = set(), {}


@pytest.fixture
def desk(tmp_path):
    folder = tmp_path / "desk"
    folder.mkdir()
    return folder


@pytest.fixture
def small_disk(desk):
    if os.geteuid():
        pytest.skip("needs root to mount a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=755", "tmpfs", desk], check=True)
    yield desk
    subprocess.run(["umount", "-l", desk], check=True)


def interrupted(study, turns, interrupt):
    """Interrupt `collect fetch` as often as `turns` says, and check the copies each time.

    interrupt: a function that runs `collect fetch` with a fault. Its argument is the number of bytes to fetch; it returns
    whether the fault happened.
    """
    done = turn = 0
    while done < turns:
        size = study.grow(turn)
        if turn % 7 == 5:
            study.forget()
        done += interrupt(size)
        study.check()
        study.cluster.no_fault()
        again = study.cluster.fetch()
        assert again.returncode == 0, again.stderr
        study.check_all()
        turn += 1
        assert turn < 4 * turns, "too few faults came to pass"


def failed_in_a_sentence(done):
    assert done.returncode in (0, 1), done.stderr
    if done.returncode:
        assert done.stderr.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in done.stderr
    return done.returncode == 1


def test_a_fetch_continues_after_the_connection_breaks(tmp_path, desk):
    rng = random.Random("cut")
    study = Study(Cluster(tmp_path, desk / "ws"), desk, rng)

    def interrupt(size):
        study.cluster.fault(1, point(rng, size), "cut")
        return failed_in_a_sentence(study.cluster.fetch())

    interrupted(study, TURNS["cut"], interrupt)


def test_a_fetch_continues_after_the_disk_was_full(tmp_path, small_disk):
    rng = random.Random("full")
    study = Study(Cluster(tmp_path, small_disk / "ws"), small_disk, rng)

    def interrupt(size):
        there = os.statvfs(small_disk)
        full = small_disk / "full"
        full.write_bytes(bytes(max(0, there.f_bavail * there.f_frsize - rng.randrange(size))))
        try:
            return failed_in_a_sentence(study.cluster.fetch())
        finally:
            full.unlink()

    interrupted(study, TURNS["full"], interrupt)


def test_a_fetch_continues_after_the_command_was_killed(tmp_path, desk):
    rng = random.Random("killed")
    study = Study(Cluster(tmp_path, desk / "ws"), desk, rng)

    def interrupt(size):
        touch = rng.randrange(1, TOUCHES)
        if rng.random() < 0.4:  # kill `collect fetch` during the transfer: the cluster continues to send without it
            touch = 0
            study.cluster.fault(1, point(rng, size), "kill")
        return study.cluster.fetch(kill_at=touch).returncode == -9

    interrupted(study, TURNS["killed"], interrupt)
