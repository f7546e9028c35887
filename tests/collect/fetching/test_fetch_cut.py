"""Fetches runs from three nodes with separate folders while connections are cut: each file is fetched exactly once."""

import hashlib
import json
import os
import random
import socket
import subprocess
import sys

import pytest
from support_aside import why_not
from support_fetch import contents
from support_long import LONG
from support_ssh_nodes import SshNodes

from collect.fetching.gather import GATHERED_EVENT
from shardlab.runs import placement

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
RUNS = 200 if LONG else 20
NODES = ("gpu1", "gpu2", "gpu3")
# Writes what is asked for into the file ASKED. Each line of the file CUTS is the number of bytes after which one connection is
# cut.
CUTTING = """\
head -n 1 > ASKED.$$
cat ASKED.$$ >> ASKED
cut=$(flock CUTS sh -c 'head -n 1 CUTS; sed -i 1d CUTS')
test -n "$cut" || exec REAL "$@" < ASKED.$$
REAL "$@" < ASKED.$$ | { dd bs=4K count="$cut" iflag=count_bytes status=none; kill -9 $$; }
"""


@pytest.fixture
def nodes(tmp_path_factory, monkeypatch):
    made = SshNodes(tmp_path_factory.mktemp("first"), monkeypatch, apart=tmp_path_factory.mktemp("disks"), count=4)
    yield made
    made.end()


def ended(nodes, repeat, chance):
    """Make a run that ended, with files of random size on each node.

    Returns (the run folder, a dict that maps the name of each file to its content).
    """
    folder = nodes.run(repeat, 3, "")
    (folder.path / "claim").mkdir()
    (folder.path / "claim/first-node").write_text("token")
    folder.write_event("step", placement.PLACED_EVENT, nodes=list(NODES))
    folder.write_event("attempt", "started")
    folder.write_event("attempt", "exited", code=1)
    files = {}
    for number, node in enumerate(NODES):
        part = nodes.part(node, folder).path
        for name, size in (
            (f"trace/rank-0000{number}.json.gz", chance.randrange(200_000)),
            (f"log/rank-0000{number}.log", 900),
        ):
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            files[name] = chance.randbytes(size)
            (part / name).write_bytes(files[name])
        (part / "run.json").write_bytes(folder.run_json.read_bytes())
    return folder, files


def test_a_fetch_over_cut_connections_loses_and_duplicates_no_file(nodes, tmp_path):
    chance = random.Random(20)
    runs = [ended(nodes, repeat, chance) for repeat in range(1, RUNS + 1)]
    assert {folder.judge().state for folder, _ in runs} == {"failed"}
    asked, cuts = tmp_path / "asked", tmp_path / "cuts"
    nodes.replace_transfers(CUTTING.replace("ASKED", str(asked)).replace("CUTS", str(cuts)))
    size = sum(len(content) for _, files in runs for content in files.values()) // len(NODES)
    cuts.write_text("".join(f"{chance.randrange(size // 2)}\n" for _ in range(9)))
    command = [sys.executable, "-P", "-m", "collect", "fetch", "--json", "--workspace", str(nodes.workspace.path)]
    turns, whole = 0, set()
    while True:
        asked.write_text("")
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}, check=False)
        turns += 1
        assert turns <= 10, done.stderr
        names = [name for line in asked.read_text().splitlines() for name in json.loads(line)["most_bytes"]]
        assert len(names) == len(set(names))
        assert not whole & set(names)  # files that an earlier `collect fetch` copied are not copied again
        whole |= {f"{folder.run_id}/{name}" for folder, files in runs for name in files if (folder.path / name).exists()}
        if done.returncode == 0:
            break
    assert turns > 2
    found = {run["run"]: run for run in json.loads(done.stdout)}
    for folder, files in runs:
        assert found[folder.run_id]["complete"]
        here = contents(folder.path)
        assert {name: hashlib.sha256(here[name]).digest() for name in files} == {
            name: hashlib.sha256(content).digest() for name, content in files.items()
        }
        assert {name for name in here if name.startswith(("trace/", "log/"))} == set(files)
        (event,) = (event for event in folder.read_events() if event.event == GATHERED_EVENT)
        assert event.host == socket.gethostname()
    assert not list((nodes.workspace.runs / ".parts").glob("*"))
