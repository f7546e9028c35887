"""Changes fields of valid records to hostile values, drawn from a seed: no change stops a command or reaches another run.

A change goes through the decoder of its file, or through one command. The long form makes more changes.
"""

import contextlib
import copy
import io
import json
import os
import random
import re
import shutil

import msgspec
import pytest
import support_collect as support
from support_long import LONG
from support_queue import Queue, Study

import collect.cli
from jobs import cli
from jobs.schedulers import slurm
from jobs.slurm import submission
from jobs.slurm.submission import Submission
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.hardware import host
from shardlab.hardware.host import Host
from shardlab.matrix.cell import AnyCell
from shardlab.matrix.command import Command
from shardlab.matrix.expansion import Expansion
from shardlab.runs.checksums import PROJECTIONS, ModelChecksum, PieceChecksum
from shardlab.runs.prediction import PredictedRange, Prediction
from shardlab.runs.record import Event, Result, Sample, StepRecord, ValidationRecord
from shardlab.runs.run import Run, make_run_id

SEED = 37
VALUES = [
    10**40, -(10**40), 2**63, 2**64, 2**31, -1, 0, 1, float("nan"), float("inf"), 1e300, -1e300, 1e18, 2.5, True, None, "", [],
    {}, "\n", "n1\nid > PWNED\n#", "a\x00b", "../../..", "../../../elsewhere/x", "/etc/passwd", "--me", "--wrap=touch PWNED",
    "$(touch PWNED)", "\x1b]0;owned\x07\x1b[2J", "\u202ea\u2066", "x" * 100_000, "777", "1_0", "1_1\n", ["--me"], {"a": 10**40},
    [[[[]]]], "slurm", "local", "node0", "completed", "\ud800",
]  # fmt: skip
# Texts of records that are only shown, compared, looked up in a menu, or quoted in a script.
SHOWN = {
    "event", "writer", "requeued", "why", "reason", "after", "kind", "backend", "state", "unit", "title", "path", "summary",
    "kernel", "system", "cpu_model", "gpu_driver",
    "gpu_why_absent", "python", "uuid", "name", "mac", "pci", "driver", "cpus", "how",
    "gpu", "op", "bottleneck", "link_layer", "device", "mig_of", "git_commit", "created", "cell_hash", "hash", "baseline",
    "launcher", "workload", "strategy", "prove", "scheduler", "track", "source", "packages", "environment", "data_path",
    "proofs_path", "workload_code", "strategy_code", "optimizer", "unseen",
}  # fmt: skip
# Parts of records whose keys have no types; their texts are only shown and compared, too.
FREE = {"options", "versions", "templates", "packages", "data", "instruments", "knobs", "cluster", "cell", "excluded", "claims"}
KINDS = [
    ("run.json", Run), ("events.", Event), ("steps/", StepRecord), ("samples/", Sample), ("validation.jsonl", ValidationRecord),
    ("result.json", Result), ("env/", Host), ("prediction.json", Prediction), ("submissions/", Submission),
    ("matrices/", Expansion), ("checksums/", ModelChecksum),
]  # fmt: skip


def places(value, before=()):
    """The path of every value in a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inside:
        yield (*before, key)
        yield from places(entry, (*before, key))


def put(document, place, value):
    """Change a value of a document, and return the value before."""
    for key in place[:-1]:
        document = document[key]
    before, document[place[-1]] = document[place[-1]], value
    return before


def records_of(path):
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    with contextlib.suppress(ValueError):
        return [json.loads(line) for line in lines]
    return []


def kind_of(path):
    return next((kind for part, kind in KINDS if part in str(path)), None)


def files_of(workspace):
    found = sorted(path for path in workspace.path.rglob("*") if path.suffix in (".json", ".jsonl") and kind_of(path))
    return [path for path in found if records_of(path)]


def make_script_cell(ranks):
    """A cell whose workload is a command of the user."""
    return AnyCell(
        workload="mine", strategy="ddp", gpus=ranks, launcher="torchrun", prove="off", warmup_steps=2, time_limit_s=600,
        command=Command(words=["python", "train.py"]), workload_code="0123456789abcdef",
    )  # fmt: skip


def write_checksums(run_dir, ranks):
    """Write the checksums of a run of a command, each rank with its part of a parameter."""
    for rank in range(ranks):
        run_dir.checksums_file(rank).parent.mkdir(exist_ok=True)
        lines = b""
        for step in (0, 2):
            numbers = [float(step) / ranks] * PROJECTIONS
            piece = PieceChecksum(
                name="fc.weight", shape=[4], offsets=[rank * 2], block=[4 // ranks], dtype="float32", weight=numbers,
                gradient=numbers,
            )  # fmt: skip
            record = ModelChecksum(schema=1, step=step, rank=rank, world_size=ranks, optimizer="AdamW", pieces=[piece])
            lines += msgspec.json.encode(record) + b"\n"
        run_dir.checksums_file(rank).write_bytes(lines)


def collected(path):
    """A workspace with completed and failed runs, predictions, and checksums of a command."""
    workspace = support.Workspace(path)
    single, ddp = support.cell(), support.cell("ddp", 2)
    scripts = [make_script_cell(ranks) for ranks in (1, 2)]
    support.keep(workspace, [single, ddp, *scripts], repeats=2)
    for script in scripts:
        write_checksums(support.completed(workspace, script), script.gpus)
    for what in (single, ddp):
        folder = support.completed(workspace, what, 1)
        support.completed(workspace, what, 2, gpu=True)
        files.write_json(folder.path / "prediction.json", Prediction(step_s=PredictedRange(0.1, 0.2, 0.3), sent_bytes=1e6))
        record = ValidationRecord(schema=1, step=10, t_s=2.0, wall_s=support.START_S + 2, loss=2.5, accuracy=0.5, items=8)
        (folder.path / "validation.jsonl").write_bytes(msgspec.json.encode(record) + b"\n")
    support.failed(workspace, single, 2, "stopped", attempt=2, steps=3, reason="timeout", why="ended at its limit")
    support.event(folder, "clock", 1, when="start", offset_s=0.1, within_s=0.01)
    support.event(folder, "stood_still", 2, seconds=0.1, ended_s=support.START_S)
    support.event(folder, "placed", -3, nodes=["node0"])
    return workspace


@pytest.fixture(scope="module")
def in_slurm(tmp_path_factory):
    """(a study with two runs that wait in Slurm and a run that failed, a stand-in of Slurm)."""
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm.SlurmScheduler, "POLL_S", 0.0)
        patch.setattr(submission, "SEARCH_INTERVAL_S", 0.0)
        queue = Queue(folder / "slurm", patch)
        queue.rule(ends=0)
        study = Study(folder / "inside", 3)
        assert study.jobs("submit") == 0
        failed = study.workspace.list_run_dirs()[0]
        failed.claim.mkdir()
        failed.write_event("attempt", "started", **host.identify_this_process(), job="1", restarts=0)
        failed.write_event("attempt", "exited", code=1, reason="node_fail", why="lost", steps=0)
        state = queue.state()
        (queue.folder / "queue.json").write_text(json.dumps({**state, "tasks": state["tasks"][1:]}))
        yield study, queue


def texts_of(value):
    """(key, text) of every text in a document."""
    for place in places(value):
        entry = value
        for key in place:
            entry = entry[key]
        if isinstance(entry, str):
            yield place, entry


def test_a_decoder_refuses_a_hostile_value_or_the_value_is_only_shown(tmp_path, in_slurm):
    draw = random.Random(SEED)
    workspaces = [collected(tmp_path / "w"), in_slurm[0].workspace]
    documents = [(kind_of(path), record) for one in workspaces for path in files_of(one) for record in records_of(path)[:20]]
    by_kind = {kind: [document for other, document in documents if other is kind] for _, kind in KINDS}
    assert all(by_kind.values()), by_kind
    every = {kind: [(one, list(places(one))) for one in found] for kind, found in by_kind.items()}
    accepted, unbounded = set(), set()
    for _ in range(1_000_000 if LONG else 20_000):
        kind = draw.choice(list(every))
        document, where = draw.choice(every[kind])
        place, value = draw.choice(where), draw.choice(VALUES)
        before = put(document, place, value)
        raw = json.dumps(document).encode()
        put(document, place, before)
        try:
            decoded = get_decoder(kind).decode(raw)
        except DECODE_FAULTS:
            continue
        if isinstance(value, str) and not value.isprintable():
            accepted.add((kind.__name__, next(key for key in reversed(place) if isinstance(key, str)), place))
        numbers = [one for one in _leaves(msgspec.to_builtins(decoded)) if isinstance(one, int | float)]
        if not all(-(2**63) <= one < 2**63 if isinstance(one, int) else abs(one) <= 1e150 for one in numbers):
            unbounded.add((kind.__name__, place))
    wrong = {one for one in accepted if one[1] not in SHOWN and not FREE & set(one[2])}
    assert not wrong
    assert not unbounded


def _leaves(value):
    if isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _leaves(entry)
    else:
        yield value


JOBS = [["status"]] * 4 + [["status", "--json"], ["cancel", "--all"], ["retry", "--only", "node_fail,held"], ["submit"]]
RESTORED = (
    "runs",
    ".shardlab/submissions",
    ".shardlab/matrices",
)  # the folders of a workspace that a change or a command changes


def run(main, words):
    """(exit code, everything that the command printed). An exception of the command is an error of the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    return code, out.getvalue() + err.getvalue()


def outside(folder, workspace):
    """The files of a folder that are outside of the workspace and not written by the stand-in of Slurm."""
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if f"{path}/{name}" not in (str(workspace.path), f"{folder}/slurm")]
        yield from (f"{path}/{name}" for name in names)


def restore(workspace, kept):
    for name in RESTORED:
        shutil.rmtree(workspace.path / name, ignore_errors=True)
        if (kept / name).exists():
            shutil.copytree(kept / name, workspace.path / name)


def drawn_command(draw, workspace, in_slurm):
    """A drawn command, as (its main function, its words)."""
    where = ["--workspace", str(workspace.path)]
    if in_slurm or draw.random() < 0.3:
        words = draw.choice(JOBS if in_slurm else JOBS[:2])
        return cli.main, [*words, *(["--matrix", f"{workspace.path}/m.yaml"] if words == ["submit"] else []), *where]
    row = make_run_id(support.cell(), 1)
    words = draw.choice(
        [["fetch"], ["timeline", row], ["explain", row, "throughput_per_s"], ["compare", "quickstart", str(workspace.path)]] * 3
        + [["summarize"], ["archive"], ["archive", "--anonymous"], ["export", "--to", "json"]]
    )
    return collect.cli.main, [*words, *where]


@pytest.mark.parametrize("name", ["collected", "in Slurm"])
def test_a_hostile_value_stops_no_command_and_reaches_no_other_run(tmp_path, in_slurm, name):
    draw = random.Random(SEED)
    study, queue = in_slurm
    workspace = study.workspace if name == "in Slurm" else collected(tmp_path / "inside" / "w")
    folder, kept, waiting = workspace.path.parents[1], tmp_path / "kept", queue.state()
    for part in RESTORED:
        if (workspace.path / part).exists():
            shutil.copytree(workspace.path / part, kept / part)
    for number in range((10_000 if LONG else 150) * (1 if name == "in Slurm" else 2) // 3):  # Slurm's commands take longer
        restore(workspace, kept)
        (queue.folder / "queue.json").write_text(json.dumps(waiting))
        (queue.folder / "calls").unlink(missing_ok=True)
        before = set(outside(folder, workspace))
        path = draw.choice(files_of(workspace))
        records = records_of(path)
        document = draw.choice(records)
        place, value = draw.choice(list(places(document))), draw.choice(VALUES)
        put(document, place, copy.deepcopy(value))
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
        main, words = drawn_command(draw, workspace, name == "in Slurm")
        changed = path.relative_to(workspace.path)
        what = (number, changed, place, repr(value)[:40], words)
        try:
            code, said = run(main, words)
        except Exception as error:
            raise AssertionError(what) from error
        assert code in (0, 1, 2), what
        assert not re.search("Traceback|report this defect", said), (what, said)
        assert code != 2 or f"\n{said}".count("\nerror: ") == 1, (what, said)
        # Runs of two clusters cannot be in one workspace, so this value may stop `jobs submit`. A run that cannot be read may
        # contain names, so there is no archive of it. A command about the run itself, or about its cell, may be refused.
        may_refuse = place[0] == "cluster" or words[0] in ("archive", "retry") or changed.parts[1] in words
        assert code != 2 or changed.parts[0] != "runs" or may_refuse, (what, said)
        for file in (kept / "runs").rglob("*"):
            theirs = workspace.path / file.relative_to(kept)
            if file.is_file() and theirs != path:
                assert theirs.read_bytes().startswith(file.read_bytes()), (what, theirs)
        assert words[0] != "status" or all(one.name in said for one in (kept / "runs").iterdir()), (what, said)
        assert set(outside(folder, workspace)) == before, what
        cancelled = [word for call in queue.calls("scancel") for word in call]
        assert all(re.fullmatch(r"1_[0-2]", word) for word in cancelled), (what, cancelled)
        assert not any("PWNED" in script.read_text() for script in workspace.path.glob("runs/*/*.sbatch")), what
