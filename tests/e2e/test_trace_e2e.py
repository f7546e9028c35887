"""`jobs trace` on practice nodes, with Slurm and over SSH: the user's machine submits the analysis of 64 generated ranks, and
fetches and merges the results. They equal the result of one process."""

import json

import pytest
import support_ranks
from support_long import only_in_long_form
from support_slurm import Desk

from shardlab.runs.trace_part import SET_NAME

pytestmark = pytest.mark.e2e
RANKS, PER_RUN = 64, 8
# Reads the traces as one JSON object from standard input, and writes each into the folder.
WRITE = (
    "import json,pathlib,sys; [pathlib.Path(sys.argv[1],name).write_text(text) for name,text in json.load(sys.stdin).items()]"
)


@only_in_long_form
@pytest.mark.parametrize("scheduler", ["slurm", "ssh"])
def test_trace_runs_of_64_ranks_on_nodes_equal_the_analysis_of_one_process(slurm, tmp_path, scheduler):
    desk = Desk(slurm, tmp_path)
    limit = ["--max-parallel", "4"]
    if scheduler == "ssh":
        desk.leave_slurm_out()
        limit = []  # only for Slurm
    folder = f"{slurm.shared}/traces-{tmp_path.name}"
    texts = {f"rank-{rank.rank:05d}.json": rank.text().decode() for rank in support_ranks.run(23, size=RANKS)}
    slurm.run("head", f"mkdir -p {folder}")
    done = slurm.answer("head", slurm.python, "-c", WRITE, folder, stdin=json.dumps(texts).encode())
    assert done.code == 0, done.stderr
    sent = desk.run("jobs", "trace", folder, "--per-run", str(PER_RUN), "--wait", *limit)
    name = SET_NAME.search(sent.stderr)[0]
    states = json.loads(desk.run("jobs", "status", "--json").stdout)["runs"]
    assert [run["state"] for run in states] == ["completed"] * (RANKS // PER_RUN)
    assert {host for run in states for host in run["hosts"]} == {"work1", "work2"}
    assert "0 run(s) submitted" in desk.run("jobs", "trace", folder, "--per-run", str(PER_RUN)).stdout
    assert len(desk.twin().events("started")) == RANKS // PER_RUN
    fetched = json.loads(desk.run("collect", "fetch", "--json").stdout)
    assert all(run["complete"] and not run.get("problems") for run in fetched)
    found = json.loads(desk.run("collect", "trace", name, "--json").stdout)
    alone = slurm.answer("head", slurm.python, "-P", "-m", "collect", "trace", f"{folder}/", "--json")
    assert alone.code == 0, alone.stderr
    expected = json.loads(alone.stdout)
    assert (found.pop("run"), expected.pop("run")) == (name, f"{folder}/")
    assert found == expected
    assert [rank["rank"] for rank in found["ranks"]] == list(range(RANKS))
