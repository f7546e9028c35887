"""The report of a workspace: tables, metrics and figures of idle time, phases, modules, memory, products and attention."""

import json
import re

import pytest
import support_collect
import support_ranks as support

from collect import figure, summary, write_report
from collect.cli import main
from collect.figures import memory_over_time, operators, rates, step_parts
from collect.metric import load_metrics
from collect.reading import load
from shardlab.workspace.workspace import Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    made = Workspace(tmp_path_factory.mktemp("details"))
    cells = [support_collect.cell(), support_collect.cell("ddp", 2), support_collect.cell("fsdp2", 2)]
    support_collect.keep(made, cells, 2)
    for cell, size in ((cells[0], 1), (cells[1], 2)):
        for repeat in (1, 2):
            ranks = [support.rank_with_layers(number, 3 * repeat) for number in range(size)]
            support.write_traces(support_collect.completed(made, cell, repeat), ranks)
    support_collect.completed(made, cells[2])
    return made


@pytest.fixture(scope="module")
def results(workspace):
    loaded = load.load_matrix(workspace, None)
    told = summary.summarize(loaded, "single")
    (group,) = figure.group_by_workload(loaded, told)
    return loaded, told, group


def test_the_tables_are_per_step_and_rank(results):
    loaded, told, _ = results
    ddp = loaded.cells[1].id
    found = {one.layer: one for one in told.layers if one.cell == ddp}
    # means over the repeats, whose kernels last 3 and 6 ns longer
    assert [(name, one.parent, one.depth, one.n, one.calls) for name, one in found.items()] == [
        ("Model_0", "", 0, 2, 1),
        ("Linear_0", "Model_0", 1, 2, 1),
        ("Linear_1", "Model_0", 1, 2, 1),
    ]
    assert found["Linear_0"].forward_ms == pytest.approx(24.5e-6)
    assert found["Linear_0"].backward_ms == pytest.approx(44.5e-6)
    assert found["Model_0"].forward_ms == pytest.approx(49e-6)
    assert found["Model_0"].communication_ms == 0
    (memory,) = [one for one in told.device_memory if one.cell == ddp]
    assert (memory.device, memory.n, memory.start_bytes, memory.peak_bytes) == ("cuda", 2, 4032, 4160)
    assert memory.peak_reserved_bytes == 8192
    (product,) = [one for one in told.matrix_products if one.cell == ddp]
    assert (product.operator, product.m, product.n, product.k, product.repeats, product.calls) == ("aten::mm", 16, 32, 8, 2, 2)
    assert product.ms == pytest.approx(49e-6)
    assert product.flops_per_s == pytest.approx(2 * 16 * 32 * 8 * 2 / 49e-9)
    (use,) = [one for one in told.attention if one.cell == ddp]
    assert (use.backend, use.backward, use.name, use.calls, use.kernels) == (
        "flash",
        False,
        support.FLASH,
        1,
        ["flash_fwd_kernel"],
    )
    assert use.ms == pytest.approx(14.5e-6)
    phases = {one.phase: one for one in told.phases if one.cell == ddp}
    assert phases["backward"].gpu_ms == pytest.approx(2 * 44.5e-6)
    assert sum(one.host_ms for one in phases.values()) == pytest.approx(1000e-6)
    (idle,) = [one for one in told.idle if one.cell == ddp]
    row = next(row for row in told.rows if row.id == ddp)
    assert idle.idle_ms == pytest.approx(row.metrics["idle_ms"].value)
    assert idle.launch_delay_us == row.metrics["launch_delay_us"].value
    assert {one.cell for one in (*told.idle, *told.phases, *told.layers)} == {cell.id for cell in loaded.cells[:2]}


def test_the_metrics_of_trace_details_have_their_values(results):
    loaded, _, _ = results
    metrics = {metric.name: metric for metric in load_metrics()}
    run, without = loaded.cells[1].completed_runs[0], loaded.cells[2].completed_runs[0]
    for name, of, value, unit in (("layer_ms", "Linear_1", (23 + 43) / 1e6, "ms"), ("attention_ms", "flash", 13 / 1e6, "ms")):
        quantity = metrics[name].of_run_at(run, of)
        assert (quantity.value, quantity.unit, quantity.kind) == (pytest.approx(value), unit, "gpu")
        assert metrics[name].of_run_at(run, "nothing") is None
        assert metrics[name].of_run_at(without, of) is None
    for name, value in (
        ("profiled_peak_bytes", 4160),
        ("profiled_reserved_bytes", 8192),
        ("matrix_product_flops_per_s", 2 * 16 * 32 * 8 / 23e-9),
    ):
        assert metrics[name].of_run(run).value == pytest.approx(value)
        assert metrics[name].of_run(without) is None


def test_the_figures_show_the_tables(results):
    _, told, group = results
    drawn = operators.draw_layers(group)
    assert [note["text"] for note in drawn.layout["annotations"]] == ["Linear_0", "Linear_1"]
    bars = [bar for bar in drawn.data if bar["name"].startswith("ddp")]
    assert [bar["x"] for bar in bars] == [pytest.approx([24.5e-6] * 2), pytest.approx([44.5e-6] * 2)]
    assert bars[1]["base"] == bars[0]["x"]
    products = rates.draw_matrix_products(group).data
    assert [x for bar in products if bar["name"] == "aten::mm" for x in bar["x"]] == [
        one.flops_per_s / 1e12 for one in told.matrix_products
    ]
    assert {x for bar in products if bar["name"] == "peak of the GPU" for x in bar["x"]} == {67}
    (bar, *_) = step_parts.ATTENTION_FIGURE.draw(group).data
    assert (bar["name"], bar["x"]) == ("flash, forward", pytest.approx([14.5e-6] * 2))
    memory = memory_over_time.draw_profiled_memory(group).data
    assert [max(line["y"]) for line in memory] == [pytest.approx(4160 / 1024)] * 2


def test_the_page_has_the_tables(workspace, results):
    loaded, told, _ = results
    write_report.write_report(workspace.path / "report", workspace, loaded, told)
    page = (workspace.path / "report" / "index.html").read_text()
    for name in ("idle", "phases", "device_memory", "matrix_products", "attention"):
        (table,) = re.findall(rf'<table id="{name}">.*?</table>', page, re.DOTALL)
        assert table.count('<th scope="row"') == len(getattr(told, name)) > 0
    assert page.count("<td><code>Model_0</code></td>") == 4  # in each of two cells, it is the parent of two modules
    written = json.loads((workspace.path / "report" / "summary.json").read_text())
    assert [one["layer"] for one in written["layers"]] == ["Model_0", "Linear_0", "Linear_1"] * 2


def test_collect_trace_prints_the_tables_of_details(workspace, results, capsys):
    loaded, _, _ = results
    run = loaded.cells[1].completed_runs[0].run_id
    assert main(["trace", run, "--json", "--workspace", str(workspace.path)]) == 0
    for rank in json.loads(capsys.readouterr().out)["ranks"]:
        assert [layer["name"] for layer in rank["layers"]] == ["Model_0", "Linear_0", "Linear_1"]
        assert rank["memory"][0]["points"][0] == [0, 4032, None]
        assert rank["matrix_products"][0]["flops_per_s"] == pytest.approx(2 * 16 * 32 * 8 / 23e-9)
        assert rank["attention"][0]["backend"] == "flash"
    assert main(["trace", run, "--workspace", str(workspace.path)]) == 0
    shown = capsys.readouterr().out
    for title in (
        "modules with all that they call",
        "memory of the allocators",
        "matrix products, all ranks",
        "attention, all ranks",
    ):
        assert title in shown
    assert "not recorded" not in shown
    support.run(3, size=1)[0].write(workspace.path)
    assert main(["trace", f"{workspace.path}/rank-00000.json", "--workspace", str(workspace.path)]) == 0
    assert "`instruments: {profile: {stacks: true, memory: true, shapes: true}}` records them." in capsys.readouterr().out
