"""The numbers, axes, units and captions of every figure of the report, from records with known numbers.

The golden file golden/figures.txt has for each figure its title, caption and axes, and for each of its traces the number of
points, the first and the last point, and the sums of both coordinates; and the texts at up to three kinds of points.
"""

from collections import Counter

import msgspec
import pytest
import support_collect as support
import support_ranks
import support_report
from support_golden import same_as_golden

from collect import figure, summary
from collect.reading import load
from shardlab.files import files
from shardlab.hardware.nvml import Gpu
from shardlab.matrix.cell import Instruments, Validation
from shardlab.runs.prediction import PredictedExchange, Prediction, find_prediction_path, make_exact_range
from shardlab.runs.record import LineWriter, ValidationRecord
from shardlab.workspace.workspace import Workspace

MIB, GIB = 2**20, 2**30
GPUS = [Gpu(uuid="GPU-0", name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB)]
AXIS = ("domain", "dtick", "nticks", "range", "rangemode", "type")  # keys of an axis that change what a reader sees
ON_A_GPU = {"memory_used_bytes": 20 * GIB, "power_w": 350.0, "sm_clock_mhz": 1500, "temperature_c": 61}


def earlier(path):
    """Real runs that an earlier version wrote."""
    return support.earlier(path), "single"


def scales(path):
    """Completed runs on 1, 2 and 4 GPUs and with several batch sizes, with telemetry of a GPU, and one out of memory."""
    workspace = Workspace(path)
    cells = [support.cell(), *(support.cell("ddp", gpus) for gpus in (1, 2, 4))]
    cells += [support.cell("ddp", 2, global_batch_size=size, micro_batch_size=size // 2) for size in (16, 32)]
    support.keep(workspace, cells, repeats=2)
    for cell in cells[:-1]:
        for repeat in (1, 2):
            support.completed(workspace, cell, repeat, rehearsal=False, gpus=GPUS, gpu=ON_A_GPU, found={"gpus": ["GPU-0"]})
    support.failed(workspace, cells[-1], 1, "CUDA out of memory: tried to allocate 2.00 GiB", steps=1)
    return workspace, "single"


def layers(path):
    """Cells whose traces have modules, attention, matrix products and memory."""
    workspace, cells = Workspace(path), [support.cell(), support.cell("ddp", 2)]
    support.keep(workspace, cells, repeats=1)
    for cell in cells:
        ranks = [support_ranks.rank_with_layers(number, 3 * cell.gpus) for number in range(cell.gpus)]
        support_ranks.write_traces(support.completed(workspace, cell), ranks)
    return workspace, "single"


def collectives(path):
    """Cells whose traces have collectives and idle times."""
    workspace, cells = Workspace(path), [support.cell(), support.cell("ddp", 2)]
    support.keep(workspace, cells, repeats=1)
    for cell, seed in zip(cells, (1, 5), strict=True):
        support_ranks.write_traces(support.completed(workspace, cell), support_ranks.run(seed, size=cell.gpus))
    return workspace, "single"


def pipelines(path):
    """Pipelines with 4 and with 16 micro-batches."""
    workspace = Workspace(path)
    support.complete_pipelines(workspace)
    return workspace, "single"


def categories(path):
    """Cells whose memory was followed by category, at the peak and over three steps, beside an estimate and a prediction."""
    workspace, cells = Workspace(path), [support.cell("ddp", 2), support.cell("zero3", 2)]
    support.keep(workspace, cells, repeats=1)
    for cell, share in zip(cells, (1, 2), strict=True):
        peak = {"parameter": 40 * MIB // share, "gradient": 40 * MIB // share, "optimizer_state": 80 * MIB // share}
        peak |= {"activation": 7 * MIB, "temporary": 5 * MIB, "buffer": 0, "master_parameter": (share - 1) * 20 * MIB}
        memory = {"cost_s": 0.1, "peak_bytes": peak, "largest_bytes": peak}
        memory["estimate_bytes"] = {"parameter": 40 * MIB // share, "gradient": 30 * MIB, "optimizer_state": 80 * MIB}
        folder = support.completed(workspace, cell, found={"instruments": {"memory": memory}})
        files.make_folder(folder.memory_file(0).parent)
        points = {"parameter": [4 * MIB] * 3, "gradient": [0, share * MIB, 0]}
        curves = {"schema": 1, "rank": 0, "step": 2, "steps": 4 - share, "t_ms": [0, 500, 1500], "points": points}
        files.write_json(folder.memory_file(0), curves)
        memory = {"parameter": make_exact_range(4 * GIB / share), "activation": make_exact_range(9 * GIB)}
        exchanges = (PredictedExchange("all_gather", GIB / 2, 36, 2), PredictedExchange("all_reduce", share * GIB, 3, 2))
        predicted = Prediction(memory_by_category=memory, exchanges=exchanges)
        find_prediction_path(folder.path).write_bytes(msgspec.json.encode(predicted))
    return workspace, "ddp"


def trainings(path):
    """A cell with epochs and validations, and asynchronous servers with two intervals of pulls."""
    workspace = Workspace(path)
    validated = support.cell(instruments=Instruments(validation=Validation(every_steps=5)))
    servers = [support.cell("ps-async", 2, "fork", servers=1, options={"pull_interval": pulls}) for pulls in (1, 4)]
    support.keep(workspace, [validated, *servers], repeats=1)
    folder = support.completed(workspace, validated, found={"epoch_time_s": [4.0, 2.0, 3.0, 2.5, 2.25, 8.0]})
    with LineWriter(folder.path / "validation.jsonl") as lines:
        for step, share in ((5, 0.5), (10, 0.75)):
            lines.write_record(ValidationRecord(schema=1, step=step, t_s=0.0, wall_s=0.0, loss=1.0, accuracy=share, items=8))
    for cell, staleness in zip(servers, (1, 5), strict=True):
        sent = {"communication_bytes": {"counted": 1e6 / staleness}}
        support.completed(
            workspace, cell, found={"final_accuracy": 0.5 + staleness / 100, "train_time_s": 10 / staleness, **sent}
        )
    return workspace, "single"


def format_value(value):
    """A number with six digits, and any other value as text."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def summarize_values(values):
    """The number of values, the first, the last and the sum of those that are numbers."""
    numbers = [value for value in values if isinstance(value, int | float)]
    ends = f"{format_value(values[0])} ... {format_value(values[-1])}" if len(values) > 0 else "none"
    return f"{len(values)}: {ends}, sum {format_value(float(sum(numbers)))}"


def round_numbers(value):
    """A value of an axis, with the numbers in a list rounded to four places."""
    return [round(number, 4) for number in value] if isinstance(value, list | tuple) else value


def describe_figure(drawn):
    """The lines about a figure in the golden file."""
    lines = [f"  {drawn.title}: {drawn.caption}"]
    for key, value in sorted(drawn.layout.items()):
        if key.startswith(("xaxis", "yaxis")):
            said = {name: round_numbers(entry) for name, entry in sorted(value.items()) if name in AXIS}
            title = value.get("title", {}).get("text", "")
            lines.append(f"    {key}: {title} {said}")
    lines += [f"    note: {note['text']}" for note in drawn.layout.get("annotations", ())]
    for trace in drawn.data:
        axes = " and ".join(f"{axis} {summarize_values(list(trace[axis]))}" for axis in ("x", "y") if axis in trace)
        name = f"{trace.get('name')} ({trace.get('xaxis', 'x')} {trace.get('yaxis', 'y')})"
        texts = trace.get("text")
        shown = "" if texts is None else f", text {texts if isinstance(texts, str) else list(texts)[:3]}"
        lines.append(f"    {name}: {axes}{shown}")
    hovers = [trace["hovertemplate"] for trace in drawn.data if isinstance(trace.get("hovertemplate"), str)]
    lines += [f"    hover: {hover}" for hover in dict.fromkeys(hovers[:3])]
    return lines


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """{name of a workspace: {name of a figure: its lines in the golden file}}"""
    made = {}
    for build in (earlier, scales, layers, collectives, pipelines, categories, trainings):
        workspace, baseline = build(tmp_path_factory.mktemp("figures") / build.__name__)
        loaded = load.load_matrix(workspace, None)
        groups = figure.group_by_workload(loaded, summary.summarize(loaded, baseline))
        drawn = [found for draw in support_report.page_figures() for group in groups if (found := draw(group)) is not None]
        made[build.__name__] = {found.name: describe_figure(found) for found in drawn}
    return made


def test_every_figure_has_its_known_numbers(figures):
    """The golden file has each figure of the first two workspaces that have it."""
    lines, times_written = [], Counter()
    for name, drawn in figures.items():
        for title, parts in drawn.items():
            times_written[title] += 1
            if times_written[title] <= 2:
                lines += [f"{name}: {title}", *parts]
    same_as_golden("figures.txt", "\n".join(lines) + "\n")


def test_all_figures_but_those_of_snapshots_and_faults_are_drawn(figures):
    """Other tests hold the numbers of those four: test_allocator, test_collect_faults."""
    assert len({name for drawn in figures.values() for name in drawn}) == len(support_report.page_figures()) - 4
