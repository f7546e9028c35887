"""Files are written, synced and renamed in an order in which a kill or a power loss at any moment loses nothing that was
already saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardlab.files import files
from shardlab.runs import checkpoint

KEPT_STEP, NEW_STEP = 4, 8
# A program that saves a checkpoint of step 4 in a new folder, and then a checkpoint of step 8 in a forked child. It repeats
# this: child N is killed before the Nth change that its commit makes to the file system. After each child, the program prints
# which checkpoints are listed as complete and which of them are damaged.
KILLED_AT_EACH_CALL = f"""
import json, os, shutil, signal, sys
from pathlib import Path
from shardlab.runs import checkpoint

def save(run, step, before_commit=lambda: None):
    growing = checkpoint.begin_checkpoint(run, step)
    written = checkpoint.GrowingFile(growing / "rank-00000.bin")
    written.write(b"weights" * 1000)
    manifest = checkpoint.CheckpointManifest(
        schema=1, step=step, world=1, layout="sharded", strategy="single", tp=1, cell_hash="c", train_time_s=1.0, numbers={{}},
        files=[written.close()],
    )
    before_commit()
    checkpoint.commit_checkpoint(run, manifest, kept_count=2)

def killed_at(number):
    made = iter(range(number))
    def counting(real):
        def call(*arguments, **options):
            if next(made, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)
        return call
    for name in ("open", "write", "fsync", "rename", "rmdir", "unlink"):
        setattr(os, name, counting(getattr(os, name)))

for number in range(100):
    run = Path(sys.argv[1]) / str(number)
    save(run, {KEPT_STEP})
    child = os.fork()
    if child == 0:
        save(run, {NEW_STEP}, lambda: killed_at(number))
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    whole = checkpoint.list_checkpoints(run)
    read = [checkpoint.read_manifest(path) for path in whole]
    wrong = [found if isinstance(found, str) else checkpoint.find_damage(path, found.files) for path, found in zip(whole, read)]
    print(json.dumps([ended, [checkpoint.parse_checkpoint_step(path) for path in whole], wrong]))
    if ended == 0:
        break
"""


def test_a_checkpoint_whose_commit_is_killed_at_any_call_is_whole_or_not_listed(tmp_path):
    command = [sys.executable, "-c", KILLED_AT_EACH_CALL, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert [ended for ended, _, _ in ends] == [-9] * (len(ends) - 1) + [0]
    # There are at least five changes: the manifest is opened, written, synced and renamed, and the folder is renamed.
    assert len(ends) > 5
    listed = [steps for _, steps, _ in ends]
    first_with_both = listed.index([NEW_STEP, KEPT_STEP])
    assert listed == [[KEPT_STEP]] * first_with_both + [[NEW_STEP, KEPT_STEP]] * (len(ends) - first_with_both)
    assert [wrong for _, _, wrong in ends if any(wrong)] == []


@pytest.fixture
def calls(monkeypatch):
    """Yields the list of the calls of fsync and rename, in their order, with the names of their files."""
    made = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        made.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        real_fsync(descriptor)

    def rename(old, new):
        made.append(("rename", Path(old).name, Path(new).name))
        real_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    return made


def write_in_pieces(path, content):
    with files.open_atomic(path) as handle:
        handle.write(content)


@pytest.mark.parametrize("write", [files.write_atomic, write_in_pieces])
def test_a_file_is_synced_before_its_rename_and_its_folder_after_it(tmp_path, calls, write):
    """After a power loss during the write, the file has the old content or the new content and is never empty. After the call
    has returned, it has the new content."""
    write(tmp_path / "a.json", b"{}")
    (_, temporary), *_ = calls
    assert temporary not in ("a.json", tmp_path.name)
    assert calls == [("sync", temporary), ("rename", temporary, "a.json"), ("sync", tmp_path.name)]


def test_a_checkpoint_is_synced_before_its_rename_and_its_folder_afterwards(tmp_path, calls):
    growing = checkpoint.begin_checkpoint(tmp_path, NEW_STEP)
    weights = checkpoint.GrowingFile(growing / "rank-00000.bin")
    weights.write(b"weights")
    written = weights.close()
    manifest = checkpoint.CheckpointManifest(
        schema=1, step=NEW_STEP, world=1, layout="sharded", strategy="single", tp=1, cell_hash="c", train_time_s=1.0,
        numbers={}, files=[written],
    )  # fmt: skip
    checkpoint.commit_checkpoint(tmp_path, manifest, kept_count=1)
    (_, temporary) = calls[1]
    growing_name, final_name = growing.name, checkpoint.make_checkpoint_path(tmp_path, NEW_STEP).name
    assert calls == [
        ("sync", "rank-00000.bin"),
        ("sync", temporary),
        ("rename", temporary, checkpoint.MANIFEST_FILE),
        ("sync", growing_name),
        ("rename", growing_name, final_name),
        ("sync", checkpoint.CHECKPOINTS_FOLDER),
    ]
