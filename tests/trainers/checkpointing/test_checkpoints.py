"""A resumed run computes what an uninterrupted run computes. A kill, a flipped bit or a signal loses no more steps than it
must."""

import contextlib
import shutil
import signal
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from support_e2e import HANG_S
from support_long import LONG, only_long

from shardlab.files import files
from shardlab.matrix.cell import CheckpointSettings, Instruments, Optimizer
from shardlab.runs import checkpoint, instrument_span, suspension

pytest_plugins = ["support_trainers"]
ADAM = Optimizer(name="adamw", lr=1e-3)  # Adam has the most optimizer state, and these tests look for lost state
SGD = Optimizer(name="sgd", lr=0.1, momentum=0.9)
EVERY_4 = Instruments(checkpoints=CheckpointSettings(every_steps=4))
FAMILIES = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp", "gpus": 2},
    "ddp-powersgd": {"strategy": "ddp-powersgd", "gpus": 2},
    # With fp16, the loss scale decreases in the first steps, so it is a state that a checkpoint could lose.
    "ddp in fp16": {"strategy": "ddp", "gpus": 2, "precision": "fp16"},
    "fsdp1-full-shard": {"strategy": "fsdp1-full-shard", "gpus": 2},
    "fsdp2": {"strategy": "fsdp2", "gpus": 2},
    "zero0 in bf16": {"strategy": "zero0", "gpus": 2, "precision": "bf16"},
    "zero1": {"strategy": "zero1", "gpus": 2},
    "zero1 in bf16": {"strategy": "zero1", "gpus": 2, "precision": "bf16"},
    "zero2": {"strategy": "zero2", "gpus": 2},
    "zero3": {"strategy": "zero3", "gpus": 2, "options": {"param_persistence_threshold": 0}},
    "zero3 in bf16, small parameters whole": {"strategy": "zero3", "gpus": 2, "precision": "bf16"},
    "tp": {"strategy": "tp", "gpus": 2, "tp": 2},
    "pp-1f1b": {"strategy": "pp-1f1b", "gpus": 2, "pp": 2, "accumulation": 2},
    "tp-fsdp2": {"strategy": "tp-fsdp2", "gpus": 4, "tp": 2},
    # With this period, the checkpoint is saved between two averages.
    "local-sgd": {"strategy": "local-sgd", "gpus": 2, "options": {"averaging_period": 3}},
    "ps-sync": {"strategy": "ps-sync", "gpus": 2, "servers": 2, "optimizer": SGD},
}
ODD_ROWS = {"pad_vocabulary": 257}  # rows of the vocabulary that two tensor-parallel ranks cannot divide without padding
GATHERED = ("zero3", "tp-fsdp2")
# These are left out of the short form, because another strategy in the list has the same engine.
ONLY_LONG = ("zero0 in bf16", "zero1", "zero2", "zero3 in bf16, small parameters whole")
MOST = [name for name in FAMILIES if LONG or name not in ONLY_LONG]


ROUNDING = 1e-5  # how much losses may differ because sums are computed in a different order


def losses(run_dir):
    """Returns the loss of each timed step of a run, as the mean over the ranks that train."""
    ranks = [[r.loss for r in run_dir.steps(rank).records if not r.warmup] for rank in range(run_dir.read_run().cell.gpus)]
    return [sum(row) / len(ranks) for row in zip(*ranks, strict=True)]


def steps(run_dir, rank=0):
    return [(r.warmup, r.step) for r in run_dir.steps(rank).records]


def told(run_dir, name):
    return [event.data for event in run_dir.read_events() if event.event == name]


def resuming(bench, *earlier, **keys):
    """Makes the folder of a new run that may resume from the checkpoints of the earlier runs. keys: the keys of the cell."""
    run_dir = bench.run_dir(**keys)
    run = msgspec.structs.replace(run_dir.read_run(), resume=[one.run_id for one in earlier])
    files.write_json(run_dir.run_json, run)
    return run_dir


def gone_on(bench, run_dir):
    code, errors = bench.finish(run_dir)
    assert code == 0, errors + "".join(log.read_text() for log in run_dir.log.glob("*"))
    return run_dir


def without(run_dir, step):
    shutil.rmtree(checkpoint.make_checkpoint_path(run_dir.path, step))


def stop_at(run_dir, step):
    """Removes the result of a finished run and its records after this step, as if the run had been killed then. The checkpoints
    of the run stay."""
    run_dir.result.unlink()
    for rank in range(run_dir.read_run().cell.gpus):
        kept = [r for r in run_dir.steps(rank).records if r.warmup or r.step <= step]
        files.write_atomic(run_dir.steps_file(rank), b"".join(msgspec.json.encode(r) + b"\n" for r in kept))


def flip(path):
    """Flips one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("family", MOST)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_run(bench, family):
    keys = {"optimizer": ADAM, "steps": 8, "instruments": EVERY_4, **FAMILIES[family]}
    undisturbed = bench.complete(**keys)
    without(undisturbed, 8)
    again = gone_on(bench, resuming(bench, undisturbed, **keys))
    assert told(again, "resumed") == [{"step": 4, "run": undisturbed.run_id}]
    assert losses(again) == losses(undisturbed)  # exactly: all sums are computed in the same order
    result = again.read_result()
    assert (result.resumed_from_step, result.steps) == (4, 8)
    assert undisturbed.read_result().resumed_from_step is None
    assert "load_s" not in undisturbed.read_result().instruments["checkpoints"]
    assert result.instruments["checkpoints"]["load_s"] > 0
    for rank in range(again.read_run().cell.gpus):
        assert steps(again, rank) == [(False, step) for step in range(1, 9)]
        assert again.steps(rank).records[:4] == undisturbed.steps(rank).records[:4]
    if family == "ps-sync":
        assert result.knobs["effective"]["pushes_by_worker"] == [8, 8]


@pytest.mark.parametrize("family", GATHERED)
def test_a_gathered_checkpoint_is_one_file_of_the_whole_model(bench, family):
    layout = Instruments(checkpoints=CheckpointSettings(every_steps=4, layout="whole", time_loading=True))
    keys = {"optimizer": ADAM, "steps": 8, "instruments": layout, **FAMILIES[family]}
    undisturbed = bench.complete(**keys)
    assert undisturbed.read_result().instruments["checkpoints"]["load_s"] > 0
    without(undisturbed, 8)
    manifest = checkpoint.read_manifest(checkpoint.make_checkpoint_path(undisturbed.path, 4))
    assert [file.name for file in manifest.files] == ["whole.bin", "index.json"]
    again = gone_on(bench, resuming(bench, undisturbed, **keys))
    assert losses(again) == losses(undisturbed)


def test_a_resumed_run_with_a_destroyed_optimizer_state_has_other_losses(bench):
    """Destroys the optimizer state in a checkpoint: the resumed run then has other losses. So a comparison of losses detects
    lost state."""
    keys = {"optimizer": ADAM, "steps": 8, "instruments": EVERY_4}
    undisturbed = bench.complete(**keys)
    without(undisturbed, 8)
    path = checkpoint.make_checkpoint_path(undisturbed.path, 4)
    index = msgspec.json.decode((path / "index.json").read_bytes())
    data = bytearray((path / "rank-00000.bin").read_bytes())
    for name, entry in index["tensors"].items():
        if name.startswith("optimizer/exp_avg/"):
            (box,) = entry["boxes"]
            size = 4
            for length in box["sizes"]:
                size *= length
            data[box["begin"] : box["begin"] + size] = bytes(size)
    (path / "rank-00000.bin").write_bytes(data)
    manifest = checkpoint.read_manifest(path)
    listed = [checkpoint.CheckpointFile(f.name, f.bytes, files.compute_file_sha256(path / f.name)) for f in manifest.files]
    files.write_json(path / checkpoint.MANIFEST_FILE, msgspec.structs.replace(manifest, files=listed).add_seal())
    again = gone_on(bench, resuming(bench, undisturbed, **keys))
    ours, theirs = losses(again), losses(undisturbed)
    assert ours[:5] == theirs[:5]
    assert max(abs(a - b) for a, b in zip(ours, theirs)) > 1e-4


def test_each_rank_records_when_it_saved(bench):
    keys = {"strategy": "ddp", "gpus": 2, "steps": 8, "instruments": EVERY_4}
    run_dir = bench.complete(**keys)
    spans = list(instrument_span.read_spans(run_dir.read_events()))
    acts = [("checkpoints", "after", 4), ("checkpoints", "after", 8)]
    for rank in (0, 1):
        own = [span for span in spans if span.rank == rank]
        assert [(span.act.name, span.act.when, span.act.step) for span in own] == acts
        timed = {record.step: record for record in run_dir.steps(rank).records if not record.warmup}
        assert timed[4].wall_s <= own[0].end_s - own[0].act.seconds + 0.001
        assert own[0].end_s <= timed[5].wall_s
    saved = run_dir.read_result().instruments["checkpoints"]
    took_s = [span.act.seconds for span in spans if span.rank == 0]
    assert saved["saves"] * saved["save_s"] - 1e-4 <= sum(took_s) <= saved["cost_s"] + 1e-4


def test_a_run_resumes_in_its_own_folder(bench):
    keys = {"strategy": "ddp", "gpus": 2, "optimizer": ADAM, "steps": 10, "warmup_steps": 2, "instruments": EVERY_4}
    undisturbed, run_dir = bench.complete(**keys), bench.complete(**keys)
    stop_at(run_dir, 9)
    gone_on(bench, run_dir)
    assert told(run_dir, "resumed") == [{"step": 8, "run": run_dir.run_id}]
    assert losses(run_dir) == losses(undisturbed)
    assert steps(run_dir, 1) == [(True, 1), (True, 2), *((False, step) for step in range(1, 11))]
    records = run_dir.steps(0).records
    # The new process warms up in the first steps after the resume, so these steps are not timed.
    assert [r.step for r in records if r.watched] == [9, 10]
    result = run_dir.read_result()
    assert (result.steps, result.step_time_ms.n, result.resumed_from_step) == (10, 8, 8)
    assert result.train_time_s * 1000 >= sum(r.step_ms for r in records if not r.warmup)


def test_a_resumed_run_gets_the_suspensions_of_the_first_run(bench):
    """A resumed run keeps the step records of the first run, so it also gets the events about the first run's suspensions."""
    keys = {"strategy": "ddp", "gpus": 2, "optimizer": ADAM, "steps": 8, "instruments": EVERY_4}
    first = bench.complete(**keys)
    without(first, 8)
    held = first.steps(0).records[2]
    first.write_event("attempt", suspension.SUSPENDED_EVENT, seconds=0.25, ended_s=held.wall_s)
    again = gone_on(bench, resuming(bench, first, **keys))
    (pause,) = suspension.read_suspensions(again.read_events())
    assert pause == pytest.approx((held.wall_s - 0.25, held.wall_s), rel=0, abs=0.001)
    aside = suspension.mark_suspended(again.steps(0).records, [pause])
    assert held.step in [record.step for record in aside if record.watched]


def test_only_the_newest_checkpoints_are_kept_and_each_is_complete(bench):
    asked = Instruments(checkpoints=CheckpointSettings(every_steps=2, keep=2))
    run_dir = bench.complete(steps=8, instruments=asked)
    assert [path.name for path in checkpoint.list_checkpoints(run_dir.path)] == ["step-00000008", "step-00000006"]
    assert sorted(path.name for path in (run_dir.path / checkpoint.CHECKPOINTS_FOLDER).iterdir()) == [
        "step-00000006",
        "step-00000008",
    ]
    found = run_dir.read_result().instruments["checkpoints"]
    newest = checkpoint.list_checkpoints(run_dir.path)[0]
    assert found["saves"] == 4
    assert found["bytes"] == sum(p.stat().st_size for p in newest.iterdir() if p.name != checkpoint.MANIFEST_FILE)
    assert not [path for path in newest.iterdir() if path.suffix not in (".bin", ".json")]


@pytest.mark.parametrize("name", ["rank-00001.bin", "index.json", checkpoint.MANIFEST_FILE])
def test_a_damaged_checkpoint_is_skipped_and_reported(bench, name):
    keys = {"strategy": "fsdp2", "gpus": 2, "optimizer": ADAM, "steps": 8, "instruments": EVERY_4}
    undisturbed = bench.complete(**keys)
    newest = checkpoint.make_checkpoint_path(undisturbed.path, 8)
    flip(newest / name)
    again = gone_on(bench, resuming(bench, undisturbed, **keys))
    why = [data["why"] for data in told(again, "checkpoint_passed_over")]
    assert why
    assert all(str(newest) in one for one in why)
    assert told(again, "resumed") == [{"step": 4, "run": undisturbed.run_id}]
    assert losses(again) == losses(undisturbed)


def test_a_run_without_an_undamaged_checkpoint_restarts_or_is_refused(bench):
    keys = {"optimizer": ADAM, "steps": 4, "instruments": EVERY_4}
    undisturbed = bench.complete(**keys)
    (checkpoint.make_checkpoint_path(undisturbed.path, 4) / "rank-00000.bin").write_bytes(b"")
    again = gone_on(bench, resuming(bench, undisturbed, **keys))
    assert "has 0 bytes, the manifest says" in told(again, "checkpoint_passed_over")[0]["why"]
    assert again.read_result().resumed_from_step is None
    assert losses(again) == losses(undisturbed)
    stop_at(undisturbed, 4)
    assert bench.finish(undisturbed)[0] == 1
    assert "has records, but no usable checkpoint" in told(undisturbed, "failed")[0]["why"]


def test_a_run_does_not_resume_from_a_checkpoint_of_another_cell(bench):
    """A run does not resume from a checkpoint of a cell with another seed."""
    undisturbed = bench.complete(steps=4, instruments=EVERY_4)
    other = gone_on(bench, resuming(bench, undisturbed, steps=4, instruments=EVERY_4, seed=43))
    assert "its cell differs in seed" in told(other, "checkpoint_passed_over")[0]["why"]
    assert other.read_result().resumed_from_step is None


# (layout of the checkpoint, cell that wrote the checkpoint, cell that resumes from it). With the layout "sharded", both cells
# must have the same strategy.
ELSEWHERE = [
    ("sharded", FAMILIES["ddp"], {"strategy": "ddp", "gpus": 4}),
    ("sharded", FAMILIES["fsdp2"], {"strategy": "fsdp2", "gpus": 4}),
    ("sharded", FAMILIES["zero3"], {**FAMILIES["zero3"], "gpus": 1}),
    ("sharded", FAMILIES["ps-sync"], {"strategy": "ps-sync", "gpus": 1, "servers": 1, "optimizer": SGD}),
    ("whole", FAMILIES["tp"], FAMILIES["single"]),
    ("whole", {**FAMILIES["tp-fsdp2"], "options": ODD_ROWS}, {**FAMILIES["single"], "options": ODD_ROWS}),
    (
        "sharded",
        {**FAMILIES["tp-fsdp2"], "options": ODD_ROWS},
        {"strategy": "tp-fsdp2", "gpus": 2, "tp": 2, "options": ODD_ROWS},
    ),
    ("whole", FAMILIES["single"], FAMILIES["tp-fsdp2"]),
    ("whole", FAMILIES["fsdp1-full-shard"], FAMILIES["zero3"]),
    ("whole", FAMILIES["ps-sync"], {**FAMILIES["fsdp2"], "optimizer": SGD}),
    *only_long(
        ("sharded", FAMILIES["fsdp1-full-shard"], {"strategy": "fsdp1-full-shard", "gpus": 4}),
        ("sharded", FAMILIES["zero1"], {"strategy": "zero1", "gpus": 4}),
        ("sharded", FAMILIES["pp-1f1b"], {"strategy": "pp-1f1b", "gpus": 4, "pp": 4, "accumulation": 4}),
    ),
]


@pytest.mark.parametrize(("layout", "one", "other"), ELSEWHERE, ids=lambda v: v if isinstance(v, str) else v["strategy"])
def test_a_checkpoint_can_be_resumed_on_another_number_of_ranks(bench, layout, one, other):
    common = {"steps": 8, "instruments": Instruments(checkpoints=CheckpointSettings(every_steps=4, layout=layout))}
    undisturbed = bench.complete(**{"optimizer": ADAM, **common, **one})
    without(undisturbed, 8)
    again = gone_on(bench, resuming(bench, undisturbed, **{"optimizer": ADAM, **common, **other}))
    assert told(again, "resumed"), told(again, "checkpoint_passed_over")
    assert steps(again) == [(False, step) for step in (5, 6, 7, 8)]
    assert max(abs(a - b) for a, b in zip(losses(again), losses(undisturbed)[4:], strict=True)) < ROUNDING
    result = again.read_result()
    assert (result.resumed_from_step, result.steps, result.step_time_ms.n) == (4, 8, 4)
    assert again.count_timed_steps(again.read_run().cell.gpus) == 8


def test_a_kill_during_a_save_leaves_the_last_complete_checkpoint(bench):
    asked = Instruments(checkpoints=CheckpointSettings(every_steps=2, keep=1))
    forever = 1_000_000
    keys = {"strategy": "ddp", "gpus": 2, "optimizer": ADAM, "steps": forever, "instruments": asked, "options": {"n_embd": 256}}
    run_dir = bench.run_dir(**keys)
    client = bench.start(run_dir)
    folder = run_dir.path / checkpoint.CHECKPOINTS_FOLDER
    wait_for(lambda: checkpoint.list_checkpoints(run_dir.path))
    writer = victim(run_dir, 1)

    def is_stopped_in_a_save():
        """Suspends rank 1 and returns True if rank 1 has begun to write its file of a checkpoint; otherwise lets rank 1
        continue. No rank can commit the checkpoint before this file is complete."""
        writer.suspend()
        growing = list(folder.glob(f".step-*.tmp/{checkpoint_file(1)}"))
        if growing and is_open(writer, growing[0]):
            return True
        writer.resume()
        return False

    wait_for(is_stopped_in_a_save)
    writer.kill()
    client.communicate(timeout=HANG_S)
    assert client.returncode == 128 + signal.SIGKILL
    (half,) = folder.glob(".step-*.tmp")
    assert not (half / checkpoint.MANIFEST_FILE).exists()
    (good,) = checkpoint.list_checkpoints(run_dir.path)
    assert checkpoint.find_damage(good, checkpoint.read_manifest(good).files) is None
    client = bench.start(run_dir)
    wait_for(lambda: checkpoint.list_checkpoints(run_dir.path)[:1] != [good] and told(run_dir, "resumed"))
    client.kill()
    client.communicate(timeout=HANG_S)
    assert told(run_dir, "resumed")[0]["step"] == checkpoint.parse_checkpoint_step(good)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_makes_all_ranks_save_and_end(bench, number):
    asked = Instruments(checkpoints=CheckpointSettings(every_steps=1_000_000))
    run_dir = bench.run_dir(strategy="fsdp2", gpus=2, steps=1_000_000, instruments=asked)
    client = bench.start(run_dir)
    wait_for(lambda: len(run_dir.steps(1).records) > 3)
    victim(run_dir, 1).send_signal(number)
    client.communicate(timeout=HANG_S)
    assert client.returncode != 0
    (path,) = checkpoint.list_checkpoints(run_dir.path)
    step = checkpoint.parse_checkpoint_step(path)
    assert f"saved after step {step}" in told(run_dir, "timeout")[0]["why"]
    assert steps(run_dir, 0)[-1] == steps(run_dir, 1)[-1] == (False, step)
    assert not told(run_dir, "failed")
    assert not run_dir.result.exists()
    run_dir.write_event("attempt", "exited", code=client.returncode)
    assert run_dir.judge().state == "timeout"


def checkpoint_file(rank):
    return f"rank-{rank:05d}.bin"


def is_open(process, path):
    """Returns whether the process has this file open. The process must be suspended, so that the answer stays true."""
    return path in [descriptor.readlink() for descriptor in Path(f"/proc/{process.pid}/fd").iterdir()]


def victim(run_dir, rank):
    """Returns the process of a rank, which is the one whose output is the log of the rank."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process.pid}/fd/1").readlink() == run_dir.rank_log(rank):
                return process
    raise AssertionError(f"no process writes the log of rank {rank}")


def wait_for(condition, limit_s=HANG_S):
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, "did not come about"
    return found
