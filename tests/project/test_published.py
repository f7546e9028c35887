"""benchmarks/published: measurements of others, and how predictions are held against them."""

import re
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from support_planner import cell as make_cell

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "published"))
import planned_rows
import published_rows
import report
from planned_rows import PlannedRow
from published_rows import PublishedModel, PublishedRow, PublishedTable

from jobs.planner import gpu
from jobs.planner.machine import NO_GPU_MACHINE
from shardlab.runs.prediction import PredictedRange, Prediction

ROWS = published_rows.read_rows()
GIB = 1 << 30
TABLE = PublishedTable(name="t", source="s", machine="m", columns=[], rows=[], memory_is="reserved")


def planned(measured_s, predicted_s, gpus=8, **keys):
    cell = {"gpus": gpus, "global_batch_size": 16, "seq_len": 1024, "precision": "bf16"}
    row = PublishedRow(
        program="p",
        table=TABLE,
        machine="m",
        name="r",
        model=PublishedModel(workload="gpt2"),
        cell=cell,
        step_s=measured_s,
        **keys,
    )
    low_high = PredictedRange(predicted_s / 2, predicted_s, predicted_s * 2)
    categories = {"fragmentation": PredictedRange(0, GIB, GIB)}
    tensors = PredictedRange(8 * GIB, 8 * GIB, 8 * GIB)
    predicted = Prediction(step_s=low_high, memory_by_category=categories, tensor_bytes=tensors, fits="yes")
    return PlannedRow(row, make_cell("gpt2", "single", 1), NO_GPU_MACHINE, predicted)


def test_each_table_names_a_commit_or_a_paper():
    tables = [table for program in published_rows.read_programs() for table in program.tables]
    places = r"@[0-9a-f]{7}|arXiv \d{4}\.\d+|huggingface.co/|issue \d+|[A-Za-z_-]+/[A-Za-z_-]+ .*README\.md"
    assert [table.name for table in tables if not re.search(places, table.source)] == []
    assert len({table.name for table in tables}) == len(tables)


def test_each_machine_is_used_and_has_a_gpu_that_the_planner_knows():
    machines = published_rows.read_machines()
    assert {row.machine for row in ROWS} == set(machines)
    assert [name for name, machine in machines.items() if gpu.find_gpu_model(machine.gpu, machine.memory_gib) is None] == []


def test_no_configuration_is_listed_twice():
    configurations = Counter(msgspec.json.encode([row.job, row.cell, row.options], order="deterministic") for row in ROWS)
    assert [key for key, count in configurations.items() if count > 1] == []


def test_each_row_has_a_result_and_whole_passes():
    for row in ROWS:
        assert row.measured_step_s is not None or row.memory_gib is not None or not row.ran or "fit only" in row.name, row.name
        ranks = row.cell["gpus"] // (row.cell.get("tp", 1) * row.cell.get("pp", 1))
        assert row.cell["global_batch_size"] % (ranks * row.cell["micro_batch_size"]) == 0, row.name


def test_the_measured_time_of_a_step_follows_from_tokens_or_items_per_second():
    [row] = [row for row in ROWS if row.name.startswith("llm-foundry H100-80 large 1:")]
    assert row.measured_step_s == pytest.approx(4096 * 2048 / 512 / 1007)
    [row] = [row for row in ROWS if row.name.startswith("NVIDIA ResNet-50 v100 1:")]
    assert row.measured_step_s == pytest.approx(112 / 367)


def test_pairs_are_rows_of_one_job_that_differ_by_5_percent():
    rows = [planned(1.0, 3.0), planned(1.04, 1.0), planned(1.1, 2.0), planned(2.0, 4.0, gpus=16)]
    pairs = report.find_pairs(rows)
    assert [(pair.faster.row.step_s, pair.slower.row.step_s, pair.in_order) for pair in pairs] == [
        (1.0, 1.1, False),
        (1.04, 1.1, True),
    ]


def test_the_errors_of_a_table_equal_a_computation_by_hand():
    errors = report.measure_errors([planned(1.0, 1.1), planned(1.0, 0.6), planned(1.0, 3.0)])
    assert msgspec.structs.astuple(errors) == pytest.approx((3, 0.4, 2.5 / 3, 1.1, 2 / 3, 4.0))


def test_rows_from_which_a_constant_is_are_in_no_statistic():
    assert report.with_time([planned(1.0, 1.1, used_in="achieved.yaml"), planned(1.0, 1.2)])[0].time_ratio == 1.2


def test_reserved_memory_is_compared_with_tensors_and_fragmentation():
    assert planned(1.0, 1.0, memory_gib=10).memory_ratio == pytest.approx(0.9)
    assert planned(1.0, 1.0, memory_gib=10, memory_comparable=False).memory_ratio is None


def test_rows_are_planned_on_the_machine_that_their_source_names():
    rows = [row for row in ROWS if row.table.name in ("Lambda ResNet-50, fp32, 2020 to 2022", "GPT-2 on 2 TITAN RTX")]
    items, refused = planned_rows.plan_rows(rows)
    assert refused == {}
    assert [item.row.name for item in items] == [row.name for row in rows]
    assert {item.predicted.gpu for item in items} == {"rtx-2080-ti", "titan-rtx", "v100-sxm2-16gb"}
    with_bridge, through_host = items[-2:]
    assert report.predicted_s(with_bridge) < report.predicted_s(through_host)
