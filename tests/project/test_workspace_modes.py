"""The modes of all files and folders that commands write: a workspace with its runs, reports, exports, archives and locks.

Golden files: golden/modes/022.txt and 077.txt, one for each umask, with a line for each kind of file. Numbers and digests in
names are replaced, and the frozen source has one line for each kind of file.
"""

import io
import os
import re
import stat
import tarfile
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest
import support_collect as support
from support_golden import same_as_golden

from collect.cli import main as collect
from collect.fetching import download, gather
from collect.loading import sample_cache
from jobs.cli import main as jobs
from jobs.scheduler import SubmitOptions
from jobs.schedulers import slurm
from jobs.ssh import node_lock, record_mirror
from provision import lock, software
from provision.datasets import archive, formats
from provision.nodes.login_node import LocalLoginNode
from provision.site.package_check import PackageCheck
from provision.site.wheels import WheelDownload
from shardlab import steps
from shardlab.cluster import node_folder
from shardlab.files import files, own_folder
from shardlab.remote import shared_connection
from shardlab.runs.rundir import RunDir
from shardlab.transfer import arrival
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

MATRIX = """\
schema: 1
name: quickstart
defaults: {workload: gpt2-tiny, strategy: ddp, launcher: fork, gpus: 2, global_batch_size: 8, steps: 2}
axes: {seed: [1, 2]}
"""


class Stopped(Exception):
    """Raised in place of Slurm."""


def make_runs(root):
    """Rendered runs, completed runs, their report, their exports, and an archive that is opened again."""
    folder = root / "workspace"
    folder.mkdir()
    (folder / "m.yaml").write_text(MATRIX)
    assert jobs(["render", "--matrix", str(folder / "m.yaml"), "--workspace", str(folder)]) == 0
    workspace = Workspace(root / "finished")
    cells = [support.cell(), support.cell("ddp", 2)]
    support.keep(workspace, cells, repeats=1)
    for cell in cells:
        support.completed(workspace, cell)
    for verb in (["summarize"], ["export", "--to", "csv"], ["archive"]):
        assert collect([*verb, "--workspace", str(workspace.path)]) == 0
    (archive_file,) = workspace.path.glob("*.zip")
    assert collect(["open", str(archive_file), "--out", str(root / "opened")]) == 0
    return workspace


def make_submission(root, monkeypatch):
    """The script of an array of jobs, up to the moment when it would be sent to Slurm."""
    workspace = Workspace(root / "workspace")
    runs = [RunDir(workspace.runs / name) for name in workspace.list_run_ids()]
    for run in runs:  # the runs were rendered for this machine, so they have no script for sbatch
        files.write_new(run.path / slurm.SCRIPT, b"#!/bin/sh\n#SBATCH --time=5\n", mode=0o755)

    def stop(*_):
        raise Stopped

    monkeypatch.setattr(slurm.submission, "send_submission", stop)
    with pytest.raises(Stopped):
        slurm._submit_job(workspace, runs, SubmitOptions(), [])


def make_locks(root, monkeypatch):
    """Locks, private folders, and the proofs of trusted workspaces."""
    monkeypatch.setenv("XDG_STATE_HOME", str(root / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    monkeypatch.setattr(node_lock, "LOCK_FOLDER", root / "locks")
    monkeypatch.setattr(shared_connection, "MAX_FOLDER_BYTES", 1000)
    (root / "locks").mkdir()
    workspace = Workspace(root / "trusted")
    workspace_trust.begin_workspace(workspace)
    workspace_trust.store_consent(workspace, lambda _: None)
    own_folder.make_own_folder(root, "own")
    shared_connection.make_socket_folder()
    os.close(node_folder._lock_filled_folder(root / "data", lambda folder: (folder / "item").write_text("x")))
    with node_lock.hold_lock("node", "gpu1", lambda _: None), lock.hold_locks([(root / "cluster.lock", "the cluster")], ["x"]):
        pass


def make_copies(root, workspace):
    """Files that arrive from a cluster, from a node or from an archive of a data set."""
    staging = download._make_staging_folder(workspace)
    os.close(arrival._open_file(str(staging / "run-1" / "steps" / "rank-00000.jsonl"), os.O_EXCL))
    record_mirror._append_at("gpu1", root / "mirrored.jsonl", b"{}\n", 0)
    files.write_atomic(root / "moved.part", b"", mode=0o600)
    files.move_into_place(root / "moved.part", root / "moved" / "file")
    with tarfile.open(root / "mnist.tar", "w") as tar:
        member = tarfile.TarInfo("train-images-idx3-ubyte")
        member.size, member.mode = 3, 0o400
        tar.addfile(member, io.BytesIO(b"abc"))
    archive.unpack_archive(root / "mnist.tar", formats.FORMATS["mnist"], root / "unpacked")


def make_records(root, monkeypatch):
    """Steps that a rank of a user's script reports, samples that are kept for the next command, and a staging folder."""
    for name in ("reported", "kept"):
        (root / name).mkdir()
    steps._Reporter(str(root / "reported")).write_step(1, 0.5, None, None)
    monkeypatch.setattr(sample_cache, "_find_cache_folder", lambda: root / "kept")
    state = sample_cache.LinesFileState(path_sha256="a" * 64, bytes=1, mtime_ns=1, inode=1)
    monkeypatch.setattr(gather, "_receive_files", lambda *_: None)  # only the folder into which files of a node arrive
    gather._copy_files(
        Workspace(root / "gathered"), SimpleNamespace(remote_workspace="gpu1", node="gpu1", copied=["file"]), None
    )
    sample_cache._store_cache_file(sample_cache.CacheHeader("b", state, 1, "c" * 64, 0, 0.0, [1]), [b"x"])


def make_site_files(root):
    """Files that `provision` sends to a login node: wheels, and the differences of packages from the tested ones."""
    node = LocalLoginNode(name="login", python="python3")
    (root / "site").mkdir()
    (root / "few-1.0-py3-none-any.whl").write_bytes(b"x")
    wheels = WheelDownload([], [], PurePosixPath(root / "site"), [], root)
    wheels._send_wheels(node, [root / "few-1.0-py3-none-any.whl"])
    constraints = software.read_constraints().decode().splitlines()
    versions = ["python==3.11.2", *(line for line in constraints if "==" in line and line[0] != "#")]
    check = PackageCheck("environment.use: x", ["printf", "%s\\n", *versions], PurePosixPath(root / "site"), 60, "")
    check.make(node)


def modes(root):
    """{pattern of a path: its modes} of everything below a folder."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if "__pycache__" in name:  # bytecode has the mode of the bytecode in the checkout
            continue
        top, source, rest = name.partition("/.shardlab/source/")
        if "/" in rest:
            name = f"{top}{source}{rest.partition('/')[0]}/*{path.suffix}"
        name = re.sub(r"[0-9a-f]{8,}|\d+", "N", name)
        found.setdefault(f"{name}/" if path.is_dir() else name, set()).add(f"{stat.S_IMODE(path.lstat().st_mode):04o}")
    return {name: " ".join(sorted(kinds)) for name, kinds in sorted(found.items())}


@pytest.mark.parametrize("umask", [0o022, 0o077], ids=["022", "077"])
def test_files_and_folders_have_their_golden_modes(umask, tmp_path, monkeypatch):
    before = os.umask(umask)
    try:
        workspace = make_runs(tmp_path)
        make_submission(tmp_path, monkeypatch)
        make_locks(tmp_path, monkeypatch)
        make_copies(tmp_path, workspace)
        make_records(tmp_path, monkeypatch)
        make_site_files(tmp_path)
    finally:
        os.umask(before)
    lines = [f"{name}: {mode}" for name, mode in modes(tmp_path).items()]
    same_as_golden(f"modes/{umask:03o}.txt", "\n".join(lines) + "\n")
