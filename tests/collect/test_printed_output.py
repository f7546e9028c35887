"""What the verbs of `collect` print about runs with known numbers: tables, headings, units and sentences.

Golden files: golden/printed/NAME.txt for each of five workspaces; golden/widths/NAME.txt for terminals and a pipe.
"""

import re
import time

import pytest
import support_collect as support
import support_ranks
from support_golden import same_as_golden

from collect.cli import main
from collect.report import answer
from jobs.cli import main as jobs
from shardlab.hardware.nvml import Gpu
from shardlab.matrix.cell import Instruments, Validation
from shardlab.workspace.workspace import Workspace

GPUS = [Gpu(uuid="GPU-0", name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30)]
ON_A_GPU = {"memory_used_bytes": 20 * 2**30, "power_w": 350.0, "sm_clock_mhz": 1500, "temperature_c": 61}
METRICS = (
    "throughput_per_s",
    "step_time_ms",
    "peak_memory_bytes",
    "energy_j",
    "final_loss",
    "scaling_efficiency_pct",
    "speedup",
)
CLAIMS = [
    {"id": "faster", "where": "4.1", "says": "DDP is faster.", "test": "throughput_per_s(strategy='ddp', gpus=2) > 6000"},
    {"id": "smaller", "where": "4.2", "says": "It is small.", "test": "peak_memory_bytes(strategy='ddp', gpus=4) < 2e9"},
    {"id": "equal", "where": "4.3", "says": "They agree.", "test": "step_time_ms(strategy='ddp', gpus=2) < 58.8"},
    {"id": "sharded", "where": "4.4", "says": "FSDP fits.", "test": "throughput_per_s(strategy='fsdp2') > 1"},
]
REPORTED = [
    {"where": "table 1", "cell": {"strategy": "ddp", "gpus": 2}, "metric": "throughput_per_s", "printed": "9,100 tokens/s"},
    {"where": "table 1", "cell": {"strategy": "ddp", "gpus": 4}, "metric": "peak_memory_bytes", "printed": "2.3 GiB"},
    {"where": "table 2", "cell": {"strategy": "single"}, "metric": "step_time_ms", "printed": "0.05 s"},
]


def scales(path):
    """Cells on 1, 2 and 4 GPUs, with telemetry of a GPU, validations, and a run out of memory."""
    workspace = Workspace(path)
    validated = support.cell("fsdp2", 2, instruments=Instruments(validation=Validation(every_steps=5)))
    cells = [support.cell(), support.cell("ddp", 2), support.cell("ddp", 4), validated]
    support.keep(workspace, cells, repeats=2, claims=CLAIMS, reported=REPORTED)
    for cell in cells[:-1]:
        for repeat in (1, 2):
            found = {"gpus": ["GPU-0"], "final_accuracy": 0.5}
            support.completed(workspace, cell, repeat, rehearsal=False, gpus=GPUS, gpu=ON_A_GPU, found=found)
    support.failed(workspace, validated, 1, "CUDA out of memory: tried to allocate 2.00 GiB", steps=1)
    verbs = [["explain", cells[1].name(), metric] for metric in METRICS]
    return workspace, [["timeline", run] for run in workspace.list_run_ids()], [["verdicts"], *verbs]


def states(path):
    """Runs in many states, of which some have damaged records."""
    return support.matrix(path), [], []


def pipelines(path):
    """Pipelines with 4 and with 16 micro-batches."""
    workspace = Workspace(path)
    support.complete_pipelines(workspace)
    return workspace, [["timeline", run] for run in workspace.list_run_ids()], []


def layers(path):
    """Runs whose traces have modules, attention, matrix products and memory."""
    workspace, cells = Workspace(path), [support.cell(), support.cell("ddp", 2)]
    support.keep(workspace, cells, repeats=1)
    for cell in cells:
        ranks = [support_ranks.rank_with_layers(number, 3 * cell.gpus) for number in range(cell.gpus)]
        support_ranks.write_traces(support.completed(workspace, cell), ranks)
    return workspace, [["trace", run] for run in workspace.list_run_ids()], []


def collectives(path):
    """Runs whose traces have collectives and idle times."""
    workspace, cells = Workspace(path), [support.cell(), support.cell("ddp", 2)]
    support.keep(workspace, cells, repeats=1)
    for cell, seed in zip(cells, (1, 5), strict=True):
        support_ranks.write_traces(support.completed(workspace, cell), support_ranks.run(seed, size=cell.gpus))
    first, second = workspace.list_run_ids()
    verbs = [["trace", first], ["trace", second], ["trace", first, "--like-hta"], ["trace", second, "--against", first]]
    return workspace, verbs, []


@pytest.mark.parametrize("build", [scales, states, pipelines, layers, collectives])
def test_the_verbs_of_collect_print_the_golden_text(build, tmp_path, capsys):
    workspace, first_verbs, last_verbs = build(tmp_path / "workspace")
    lines = []
    for verb in (
        *first_verbs,
        ["summarize"],
        ["summarize", "-v"],
        ["compare", str(workspace.path), str(workspace.path)],
        ["history"],
        *last_verbs,
    ):
        code = main([*verb, "--workspace", str(workspace.path)])
        printed = capsys.readouterr()
        lines += [f"$ collect {' '.join(verb)} ({code})", *printed.out.splitlines(), *printed.err.splitlines()]
    text = "\n".join(lines).replace(str(workspace.path), "WORKSPACE")
    text = re.sub(r"\b[0-9a-f]{12}\b", "HASH", re.sub(" {2,}", "  ", text))  # spaces depend on the length of the path
    same_as_golden(f"printed/{build.__name__}.txt", text + "\n")


COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ON_TERMINALS = {  # the command; the workspace; the line before which the text ends, because it depends on the machine
    "summarize": (main, ["summarize"], scales, None),
    "summarize-all": (main, ["summarize", "-v"], scales, None),
    "plan": (jobs, ["plan", "--matrix", "quickstart"], None, "8 cell(s)"),
    "status": (jobs, ["status"], states, None),
    "trace": (main, ["trace", "c2.1"], collectives, None),
    "compare": (main, ["compare", ".", "."], scales, None),
}


@pytest.mark.parametrize("name", ON_TERMINALS)
def test_tables_on_terminals_of_several_widths_break_no_number_unit_or_id(name, tmp_path, capsys, monkeypatch):
    command, words, build, end = ON_TERMINALS[name]
    folder = tmp_path / "workspace"
    folder.mkdir()
    if build is not None:
        build(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    lines = []
    for width in (80, 120, 200, None):
        with monkeypatch.context() as environment:
            environment.setenv("COLUMNS", str(width))
            environment.setenv("TTY_COMPATIBLE", "0" if width is None else "1")
            command([*words, "--workspace", "."])
        shown = COLOUR.sub("", capsys.readouterr().out).replace(str(folder), "WORKSPACE")
        shown = shown.split(f"\n{end}")[0].rstrip() if end else shown.rstrip()
        lines += [f"## {'a pipe' if width is None else f'{width} columns'}", *(line.rstrip() for line in shown.splitlines())]
        if width is not None:
            rules = [line for line in shown.splitlines() if line and not line.strip("─")]
            assert rules
            assert max(map(len, rules)) <= width
        if name == "summarize":
            assert len(shown.splitlines()) <= answer.MOST_LINES
    same_as_golden(f"widths/{name}.txt", "\n".join(lines) + "\n")
