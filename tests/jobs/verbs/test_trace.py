"""`jobs trace`: the analysis of 64 generated ranks as runs on this machine gives the same result as one process."""

import fcntl
import json
import subprocess
import sys

import msgspec
import pytest
import support_ranks
from support_e2e import HANG_S
from support_trust import make_own

from collect.cli import main as collect
from collect.traces import command, part
from jobs import cli
from jobs.launcher import find_launcher, load_launchers
from jobs.rendering import render, sbatch_options
from jobs.status.reconcile import read_statuses
from jobs.verbs import trace_runs
from shardlab.cluster import cluster
from shardlab.errors import InputError, ShardlabError
from shardlab.runs.record import StepRecord, read_records
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.runs.trace_part import SET_NAME, SUMMARIES_FOLDER, TRACE_STRATEGY, TracePart
from shardlab.workspace.workspace import Workspace

RANKS, PER_RUN = 64, 32


def jobs(workspace, *words) -> str:
    """Run `jobs` in a process of its own; return what it printed."""
    argv = [sys.executable, "-P", "-m", "jobs", *map(str, words), "--workspace", str(workspace.path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def document(workspace, what, capsys, code=0) -> dict:
    assert collect(["trace", str(what), "--json", "--workspace", str(workspace.path)]) == code
    found = json.loads(capsys.readouterr().out)
    del found["run"]
    return found


def generated(folder, ranks):
    folder.mkdir()
    for rank in support_ranks.run(11, size=ranks):
        rank.write(folder, gz=True)
    return folder


def test_trace_runs_of_64_ranks_equal_the_analysis_of_one_process(tmp_path, capsys):
    """One trace is damaged, which stops no run. Another trace is missing when its run starts: this run fails and is retried."""
    workspace = make_own(tmp_path / "workspace")
    folder = generated(tmp_path / "traces", RANKS)
    damaged, away = folder / "rank-00003.json.gz", folder / "rank-00063.json.gz"
    damaged.write_bytes(damaged.read_bytes()[:-40])
    lock = workspace.shardlab_folder / "local" / "runner.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("ab") as held:  # so that no run starts yet
        fcntl.flock(held, fcntl.LOCK_EX)
        said = jobs(workspace, "trace", folder, "--per-run", PER_RUN)
        away.rename(tmp_path / away.name)
    name = SET_NAME.search(said)[0]
    runs = sorted(workspace.list_run_ids())
    assert len(runs) == RANKS // PER_RUN
    with pytest.raises(InputError, match="2 of 2 parts have not completed"):
        command.merge_figures(workspace, name)
    other = generated(tmp_path / "other", 1)
    jobs(workspace, "trace", other, "--wait", "--trust")  # starts a runner, which starts the runs in the order of submission
    states = [status.state for status in read_statuses(workspace, [RunDir(workspace.runs / run) for run in runs])]
    assert states == ["completed", "failed"], [RunDir(workspace.runs / run).judge().why for run in runs]
    assert away.name in RunDir(workspace.runs / runs[1]).judge().why
    assert collect(["trace", name, "--workspace", str(workspace.path)]) == 2
    assert f"1 of 2 parts have not completed: {runs[1]}" in capsys.readouterr().err
    (tmp_path / away.name).rename(away)
    jobs(workspace, "retry", runs[1], "--wait")
    assert runs[1] + "-a2" in workspace.list_run_ids()
    whole = document(workspace, f"{folder}/", capsys, code=1)
    assert document(workspace, name, capsys, code=1) == whole
    assert [rank["rank"] for rank in whole["ranks"]] == list(range(RANKS))
    assert whole["stragglers"]["matched"] > 0
    assert {damaged.name in sentence for sentence in whole["damage"]} == {True}
    before = set(workspace.list_run_ids())
    assert "0 run(s) submitted" in jobs(workspace, "trace", folder, "--per-run", PER_RUN)  # the runs exist already
    assert set(workspace.list_run_ids()) == before
    (first, *_) = runs
    records = read_records(RunDir(workspace.runs / first).steps_file(0), StepRecord).records
    assert [record.step for record in records] == list(range(1, PER_RUN + 1))
    assert records[0].units == (folder / "rank-00000.json.gz").stat().st_size


SLURM = """
schema: 1
name: c
provider: slurm
gpus: {type: a100, per_node: 4}
storage: {shared: SHARED}
slurm: {partition: gpu, exclusive: true, time: "01:00:00"}
"""
NO_SHARED_FOLDER = """
schema: 1
name: c
provider: ssh
ssh: {user: alice}
nodes: [{name: a, host: 10.0.0.1, roles: [controller, worker]}, {name: b, host: 10.0.0.2}]
"""


def said(workspace, file, *words, capsys, code=2) -> str:
    path = workspace.path / "cluster.yaml"
    path.write_text(file.replace("SHARED", str(workspace.path)))
    assert cli.main(["trace", *map(str, words), "--cluster", str(path), "--workspace", str(workspace.path)]) == code
    return capsys.readouterr().err


def written(workspace, file="schema: 1\nname: here\nprovider: local\n", files=("a.json",), **changed) -> tuple[RunDir, Run]:
    """The rendered run of a part of the folder `traces`, which is not submitted."""
    workspace.path.mkdir(exist_ok=True)
    path = workspace.path / "cluster.yaml"
    path.write_text(file.replace("SHARED", str(workspace.path)))
    part_ = TracePart(folder=str(workspace.path / "traces"), files=list(files), place=0, parts=1)
    source = render.make_render_context("traces-0123456789ab", cluster.load_cluster(path), workspace)
    cell = trace_runs._make_trace_cell(source.matrix, part_)
    run = render.make_run(cell, 1, 1, msgspec.structs.replace(source, trace_part_by_cell={cell.name(): part_}))
    folder = RunDir(workspace.runs / run.run_id)
    folder.path.mkdir(parents=True)
    folder.run_json.write_bytes(render.files.encode_json(run))
    return folder, run


def test_wrong_arguments_of_jobs_trace_are_refused_before_a_run_is_written(tmp_path, capsys):
    workspace = Workspace(tmp_path)
    folder = generated(tmp_path / "traces", 1)
    (tmp_path / "empty").mkdir()
    here = "schema: 1\nname: here\nprovider: local\n"
    assert "Allowed: 1 to 100000" in said(workspace, here, folder, "--per-run", 0, capsys=capsys)
    assert "empty: no traces. Allowed: a folder with Chrome traces" in said(workspace, here, tmp_path / "empty", capsys=capsys)
    assert "nothing: no traces" in said(workspace, here, tmp_path / "nothing", capsys=capsys)
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_the_nodes_do_not_see_is_refused(tmp_path):
    workspace = Workspace(tmp_path / "workspace")
    workspace.path.mkdir()
    for file, where, sentence in (
        (NO_SHARED_FOLDER, tmp_path, "share no folder, so they cannot read the same traces"),
        (SLURM, tmp_path, "lies outside of"),
    ):
        path = workspace.path / "cluster.yaml"
        path.write_text(file.replace("SHARED", str(workspace.path)))
        words = ["trace", str(where), "--cluster", str(path), "--workspace", str(workspace.path)]
        with pytest.raises(InputError, match=sentence):
            trace_runs.find_trace_runs(cli.Invocation(cli.parser().parse_args(words)))


def test_a_run_needs_no_gpu_and_no_node_of_its_own(tmp_path):
    workspace = Workspace(tmp_path / "workspace")
    _, run = written(workspace, SLURM)
    options = sbatch_options.list_sbatch_options(run, cluster.load_cluster(workspace.path / "cluster.yaml"))
    assert not [option for option in options if "gpu" in option and "partition" not in option]
    assert "--exclusive" not in options
    assert "--cpus-per-task=1" in options
    assert find_launcher(TRACE_STRATEGY).make_node_argv(run, "python") == ["python", "-P", "-m", "collect.traces.part", "."]
    assert TRACE_STRATEGY not in load_launchers()


def test_a_missing_trace_fails_the_run_with_the_name_of_the_trace(tmp_path):
    folder, _ = written(Workspace(tmp_path))
    with pytest.raises(ShardlabError, match=r"a\.json"):
        part.main([str(folder.path)])
    assert "a.json" in next(event.data["why"] for event in folder.read_events() if event.event == "failed")
    assert not folder.result.exists()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"path": 7}', b"[" * 5000, None])
def test_a_summary_that_cannot_be_read_is_named(tmp_path, content):
    workspace = Workspace(tmp_path)
    generated(tmp_path / "traces", 1)
    folder, run = written(workspace, files=("rank-00000.json.gz",))
    assert part.main([str(folder.path)]) == 0
    for event in ("submitted", "started"):
        folder.write_event("attempt", event)
    folder.write_event("attempt", "exited", code=0, steps=1)
    (found,) = command.merge_figures(workspace, run.matrix)
    assert (found.rank, found.damage, found.why) == (0, [], "")
    assert command.merge_figures(workspace, "traces-ffffffffffff") is None
    (path,) = (folder.path / SUMMARIES_FOLDER).iterdir()
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(InputError, match=path.name):
        command.merge_figures(workspace, run.matrix)
