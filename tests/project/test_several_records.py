"""Records of proofs on several GPUs: what docs/results accepts, and how the bytes in NCCL's log are counted."""

import sys
from pathlib import Path

import pytest

from jobs.planning import plan
from shardlab.cluster import cluster
from shardlab.hardware.nccl_log import TIMED_STEPS_BEGIN, TIMED_STEPS_END
from shardlab.workspace.workspace import Workspace

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
import nccl_bytes  # noqa: E402 - these are scripts, so their folder must be found first
import several  # noqa: E402
import several_record  # noqa: E402
from several_record import WHY_NOT, CellRecord, GpuProofRecord  # noqa: E402

MODEL = {"n_layer": 16, "n_head": 16, "n_embd": 1024, "seq_len": 1024, "global_batch_size": 16, "steps": 60}
NUMBERS = {
    "loss_difference": 0.0, "step_ms": 90.0, "theory_bytes": 8e9, "counted_bytes": 8e9, "traced_bytes": 8.01e9,
    "nccl_bytes": 8e9, "nvlink_bytes": 8.4e9, "overlap_pct": 71.0, "step_time_over_prediction": 1.1,
}  # fmt: skip


def make_cell(numbers=NUMBERS, **keys):
    missing = {name: why for name, why in WHY_NOT.items() if name not in numbers}
    fields = {"strategy": "ddp", "precision": "bf16", "tp": 1, "pp": 1, "state": "completed", "work": "proven"}
    return CellRecord(**(fields | {"transports": {"P2P": 24}, "numbers": numbers, "not_measured": missing} | keys))


def make_record(*cells, rest=None, **keys):
    """A record of a node with two GPUs, as JSON. cells: replace those of their strategy and precision."""
    given = {(cell.strategy, cell.precision): cell for cell in cells}
    expected = several_record.list_expected_cells(keys.get("gpus_per_node", 2))
    cells = [given.get(key) or make_cell(strategy=key[0], precision=key[1], **(rest or {})) for key in expected]
    fields = {
        "date": "2026-11-28", "gpu": "NVIDIA H100 80GB HBM3", "nodes": 1, "gpus_per_node": 2, "provider": "local",
        "verified": True, "links": ["NVLink", "SYS"], "shardlab": "0.1.0", "torch": "2.13.0", "cuda": "13.0", "nccl": "2.28.9",
        "driver": "580.159.04", "model": MODEL, "cells": list(cells), "matrix_cells": len(cells),
    }  # fmt: skip
    fields |= keys
    checks = several_record.judge(cells, fields["nodes"])
    return several_record.encode_record(GpuProofRecord(**({"checks": checks} | fields)))


def refusals(content):
    return " ".join(several_record.read_record(content)[1])


def test_each_record_in_docs_results_is_accepted():
    for path in sorted((ROOT / "docs" / "results").glob("*/several-gpus.json")):
        assert refusals(path.read_bytes()) == "", path


def test_a_record_of_real_gpus_is_accepted_and_its_checks_follow_from_its_cells(tmp_path, capsys):
    content = make_record(make_cell(), make_cell(strategy="tp", work="different", numbers=NUMBERS | {"nccl_bytes": 9e9}))
    (tmp_path / "r.json").write_bytes(content)
    assert several_record.main([str(tmp_path / "r.json")]) == 0
    assert "accepted: 2 x NVIDIA H100 80GB HBM3, 10 cells" in capsys.readouterr().out
    verdicts = {check.name: check.verdict for check in several_record.judge([make_cell()], 1)}
    assert verdicts == {
        "every cell completed": "holds", "same work as one process": "holds", "NCCL's bytes / counted bytes": "holds",
        "traced bytes / NCCL's bytes": "holds", "bytes of the links / NCCL's bytes": "holds",
        "hidden communication (%)": "holds", "step time / prediction": "holds",
        "memory / prediction": "not measured", "counted bytes / prediction": "not measured",
    }  # fmt: skip
    record = several_record.read_record(content)[0]
    assert [check.verdict for check in record.checks[:4]] == ["holds", "fails", "fails", "fails"]


@pytest.mark.parametrize(
    ("numbers", "transport", "verdict"),
    [
        ({"nvlink_bytes": 4e9}, "P2P", "fails"),  # half of the bytes went another way
        ({"pcie_bytes": 9e9}, "SHM", "holds"),  # without NVLink
        ({"nvlink_bytes": 4e9, "rdma_bytes": 4.2e9}, "NET/IB", "holds"),
        ({"nvlink_bytes": 4e9, "rdma_bytes": 0.0, "network_bytes": 4.2e9}, "NET/Socket", "holds"),
        ({"nvlink_bytes": 4e9}, "NET/IB", "not measured"),  # nothing counted the bytes between nodes
        ({}, "P2P", "not measured"),
    ],
)
def test_the_bytes_of_all_links_together_are_compared_with_those_of_nccl(numbers, transport, verdict):
    cell, nodes = make_cell({"nccl_bytes": 8e9} | numbers, transports={transport: 8}), 2 if "NET" in transport else 1
    (check,) = [check for check in several_record.judge([cell], nodes) if "links" in check.name]
    assert check.verdict == verdict


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (make_record(make_cell(), gpu="NVIDIA H100 of alice@10.0.0.1"), "$.gpu"),
        (make_record(make_cell(), torch="/home/alice/torch"), "$.torch"),
        (make_record(make_cell(transports={"NET/mlx5_0": 2})), "$.cells[0].transports"),
        (make_record(make_cell()).replace(b'"nodes"', b'"host": "gpu7", "nodes"'), "unknown field `host`"),
        (make_record(make_cell(), cuda=None), "the GPUs may be fake"),
        (make_record(make_cell(), gpus_per_node=1), "found 1 GPU in all"),
        (make_record(make_cell(), matrix_cells=2), "all 10 cells"),
        (make_record(cells=[make_cell()] * 10), "all 10 cells"),
        (make_record().replace(b'"strategy": "tp"', b'"strategy": "gpu-node17"'), "$.cells"),
        (make_record(gpu="NVIDIA alice smith"), "no model that shardlab knows"),
        (make_record(date="2099-01-31"), "not in the future"),
        (make_record(date="2026-11-31"), "not in the future"),
        (make_record(model={"n_layer": 16}), "a size is missing"),
        (make_record(make_cell(state="failed", work=None)), "numbers of completed runs"),
        (make_record().replace(b'"state": "completed"', b'"state": "alice@host", "state": "completed"', 1), "other bytes"),
        (make_record(make_cell(state="running", work=None)), "its run is running"),
        (make_record(make_cell({}, state="gpu7")), "state: unknown"),
        (make_record(make_cell(work=None)), "no verdict of the same-work proof"),
        (make_record(make_cell(NUMBERS | {"step_ms": 0.0})), "step_ms: found 0.0"),
        (make_record(make_cell(NUMBERS | {"gpu7_bytes": 1.0})), "unknown number 'gpu7_bytes'"),
        (make_record(make_cell(not_measured={})), "either a number or the reason"),
        (make_record(make_cell({"nccl_bytes": 1.0}, not_measured=dict.fromkeys(WHY_NOT, "gpu7 was down"))), "known sentences"),
        (make_record(rest={"numbers": {"step_ms": 9.0}}), "nothing shows that NCCL carried data"),
        (make_record(make_cell(), checks=[]), "not those that follow from the cells"),
        (b"{", "truncated"),
    ],
)
def test_a_record_is_refused_with_a_reason(content, why):
    assert why in refusals(content)


def test_a_file_that_cannot_be_read_is_refused(tmp_path, capsys):
    assert several_record.main([str(tmp_path / "none.json")]) == several_record.main([]) == 2
    assert "none.json: refused: the file cannot be read" in capsys.readouterr().err


CALL = (
    "host:1:2 [0] NCCL INFO {}: opCount 1f sendbuff 0x7f recvbuff (nil) count {} datatype {} op 0 root {} comm 0x5 [nranks=4] "
    "stream 0x6"
)


def write_log(path, *calls, before=(), end=TIMED_STEPS_END):
    lines = [*(CALL.format(*call) for call in before), TIMED_STEPS_BEGIN, *(CALL.format(*call) for call in calls), end]
    path.write_text("\n".join([*lines, CALL.format("AllReduce", 10**9, 7, 0)]))
    return path


def test_bytes_of_nccl_are_those_of_its_collectives_in_the_timed_steps(tmp_path):
    calls = [
        ("AllReduce", 100, 7, 0),  # 100 fp32 over 4 ranks: 2 x 3/4 x 400 bytes
        ("AllGather", 100, 9, 0),  # 100 bf16 of each rank: 3/4 x 800 bytes
        ("ReduceScatter", 100, 7, 0),  # 3/4 x 1600 bytes
        ("Broadcast", 100, 1, 0),  # 75 bytes, as the mean over the ranks
        ("Send", 10, 4, 3),
        ("Recv", 10, 4, -1),
    ]  # fmt: skip
    log = write_log(tmp_path / "0", *calls, before=[("AllReduce", 5, 7, 0)])
    assert nccl_bytes.count_step_bytes([log, log], 2).sent_bytes == 600 + 600 + 1200 + 75 + 80


@pytest.mark.parametrize(
    ("calls", "end", "unread_lines"),
    [
        ([], TIMED_STEPS_END, 0), ([("AllReduce", 1, 7, 0)], "", 0), ([("AllReduce", 1, 99, 0)], TIMED_STEPS_END, 1),
        ([("Magic", 1, 7, 0)], TIMED_STEPS_END, 1), ([("AllReduce", 1, 7, 0), ("AllReduce", "1k", 7, 0)], TIMED_STEPS_END, 1),
    ],
    ids=["no calls", "no end", "unknown type", "unknown call", "unknown form"],
)  # fmt: skip
def test_bytes_of_nccl_that_are_not_known_are_no_number(tmp_path, calls, end, unread_lines):
    good = write_log(tmp_path / "good", ("AllReduce", 1, 7, 0))
    assert nccl_bytes.count_step_bytes([good], 1).sent_bytes
    bad = write_log(tmp_path / "bad", *calls, end=end)
    assert nccl_bytes.count_step_bytes([good, bad, bad], 1) == (None, 2 * unread_lines)
    assert nccl_bytes.count_step_bytes([tmp_path / "none"], 1) == (None, 0)


def test_a_check_of_nccls_bytes_does_not_hold_if_lines_of_a_log_were_skipped():
    numbers = {name: number for name, number in NUMBERS.items() if name != "nccl_bytes"}
    skipped = make_cell(numbers, strategy="tp", unread_nccl_lines=3)
    verdicts = [check.verdict for check in several_record.judge([make_cell(), skipped], 1) if "NCCL" in check.name]
    assert verdicts == ["not measured"] * 3
    assert refusals(make_record(skipped)) == ""
    assert "3 lines of NCCL's log were not read" in refusals(make_record(make_cell(unread_nccl_lines=3)))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", ""), ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb+me", ""), ("GRID A100-4C", ""),
        ("NVIDIA A40-48Q", ""), ("GRID A100D-1-10CME", ""), ("NVIDIA A100 80GB PCIe", ""),
        ("GRID alice-4C", "no model that shardlab knows"), ("NVIDIA A100-SXM4-40GB MIG alice", "no model that shardlab knows"),
        ("GRID A1009-4C", "no model that shardlab knows"), ("NVIDIA A100_alice", "$.gpu"),
    ],
)  # fmt: skip
def test_names_of_parts_of_gpus_and_of_virtual_gpus_are_accepted(name, why):
    assert why in refusals(make_record(gpu=name))
    assert bool(why) == bool(refusals(make_record(gpu=name)))


SITE = """schema: 1
name: site
provider: slurm
gpus: {per_node: 4}
slurm: {partition: gpu}
storage: {shared: /scratch/shardlab}
"""


@pytest.mark.parametrize(("gpus", "nodes", "cells"), [(2, 1, 10), (3, 1, 10), (4, 1, 13), (8, 1, 13), (1, 2, 10), (4, 2, 13)])
def test_the_matrix_is_planned_for_a_node_and_for_two_nodes_of_a_site(tmp_path, gpus, nodes, cells):
    (tmp_path / "m.yaml").write_text(several.size_matrix(several.MATRIX.read_text(), gpus, nodes))
    (tmp_path / "cluster.yaml").write_text(SITE)
    site = cluster.load_cluster(tmp_path / "cluster.yaml") if nodes > 1 else cluster.THIS_MACHINE
    planned = plan.plan_matrix(Workspace(tmp_path), str(tmp_path / "m.yaml"), site, where=None, repeats=None)
    assert len(planned.cells) == cells
    assert {(cell.gpus, cell.nnodes) for cell in planned.cells} == {(gpus * nodes, nodes)}


def test_two_nodes_need_a_cluster_and_one_gpu_is_not_several(capsys):
    assert several.main(["--nodes", "2", "--gpus", "1"]) == 2
    assert several.main(["--gpus", "9"]) == 2
    assert "Allowed: 2 to 8 GPUs of a node" in capsys.readouterr().err
