"""The figure with one line for each GPU. A GPU is identified by its host and its UUID."""

import json
import sys

import pytest
import support_collect as support

from collect import figure, summary
from collect.figures import telemetry
from collect.reading import load
from shardlab.runs.record import GpuSample, LineWriter, Sample
from shardlab.workspace.workspace import Workspace

GIB = 2**30
UUIDS = [f"GPU-{number}" for number in range(8)]
HOSTS = ("node0", "node1")


def sampled(folder, host, of):
    """Write the telemetry of a host with 8 GPUs: 20 samples per second, from 0.5 s before the first step to 4 s after it.

    of: a function of (index of the GPU, time in seconds) that returns the sample of this GPU.
    """
    with LineWriter(folder.samples_file(host)) as lines:
        for tick in range(90):
            t = tick / 20 - 0.5
            seen = [of(place, t) for place in range(8)]
            moment = {"t_s": t + 1, "wall_s": support.START_S + t, "host": host, "boot_id": "boot"}
            moment |= {"started_hz": 20.0} if tick == 0 else {}
            lines.write_record(Sample(schema=1, gpus=seen, **moment))


def drawn(path, of):
    """Draw the telemetry of a cell on two hosts with eight GPUs each.

    Returns (the figure with one line per GPU, the telemetry figure, which shows all GPUs of the cell together).
    of: a function of (UUID of a GPU, its number from 0 to 15, time in seconds) that returns the sample of this GPU.
    """
    workspace = Workspace(path)
    what = support.cell("ddp", 2)
    support.keep(workspace, [what], repeats=1)
    uuids = [f"{uuid}-of-{number}" for number in range(2) for uuid in UUIDS]
    folder = support.completed(workspace, what, rehearsal=False, found={"gpus": uuids})
    folder.samples_file(support.HOST).unlink()
    for number, host in enumerate(HOSTS):
        sampled(folder, host, lambda place, t, number=number: of(uuids[8 * number + place], 8 * number + place, t))
    loaded = load.load_matrix(workspace, None)
    (group,) = figure.group_by_workload(loaded, summary.summarize(loaded, "ddp"))
    return telemetry.draw_gpus(group), telemetry.draw_hosts(group)


def panel(found, title):
    texts = [entry["text"] for entry in found.layout["annotations"]]
    number = next(place for place, text in enumerate(texts, 1) if text.startswith(title))
    return [line for line in found.data if line["yaxis"] == ("y" if number == 1 else f"y{number}")]


def known(line):
    return [value for value in line["y"] if value is not None]


def test_each_gpu_of_each_host_has_its_own_line(tmp_path):
    def of(uuid, number, t):
        counters = {name: int(number * 1e6 * (t + 1)) for name in ("pcie_rx_bytes", "nvlink_tx_bytes")}
        return GpuSample(uuid=uuid, utilization_pct=5.0 * number, power_w=100.0 + number, memory_clock_mhz=2619.0, **counters)

    found, _ = drawn(tmp_path, of)
    titles = [entry["text"] for entry in found.layout["annotations"]]
    assert titles == [
        "GPU busy (%)", "Power (W)", "Memory clock (MHz)", "Received over PCIe (MB/s)", "Sent over NVLink (MB/s)",
    ]  # fmt: skip
    for title, value in (("GPU busy", 5), ("Received over PCIe", 1), ("Sent over NVLink", 1)):
        lines = panel(found, title)
        assert len(lines) == 16
        for number, line in enumerate(lines):
            assert known(line) == pytest.approx([value * number] * len(known(line)), rel=1e-3, abs=1e-6)
    names = [line["name"] for line in panel(found, "Power")]
    assert len(set(names)) == 16
    assert names[0].endswith(", node0 GPU-0-of-0")
    assert names[8].endswith(", node1 GPU-0-of-1")
    assert [line["showlegend"] for line in found.data] == [True] * 16 + [False] * 64
    json.dumps(found.data, allow_nan=False)


def test_each_gpu_has_its_own_share_of_memory_as_in_study_3(tmp_path):
    """Figures 16 to 19 of the study show the memory of each GPU in percent. The first sample has the size of the GPU."""

    def of(uuid, number, t):
        first = {"memory_total_bytes": 80 * GIB} if t < -0.49 else {}
        return GpuSample(uuid=uuid, memory_used_bytes=number * 4 * GIB, **first)

    found, _ = drawn(tmp_path, of)
    lines = panel(found, "Memory in use (%)")
    assert [known(line)[0] for line in lines] == pytest.approx([5.0 * number for number in range(16)])


def test_a_panel_whose_lines_are_all_hidden_has_an_invisible_trace(tmp_path, monkeypatch):
    """Without a visible trace, plotly draws the axis of the panel at no place, and the browser reports an error."""
    monkeypatch.setattr(telemetry, "VISIBLE_LINES", 15)

    def of(uuid, number, t):
        return GpuSample(uuid=uuid, power_w=100.0, temperature_c=50.0 if number == 15 else None)

    found, _ = drawn(tmp_path, of)
    hidden, invisible = panel(found, "Temperature")
    assert (hidden["visible"], invisible["y"], invisible["showlegend"]) == ("legendonly", [None], False)
    assert len(panel(found, "Power")) == 16


def test_uuids_in_the_legend_are_long_enough_to_be_distinct(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "UUIDS", [f"GPU-00000000-0000-{number}" for number in range(8)])
    found, _ = drawn(tmp_path, lambda uuid, number, t: GpuSample(uuid=uuid, power_w=1.0))
    names = [line["name"] for line in panel(found, "Power")]
    assert len(set(names)) == 16
    assert names[3].endswith(", node0 GPU-00000000-0000-3")


def test_a_gpu_that_is_lost_leaves_its_line_and_no_other(tmp_path):
    def of(uuid, number, t):
        return GpuSample(uuid=uuid, lost=True) if number == 3 and t > 1.4 else GpuSample(uuid=uuid, power_w=300.0)

    found, _ = drawn(tmp_path, of)
    ends = [line["x0"] + line["dx"] * len(known(line)) for line in panel(found, "Power")]
    assert ends[3] < min(ends[:3] + ends[4:]) - 1


def test_without_gpus_the_figure_of_gpus_is_not_drawn(tmp_path):
    workspace = Workspace(tmp_path)
    support.keep(workspace, [support.cell()], repeats=1)
    support.completed(workspace, support.cell())
    loaded = load.load_matrix(workspace, None)
    (group,) = figure.group_by_workload(loaded, summary.summarize(loaded, "single"))
    assert telemetry.draw_gpus(group) is None


def test_gpus_beyond_the_limit_of_the_figure_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "MOST_LINES", 10)
    found, all_of_them = drawn(tmp_path, lambda uuid, number, t: GpuSample(uuid=uuid, utilization_pct=1.0))
    assert found is None  # no figure with a line per GPU: the cell has more GPUs than MOST_LINES
    assert panel(all_of_them, "GPUs busy")
