"""A run whose GPUs were throttled or shared during timed steps is marked, and its cell is not ranked and not compared."""

import msgspec
import pytest
import support_collect as support

from collect import summary
from collect.comparison.compare import ComparedMatrix, compare_matrices
from collect.reading import load
from shardlab.files import files
from shardlab.workspace.workspace import Workspace
from tests.collect.choices.test_choices import PROVEN

OWN = ["GPU-0", "GPU-1"]
SCATTER_UNKNOWN = {"processes": 1, "throttled": ["power cap"]}
DDP, FSDP2, ZERO2 = (support.cell(name, 2) for name in ("ddp", "fsdp2", "zero2"))


def summarized(path, gpu, uuids):
    """The summary of a workspace with three cells that did equal work.

    gpu: fields of the samples of GPU-0 in the second cell. In the other cells GPU-0 has one process and reaches only its power
    limit. uuids: the UUIDs of the GPUs that each result names.
    """
    workspace = Workspace(path)
    support.keep(workspace, [DDP, FSDP2, ZERO2], repeats=0)
    for what, says in ((DDP, SCATTER_UNKNOWN), (FSDP2, gpu), (ZERO2, SCATTER_UNKNOWN)):
        support.completed(workspace, what, rehearsal=False, gpu=says, found={"gpus": uuids, "same_work": PROVEN})
    return summary.summarize(load.load_matrix(workspace, None), "ddp")


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ({"processes": 2}, "other processes computed on GPU-0"),
        ({"processes": 2, "every": 10}, "other processes computed on GPU-0"),
        ({"throttled": ["hardware thermal slowdown"]}, "GPU-0 had lowered clocks (hardware thermal slowdown)"),
    ],
)
def test_a_cell_with_shared_or_throttled_gpus_is_marked_and_not_ranked(tmp_path, gpu, said):
    found = summarized(tmp_path, gpu, OWN)
    rows = {row.cell["strategy"]: row for row in found.rows}
    (run,) = rows["fsdp2"].runs
    assert run.gpu_trouble == said
    assert any(f"{run.run_id}: {said}" in remark for remark in found.remarks)
    (contest,) = found.choices[0].contests
    assert {one.name: one.outcome for one in contest.contenders} == {
        "ddp": "measured",
        "fsdp2": "gpu trouble",
        "zero2": "measured",
    }
    placed = {one.cell for standing in contest.standings for one in standing.placed}
    assert placed == {rows["ddp"].id, rows["zero2"].id}
    assert "speed_up" in rows["zero2"].metrics
    assert "speed_up" not in rows["fsdp2"].metrics


def test_a_run_on_a_shared_gpu_has_no_ratio_in_a_comparison(tmp_path):
    sides = []
    for name, says in (("a", SCATTER_UNKNOWN), ("b", {"processes": 2})):
        workspace = Workspace(tmp_path / name)
        support.keep(workspace, [DDP], repeats=0)
        support.completed(workspace, DDP, rehearsal=False, gpu=says, found={"gpus": ["GPU-0", "GPU-1"], "same_work": PROVEN})
        loaded = load.load_matrix(workspace, None)
        sides.append(ComparedMatrix(name, workspace, loaded, summary.summarize(loaded, "ddp")))
    (pair,) = compare_matrices(*sides).pairs
    assert "other processes used the GPUs" in pair.different_work
    assert pair.metrics == []


@pytest.mark.parametrize(
    ("gpu", "uuids"),
    [
        (SCATTER_UNKNOWN, OWN),
        ({"throttled": ["hardware slowdown"], "every": 40}, OWN),  # throttled in only 2.5 % of the samples
        ({"processes": 2}, ["GPU-0"]),  # one GPU for two ranks: both processes belong to the run
        ({"processes": 2}, ["GPU-5", "GPU-6"]),  # the run uses other GPUs than the shared GPU-0
        ({"processes": 2}, []),  # the ranks run on the CPU, so they use no GPU
        ({"processes": 2}, None),  # results of older versions of shardlab do not name their GPUs
        (True, OWN),  # telemetry of older versions of shardlab does not count processes
    ],
)
def test_a_gpu_of_its_own_at_its_power_limit_is_no_trouble(tmp_path, gpu, uuids):
    found = summarized(tmp_path, gpu, uuids)
    assert all(row.gpu_trouble == "" for row in found.rows)
    assert not any("shared, throttled or faulty" in remark for remark in found.remarks)


def test_a_run_on_nodes_that_other_jobs_may_use_is_named(tmp_path):
    workspace = Workspace(tmp_path)
    support.keep(workspace, [DDP], repeats=0)
    folders = [support.completed(workspace, DDP, repeat=repeat) for repeat in (1, 2)]
    frozen = folders[0].read_run()
    files.write_json(folders[0].run_json, msgspec.structs.replace(frozen, shares_nodes=True))
    (remark,) = [said for said in summary.summarize(load.load_matrix(workspace, None), "ddp").remarks if "other jobs" in said]
    assert folders[0].run_id in remark
    assert folders[1].run_id not in remark
