"""Measures how long `collect fetch` takes: for one large file and for many small files, beside rsync, and if nothing is new.

    python benchmarks/fetch.py [--mib 1024] [--small 5000] [--runs 200] [--rounds 3]

The cluster is this machine. In the lines "over sshd", the connection goes to a real SSH server on the loopback interface, as a
user's connection goes to a cluster; both ends of the encryption use the processors of this machine. In the other lines, a shell
script replaces `ssh`, so neither the login nor the encryption is measured. Plain rsync copies the same folder with `--archive
--compress` in the same way, in the same round; `collect fetch` and rsync take turns in being first. The time of `collect fetch`
includes the start of Python on both sides, the manifest on the cluster, and the check of each file on this side. Both sides use
the processors of this machine, so the ratio of processor times is more reliable than the ratio of seconds if the machine is
busy. The processor time of sshd and of what it starts is not counted.

Each copy goes to a new folder, because ext4 creates files slowly for some time after many files were removed. Before each
copy, the program uses and frees as much memory as the copy needs for the page cache, because a virtual machine gives freed
memory back to its host, and it takes longer to get such memory back than to copy the file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import support_collect as support
import support_trust
from local_sshd import ADDRESS, LocalSshd, find
from support_fetch import Cluster

SMALL = 20_000  # bytes


class Spent(NamedTuple):
    """The time that a function took. seconds: wall-clock time. cpu_s: processor time of the processes that it started, in
    seconds."""

    seconds: float
    cpu_s: float


class Kind(NamedTuple):
    """Files that are copied. size: of each file, in bytes. is_text: whether they contain records; if not, their content is
    compressed already, like that of traces."""

    what: str
    count: int
    size: int
    is_text: bool


def spent(work: Callable[[], object]) -> Spent:
    """Measure the time that a function takes."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent(time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def made(folder: Path, runs: int) -> Cluster:
    """Make a cluster (this machine, behind a fake ssh) with completed runs. runs: the number of runs."""
    folder.mkdir()
    cluster = Cluster(folder, folder / "desk")
    support.completed(cluster.there, support.cell())
    (first,) = cluster.there.list_run_dirs()
    for number in range(2, runs + 1):
        copy = Path(shutil.copytree(first.path, first.path.with_name(f"{first.run_id[:-1]}{number}")))
        run = copy / "run.json"
        run.write_text(run.read_text().replace(first.run_id, copy.name).replace('"repeat": 1', f'"repeat": {number}'))
    return cluster


def fetch(to: Path) -> None:
    """Fetch all runs with `collect fetch` into the workspace `to`. A failure ends the benchmark."""
    words = [sys.executable, "-P", "-m", "collect", "fetch", "--workspace", str(to)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)


def records(chance: random.Random, size: int) -> bytes:
    """Text like the records of the steps of a rank. size: in bytes."""
    made, step = bytearray(), 0
    while len(made) < size:
        seconds, step = chance.random(), step + 1
        record = {
            "schema": 1,
            "step": step,
            "t": 1.7e9 + step + seconds,
            "step_s": seconds,
            "loss": chance.random(),
            "samples": 8,
        }
        made += json.dumps(record).encode() + b"\n"
    return bytes(made[:size])


def against_rsync(folder: Path, rounds: int, kind: Kind, server: LocalSshd | None) -> None:
    """Print how long `collect fetch` and rsync take. kind: the files. server: the SSH server; None: a shell script replaces
    `ssh`."""
    chance, what = random.Random(1), kind.what
    cluster = made(folder, 1)
    (run,) = cluster.there.list_run_dirs()
    for number in range(kind.count):
        path = run.path / "trace" / f"{number // 100:03d}" / f"file-{number}.{'jsonl' if kind.is_text else 'gz'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for begin in range(0, kind.size, 1 << 20):
                size = min(1 << 20, kind.size - begin)
                file.write(records(chance, size) if kind.is_text else chance.randbytes(size))
    environment, host, shell = dict(os.environ), "far", "ssh"
    if server is None:
        os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    else:
        keys = {"identity": str(server.identity), "known_hosts": str(server.known_hosts)}
        cluster.send(host=ADDRESS, port=server.port, user=server.user, **keys)
        host, shell, what = f"{server.user}@{ADDRESS}", server.command, f"{what}, over sshd"

    def plain(to: Path) -> None:
        """Copy all runs with rsync into the folder `to`, without `collect fetch`."""
        source = f"{host}:{cluster.there.runs}/"
        subprocess.run(["rsync", "--archive", "--compress", "-e", shell, source, str(to / "runs")], check=True)

    ours, theirs = [], []
    for number in range(rounds):
        pair = [(ours, fetch), (theirs, plain)]
        for kept, copy in pair if number % 2 else pair[::-1]:
            (run.path / "manifest.json").unlink(missing_ok=True)
            to = support_trust.make_own(folder / f"{copy.__name__}-{number}").path
            shutil.copy(cluster.here.shardlab_folder / "away.json", to / ".shardlab")
            cluster.no_fault()
            b"x" * (kind.count * kind.size * 3)
            kept.append(spent(lambda copy=copy, to=to: copy(to)))
    os.environ.update(environment)
    ratios = [[one / other for one, other in zip(their, our, strict=True)] for our, their in zip(ours, theirs, strict=True)]
    of_time, of_cpu = (statistics.median(values) for values in zip(*ratios, strict=True))
    our, their = (Spent(*(statistics.median(values) for values in zip(*taken, strict=True))) for taken in (ours, theirs))
    print(
        f"{what:36}  fetch {our.seconds:7.2f} s {our.cpu_s:6.2f} CPU s  rsync {their.seconds:7.2f} s {their.cpu_s:6.2f} CPU s  "
        f"{of_time:5.2f} of plain rsync, by CPU {of_cpu:5.2f}",
        flush=True,
    )


def nothing_new(folder: Path, rounds: int, runs: int) -> None:
    """Print how long `collect fetch` takes if all runs have already been fetched."""
    cluster = made(folder, runs)
    os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    cluster.no_fault()
    fetch(cluster.here.path)
    taken = [spent(lambda: fetch(cluster.here.path)) for _ in range(rounds)]
    seconds, cpu_s = (statistics.median(values) for values in zip(*taken, strict=True))
    print(f"{f'nothing new of {runs} runs':36}  fetch {seconds:7.2f} s {cpu_s:6.2f} CPU s", flush=True)


def main() -> None:
    """Print a line for each case, with the median over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--small", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # so that each start finds compiled modules, as with an installed shardlab
    with tempfile.TemporaryDirectory() as name:
        os.environ["PYTHONPYCACHEPREFIX"] = f"{name}/compiled"
        subprocess.run([sys.executable, "-P", "-m", "collect", "fetch", "--help"], stdout=subprocess.DEVNULL, check=True)
        kinds = [
            Kind(f"one trace of {given.mib} MiB", 1, given.mib << 20, False),
            Kind(f"{given.small} traces of {SMALL // 1000} KB", given.small, SMALL, False),
            Kind(f"{given.small} files of records, {SMALL // 1000} KB", given.small, SMALL, True),
        ]
        for number, kind in enumerate(kinds):
            against_rsync(Path(name) / f"script-{number}", given.rounds, kind, None)
        if program := find():
            with LocalSshd(program, Path(name) / "sshd") as server:
                for number, kind in enumerate(kinds):
                    against_rsync(Path(name) / f"sshd-{number}", given.rounds, kind, server)
        else:
            print("not measured over sshd: sshd is not installed here", flush=True)
        nothing_new(Path(name) / "runs", given.rounds, given.runs)


if __name__ == "__main__":
    main()
