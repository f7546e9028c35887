"""`collect fetch` is interrupted at drawn points: the connection breaks, the disk fills up, the command is killed.

After each, and after the same command ran again: nothing is lost, nothing outside of the workspace is touched, and a run that
counts as fetched is what it is on the cluster, byte by byte. SHARDLAB_TESTS=long interrupts 200 times instead of 20.
"""

import os
import random
import shutil
import stat
import subprocess

import pytest
import support_collect as support
from support_fetch import Cluster, contents, tree
from support_long import LONG

TURNS = {"cut": 67, "full": 66, "killed": 67} if LONG else {"cut": 7, "full": 6, "killed": 7}
DISK_MIB = 48
CONNECTIONS = (1, 2, 3, 3, 3, 3, 3, 4)  # the question, the manifests, the files, the notes on matrices
SMALL = 3000  # bytes over a connection that is not for the files of runs, about
TOUCHES = 150  # of files, in a fetch of a run or two, about


def names(folder):
    return {path.name for path in folder.iterdir()}


class Study:
    """Runs on a cluster that become more, and what of them is here."""

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
        """Another run on the cluster ends, whose files have modes of all kinds, and one goes on. How many bytes came."""
        size = self.rng.randrange(20_000, 200_000)
        run = shutil.copytree(self.pattern, self.pattern.with_name(f"{self.pattern.name}-a{turn + 2}"))
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
        """What is here is what is there, as far as it is here; what was here before still is."""
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
        """All that is there is here, with modes of ours, and nothing else is."""
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
        """The runs here are deleted, so that all of them come again."""
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
    """interrupt: runs the command with a fault; given the bytes that have to come, it says whether the fault came to pass."""
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


def test_when_the_connection_breaks(tmp_path, desk):
    rng = random.Random("cut")
    study = Study(Cluster(tmp_path, desk / "ws"), desk, rng)

    def interrupt(size):
        connection = rng.choice(CONNECTIONS)
        study.cluster.fault(connection, rng.randrange(size if connection == 3 else SMALL), "cut")
        return failed_in_a_sentence(study.cluster.fetch())

    interrupted(study, TURNS["cut"], interrupt)


def test_when_the_disk_is_full(tmp_path, small_disk):
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


def test_when_the_command_is_killed(tmp_path, desk):
    rng = random.Random("killed")
    study = Study(Cluster(tmp_path, desk / "ws"), desk, rng)

    def interrupt(size):
        touch = rng.randrange(1, TOUCHES)
        if rng.random() < 0.4:  # while something arrives, which then goes on arriving
            connection, touch = rng.choice(CONNECTIONS), 0
            study.cluster.fault(connection, rng.randrange(size if connection == 3 else SMALL), "kill")
        return study.cluster.fetch(kill_at=touch).returncode == -9

    interrupted(study, TURNS["killed"], interrupt)
