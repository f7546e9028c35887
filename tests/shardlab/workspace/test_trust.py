"""Who may act: commands start, send, cancel, log in and execute code only in a workspace that is this user's own, or to whose
files the user consented (--trust)."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from unittest.mock import Mock

import pytest
from support_e2e import HANG_S
from support_queue import Queue, Study

from collect import cli as collect_cli
from jobs import cli as jobs_cli
from jobs.run_queue import RunQueue
from jobs.schedulers import local
from provision import cli as provision_cli
from shardlab.errors import WorkspaceError
from shardlab.files import files
from shardlab.hardware import host
from shardlab.remote import remote_workspace
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

MAIN = {"jobs": jobs_cli.main, "collect": collect_cli.main, "provision": provision_cli.main}
HOSTILE = """\
"A model whose code writes a file beside the workspace."
from pathlib import Path
import torch
from torch import nn
Path({marker!r}).write_text("executed")
ITEMS = 64
def model(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))
def batch(items):
    return items[:, None].expand(-1, 4).float() / 64, items % 3
"""
MATRIX = """\
schema: 1
name: mine
title: mine
defaults: {workload: evil, strategy: single, launcher: fork, global_batch_size: 4, steps: 2}
axes: {seed: [1]}
"""
PLAIN = MATRIX.replace("evil", "gpt2-tiny")


def call(workspace, words):
    """Runs a command, given as a text, in a workspace and returns its exit code."""
    program, *others = words.split()
    return MAIN[program]([*others, "--workspace", str(workspace.path)])


def unpacked(tar, folder):
    subprocess.run(["tar", "--extract", f"--file={tar}", f"--directory={folder}"], check=True)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Returns (a tar file of a workspace, a path). The workspace contains a hostile workload and a failed run of it. The
    hostile code writes a file at the path when it is executed."""
    folder = tmp_path_factory.mktemp("theirs")
    marker = folder / "marker"
    theirs = Workspace(folder / "w")
    (theirs.path / "workloads").mkdir(parents=True)
    (theirs.path / "workloads" / "evil.py").write_text(HOSTILE.format(marker=str(marker)))
    (theirs.path / "mine.yaml").write_text(MATRIX)
    assert call(theirs, f"jobs render --matrix {theirs.path}/mine.yaml --trust") == 0
    assert marker.exists()
    (run,) = theirs.list_run_dirs()
    for event, data in (("submitted", {"scheduler": "local"}), ("started", {}), ("exited", {"reason": "failed", "code": 1})):
        run.write_event("controller", event, **data)
    with tarfile.open(folder / "w.tar", "w") as tar:
        tar.add(
            theirs.path,
            "w",
            filter=lambda member: None if "/.shardlab/source" in member.name and "__pycache__" in member.name else member,
        )
    return folder / "w.tar", marker


@pytest.fixture
def opened(archive, tmp_path):
    """Returns (the workspace that was unpacked from the tar file, the path of the file that exists only if the hostile code was
    executed)."""
    tar, marker = archive
    marker.unlink(missing_ok=True)
    unpacked(tar, tmp_path)
    return Workspace(tmp_path / "w"), marker


@pytest.fixture
def ours(tmp_path):
    """A workspace that began on this account."""
    workspace = Workspace(tmp_path / "ours")
    with workspace.hold_runs_lock():
        assert workspace_trust.is_own(workspace)
    return workspace


def copied(workspace, folder):
    """A copy of a workspace, which is nobody's own."""
    shutil.copytree(workspace.path, folder)
    return Workspace(folder)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("jobs workloads", 1),
        ("jobs plan --matrix {path}/mine.yaml", 2),
        ("jobs render --matrix {path}/mine.yaml", 2),
        ("jobs submit --matrix {path}/mine.yaml", 2),
        ("jobs submit --matrix quickstart", 2),
        ("jobs retry", 2),
        ("jobs cancel --all", 2),
        ("jobs status", 0),
        ("collect fetch", 0),
        ("collect summarize", 0),
    ],
)
def test_no_command_acts_in_a_workspace_that_came_from_elsewhere(opened, capsys, words, code):
    workspace, marker = opened
    before = {path: path.read_bytes() for path in workspace.runs.rglob("events.*")}
    assert call(workspace, words.format(path=workspace.path)) == code
    assert not marker.exists()
    said = capsys.readouterr()
    if code:
        assert "--trust" in said.err
        assert "workloads/evil.py" in said.err
    assert not workspace_trust.is_allowed(workspace)
    assert len(workspace.list_run_dirs()) == 1
    assert {path: path.read_bytes() for path in workspace.runs.rglob("events.*")} == before


def test_trust_prints_the_files_and_applies_only_to_these_files(opened, capsys):
    workspace, marker = opened
    (workspace.path / "templates").mkdir()
    (workspace.path / "templates" / "note.j2").write_text("")
    assert call(workspace, "jobs workloads --trust") == 0
    assert marker.exists()
    said = capsys.readouterr().err
    for name in ("workloads/evil.py", "templates/note.j2"):
        digest = files.compute_file_sha256(workspace.path / name)
        assert f"  {digest[:16]}  {name}\n" in said
    marker.unlink()
    assert call(workspace, "jobs render --matrix quickstart") == 0  # the user is not asked again
    # Files that come later are asked about again, and the message names only them.
    for name, content in {
        "metrics/late.py": "",
        "workloads/evil.py": HOSTILE.format(marker=str(marker)) + "# changed",
        "templates/launch/local.sh.j2": "id",
        "cluster.yaml": "schema: 1\nname: late\nprovider: local\n",
        ".shardlab/inventory.json": "{}",
        ".shardlab/away.json": "{}",
        ".shardlab/submissions/t.1.json": "{}",
    }.items():
        file = workspace.path / name
        before = file.read_bytes() if file.exists() else None
        files.make_folder(file.parent)
        file.write_text(content)
        assert call(workspace, "jobs render --matrix quickstart") == 2
        assert f"Not allowed yet: {name}. If" in capsys.readouterr().err
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)
    assert call(workspace, "jobs render --matrix quickstart") == 0


def test_answers_about_code_from_another_person_are_not_used(opened, capsys):
    workspace, marker = opened
    (answers,) = {path.parent for path in workspace.shardlab_folder.glob("own*/*.json")}
    (answer,) = answers.glob("*.json")
    answer.write_text(answer.read_text().replace('"parameters": 67', '"parameters": 1'))
    answers.rename(workspace.shardlab_folder / "own")
    assert call(workspace, "jobs workloads --trust") == 0
    assert marker.exists()
    assert "67" in capsys.readouterr().out


def test_copies_of_the_source_that_somebody_else_made_are_not_used(opened):
    workspace, _ = opened
    (theirs,) = workspace.shardlab_folder.glob("source*/*")
    for name in ("sitecustomize.py", "torch.pyc", "shardlab/__pycache__/planted.pyc"):
        (theirs / name).parent.mkdir(exist_ok=True)
        (theirs / name).touch()
    theirs.parent.rename(workspace.shardlab_folder / "source")
    (workspace.path / "other.yaml").write_text(PLAIN)
    shutil.rmtree(workspace.list_run_dirs()[0].path)
    assert call(workspace, f"jobs render --matrix {workspace.path}/other.yaml --trust") == 0
    used = Path(workspace.list_run_dirs()[0].read_run().source)
    assert (used / "shardlab" / "matrix" / "cell.py").exists()
    assert not [path for path in used.rglob("*") if path.name in ("sitecustomize.py", "torch.pyc", "planted.pyc")]


def test_a_file_beside_the_source_is_not_imported_by_runs(ours):
    (ours.path / "mine.yaml").write_text(PLAIN)
    assert call(ours, f"jobs render --matrix {ours.path}/mine.yaml") == 0
    (copy,) = (ours.shardlab_folder / "source").iterdir()
    (copy / "sitecustomize.py").touch()
    shutil.rmtree(ours.list_run_dirs()[0].path)
    assert call(ours, f"jobs render --matrix {ours.path}/mine.yaml") == 0
    assert not (copy / "sitecustomize.py").exists()


def test_bytecode_beside_code_is_removed_before_the_code_is_executed(opened):
    workspace, _ = opened
    planted = workspace.path / "workloads" / "__pycache__" / "_helper.pyc"
    for words in ("jobs workloads --trust", "jobs workloads"):
        planted.parent.mkdir(exist_ok=True)
        planted.touch()
        call(workspace, words)
        assert not planted.exists()


def test_a_script_that_waits_is_started_only_after_trust(opened, capsys):
    workspace, marker = opened
    (run,) = workspace.list_run_dirs()
    for file in run.path.glob("events.*"):
        file.unlink()
    run.write_event("controller", "submitted", scheduler="local")
    script = run.path / "job.sh"
    script.write_text(f"touch {marker}\n")
    assert call(workspace, "jobs submit --matrix quickstart") == 2
    assert f"runs/{run.run_id}/job.sh" in capsys.readouterr().err
    # Consent that was given for another command does not hold for the script, which no message named.
    assert call(workspace, "jobs workloads --trust") == 0
    marker.unlink()
    assert call(workspace, "jobs submit --matrix quickstart") == 2
    queue = RunQueue("local", workspace)
    local.SCHEDULER.restart_lost_runner(workspace)
    assert queue.run_until_empty(lambda: pytest.fail("nothing may start")) == 0
    assert not marker.exists()
    workspace_trust.store_consent(workspace, print, jobs_cli.list_waiting_files(workspace))
    assert [folder.run_id for folder in queue.list_startable_runs()] == [run.run_id]
    script.write_text(f"touch {marker}; id\n")
    assert list(queue.list_startable_runs()) == []


def test_trust_prints_the_code_in_the_folders_of_runs_before_a_retry_executes_it(opened, capsys):
    workspace, _ = opened
    (run,) = workspace.list_run_dirs()
    run.claim.mkdir()  # the run was started, so it does not wait
    shutil.rmtree(workspace.path / "workloads")
    call(workspace, "jobs retry --only oom --trust")
    assert (
        f"  {files.compute_file_sha256(run.path / 'workloads' / 'evil.py')[:16]}  runs/{run.run_id}/workloads/evil.py\n"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["workloads", "templates", ".shardlab/submissions"])
def test_a_link_to_a_folder_without_end_is_not_searched(tmp_path, capsys, monkeypatch, name):
    workspace, searched = Workspace(tmp_path), []
    files.make_folder((tmp_path / name).parent)
    (tmp_path / name).symlink_to("/")
    walk = os.walk
    monkeypatch.setattr(
        os, "walk", lambda top: searched.append(Path(top)) or (walk(top) if Path(top) != tmp_path / name else ())
    )
    assert call(workspace, "jobs submit --matrix quickstart --dry-run") == 2
    assert f"Not allowed yet: {name}. If" in capsys.readouterr().err
    assert call(workspace, "jobs submit --matrix quickstart --dry-run --trust") == 2
    assert "cannot be allowed, because it is no regular file" in capsys.readouterr().err
    assert tmp_path / name not in searched


def test_a_run_that_was_copied_into_an_own_workspace_is_not_executed(opened, ours, capsys):
    theirs, marker = opened
    shutil.copytree(theirs.runs, ours.runs)
    assert call(ours, "jobs retry") == 2
    assert "was not submitted from this workspace, so it is not executed" in capsys.readouterr().err
    assert not marker.exists()


def test_an_own_workspace_may_be_moved_and_edited_and_its_copies_are_not_own(ours, tmp_path):
    for name in ("workloads/a.py", "templates/a.j2", "cluster.yaml", ".shardlab/inventory.json"):
        files.make_folder((ours.path / name).parent)
        (ours.path / name).touch()
    assert workspace_trust.is_own(ours)
    shutil.move(ours.path, tmp_path / "moved")
    moved = Workspace(tmp_path / "moved")
    assert workspace_trust.is_own(moved)
    assert not workspace_trust.is_allowed(copied(moved, tmp_path / "copied"))


def test_a_mark_that_is_unpacked_again_does_not_count_even_with_the_same_inodes(ours, tmp_path):
    mark = workspace_trust.make_mark_path(ours)
    content = mark.read_bytes()
    status = mark.stat()
    (proof,) = (path for path in Path(os.environ["XDG_STATE_HOME"]).rglob("*.json") if path.stem == content.decode().strip())
    # A file system may give the new mark the inode number of the old one; here the same file is written again.
    mark.write_bytes(content)
    os.utime(mark, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert mark.stat().st_ino == status.st_ino
    assert not workspace_trust.is_allowed(ours)
    # Nor does the proof count for another user's home folder, or if it names another mark.
    document = json.loads(proof.read_text())
    proof.write_text(json.dumps(document | {"ctime_ns": mark.stat().st_ctime_ns}))
    assert workspace_trust.is_own(ours)
    proof.unlink()
    assert not workspace_trust.is_allowed(ours)


def test_the_mark_and_the_proof_are_readable_only_by_their_user(ours):
    mark = workspace_trust.make_mark_path(ours)
    assert mark.stat().st_mode & 0o777 == 0o600
    (folder,) = {path.parent for path in Path(os.environ["XDG_STATE_HOME"]).rglob(f"{mark.read_text().strip()}.json")}
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "there",
    [
        "workloads/a.py", "strategies/a.py", "metrics/a.py", "templates/launch/local.sh.j2", "runs/a-r1/run.json",
        ".shardlab/x", ".shardlab/away.json", ".shardlab/inventory.json",
    ],
)  # fmt: skip
def test_a_workspace_in_which_something_is_stored_does_not_begin_here(tmp_path, there):
    files.make_folder((tmp_path / there).parent)
    (tmp_path / there).touch()
    with Workspace(tmp_path).hold_runs_lock():
        assert not workspace_trust.is_allowed(Workspace(tmp_path))


def test_an_existing_cluster_file_is_shown_before_it_is_used(tmp_path, capsys):
    workspace = Workspace(tmp_path)
    text = "schema: 1\nname: site\nprovider: slurm\nslurm: {setup: ['id > pwned']}\nlogin: {host: login.example}\n"
    text += "storage: {shared: /project/x}\n"
    (tmp_path / "cluster.yaml").write_text(text)
    (tmp_path / "mine.yaml").write_text(PLAIN)
    for _ in range(2):  # the second time, the workspace has begun
        assert call(workspace, f"jobs submit --matrix {tmp_path}/mine.yaml") == 2
        said = capsys.readouterr().err
        assert "runs `id > pwned` in every job" in said
        assert "logs in to login.example" in said
        workspace_trust.begin_workspace(workspace)
    # What the user writes afterwards is the user's own.
    (tmp_path / "cluster.yaml").write_text(
        "schema: 1\nname: site\nprovider: slurm\nslurm: {setup: ['source mine']}\nstorage: {shared: /project/x}\n"
    )
    assert workspace_trust.list_unshown_powers(workspace) == []
    (tmp_path / "cluster.yaml").write_text(text)
    assert len(workspace_trust.list_unshown_powers(workspace)) == 2
    call(workspace, "provision plan")
    assert "the cluster file logs in to login.example" in capsys.readouterr().err
    assert workspace_trust.list_unshown_powers(workspace) == []


def test_another_cluster_file_of_a_folder_is_shown_before_it_is_used(tmp_path, capsys):
    workspace, file = Workspace(tmp_path), tmp_path / "site.yaml"
    file.write_text(
        "schema: 1\nname: far\nprovider: slurm\nslurm: {}\nlogin: {host: 127.0.0.1, port: 9}\nstorage: {shared: "
        "/project/x}\nenvironment: {wheelhouse: /project/wheels}\nenvironments: {other: {use: /project/env}, more: "
        "{packages: [einops==0.8.1]}}\n"
    )
    shown = "the cluster file logs in to 127.0.0.1\nthe cluster file installs packages from /project/wheels\n"
    shown += "the cluster file runs the interpreter of /project/env\nthe cluster file installs the package einops==0.8.1\n"
    call(workspace, f"provision {file} plan")
    assert shown in capsys.readouterr().err
    call(workspace, f"provision {file} plan")
    assert shown not in capsys.readouterr().err
    shutil.rmtree(workspace.shardlab_folder)
    workspace.runs.mkdir()  # the workspace is of somebody else now
    assert call(workspace, f"provision {file} plan") == 2
    call(workspace, f"provision {file} plan --trust")
    assert re.search(r"[0-9a-f]{16}  site\.yaml", capsys.readouterr().err)
    file.write_text(file.read_text().replace("port: 9", "port: 8"))
    assert call(workspace, f"provision {file} plan") == 2
    assert "Not allowed yet: site.yaml." in capsys.readouterr().err


def test_status_shows_the_fetched_runs_if_it_may_not_log_in(ours, tmp_path, capsys, monkeypatch):
    witness = tmp_path / "login"
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f"#!/bin/sh\ntouch {witness}\nexit 255\n")
    (tmp_path / "bin" / "ssh").chmod(0o755)
    away = remote_workspace.RemoteWorkspace(
        schema=1, cluster="c", host="stranger.example", port=None, user=None, identity=None, known_hosts="k",
        host_keys="strict", python="/evil", workspace="/w", mark=f"here:{ours.real_path}\n", shared=False,
    )  # fmt: skip
    remote_workspace.write_remote_workspace(ours, away)
    theirs = copied(ours, tmp_path / "theirs")
    assert call(theirs, "jobs status") == 0
    assert "would log in to stranger.example" in capsys.readouterr().err
    for words in ("jobs logs x", "collect fetch", "jobs cancel --all"):
        assert call(theirs, words) == 2
        assert ("is a copy of" if "cancel" in words else "--trust") in capsys.readouterr().err
    assert not witness.exists()
    assert call(ours, "collect fetch") != 0
    assert witness.exists()


def test_git_never_reads_the_configuration_of_a_workspace(ours, tmp_path):
    witness = tmp_path / "witness"
    (ours.path / "mine.yaml").write_text(PLAIN)
    assert call(ours, f"jobs render --matrix {ours.path}/mine.yaml") == 0
    (copy,) = (ours.shardlab_folder / "source").iterdir()
    subprocess.run(["git", "init", "--quiet", ours.path], check=True)
    subprocess.run(["git", "-C", ours.path, "add", "-f", copy / "shardlab" / "hardware" / "host.py"], check=True)
    subprocess.run(["git", "-C", ours.path, "config", "core.fsmonitor", f"touch {witness}; false"], check=True)
    subprocess.run(["git", "-C", ours.path, "status"], check=True, stdout=subprocess.DEVNULL)
    assert witness.exists()  # the configuration does execute the command
    witness.unlink()
    code = "from shardlab.hardware import host; print(host.read_git_commit())"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=True)
    assert (done.stdout, witness.exists()) == ("None\n", False)
    assert host.read_git_commit() is not None or not (Path(host.__file__).parents[1] / ".git").exists()


# The ids of another user and of a group with other members.
NOBODY, GROUP = 65534, 54321
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")


@AS_ROOT
def test_a_workspace_that_others_may_write_is_never_own(ours):
    for path, change in {
        ours.path: lambda path: path.chmod(0o777),
        ours.shardlab_folder: lambda path: (os.chown(path, -1, GROUP), path.chmod(0o775)),
        ours.runs: lambda path: (path.mkdir(), os.chown(path, NOBODY, -1)),
    }.items():
        change(path)
        assert not workspace_trust.is_allowed(ours), path
        os.chown(path, 0, 0)
        path.chmod(0o755)
        assert workspace_trust.is_own(ours)


@AS_ROOT
@pytest.mark.parametrize("name", ["metrics/evil.py", ".shardlab/away.json", "templates/launch/local.sh.j2", "cluster.yaml"])
def test_a_file_of_another_user_needs_consent(ours, name):
    file = ours.path / name
    files.make_folder(file.parent)
    file.touch()
    assert workspace_trust.is_own(ours)
    os.chown(file, NOBODY, -1)
    assert not workspace_trust.is_allowed(ours)


@AS_ROOT
def test_the_members_of_a_group_share_a_workspace_and_cannot_take_consent_away(tmp_path):
    shared = Workspace(tmp_path / "shared")
    shared.path.mkdir()
    os.chown(shared.path, -1, GROUP)
    shared.path.chmod(0o2775)
    with shared.hold_runs_lock():
        assert not workspace_trust.is_allowed(shared)
    workspace_trust.store_consent(shared, print)
    assert workspace_trust.is_allowed(shared)
    workspace_trust.make_mark_path(shared).write_text("0" * 32)  # another member writes a mark in the user's name
    assert workspace_trust.is_allowed(shared)
    workspace_trust.make_mark_path(shared).unlink()
    (shared.path / "metrics").mkdir()
    (shared.path / "metrics" / "new.py").touch()
    assert not workspace_trust.is_allowed(shared)


def test_status_in_a_copy_of_a_workspace_cancels_no_job(tmp_path, monkeypatch, capsys):
    """Somebody sends a workspace whose records say that a run has ended whose job is in the reader's queue."""
    queue = Queue(tmp_path / "slurm", monkeypatch)
    queue.rule(ends=0)
    study = Study(tmp_path, 1)
    assert study.jobs("submit") == 0
    theirs = copied(study.workspace, tmp_path / "theirs")
    for workspace in (theirs, study.workspace):
        (run,) = workspace.list_run_dirs()
        run.write_event("attempt", "exited", code=143, reason="cancelled", why="")
    call(theirs, "jobs status")
    assert queue.calls("scancel") == []
    study.jobs("status")
    assert len(queue.calls("scancel")) == 1


def test_a_home_folder_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "state").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    workspace = Workspace(tmp_path / "w")
    assert call(workspace, "jobs render --matrix quickstart") == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "set XDG_STATE_HOME to a folder of your own" in said
    # The advice helps: what the first command made does not make the workspace foreign.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "full"))
    monkeypatch.setattr(files, "write_json", full := Mock(side_effect=WorkspaceError("no space left on device")))
    assert call(workspace, "jobs render --matrix quickstart") == 1
    assert full.called
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    assert call(workspace, "jobs render --matrix quickstart") == 0
    assert workspace_trust.is_own(workspace)


def test_a_missing_home_folder_is_reported_before_anything_is_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert call(Workspace(tmp_path / "w"), "jobs render --matrix quickstart") == 2
    assert "Allowed: XDG_STATE_HOME" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


@AS_ROOT
def test_a_umask_for_a_group_makes_no_new_workspace_foreign(tmp_path):
    workspace, before = Workspace(tmp_path / "w"), os.umask(0o002)
    os.setegid(GROUP)
    try:
        assert call(workspace, "jobs render --matrix quickstart") == 0
    finally:
        os.setegid(0)
        os.umask(before)
    assert workspace_trust.is_own(workspace)


def test_commands_that_begin_a_workspace_at_the_same_time_make_it_own(tmp_path):
    together = Barrier(4)

    def begin(number):
        together.wait()
        workspace_trust.begin_workspace(Workspace(tmp_path / str(number)))

    with ThreadPoolExecutor(4) as pool:
        for number in range(50):
            list(pool.map(begin, [number] * 4))
            assert workspace_trust.is_own(Workspace(tmp_path / str(number)))


def test_a_command_waits_while_another_command_begins_the_workspace(tmp_path, monkeypatch):
    """The mark of a workspace is written before its proof. A command that comes in between is not refused."""
    workspace, marked, asked = Workspace(tmp_path), Event(), Event()
    write_json, is_allowed_now = files.write_json, workspace_trust._is_allowed_now

    def write_late(*arguments):
        marked.set()
        asked.wait()
        write_json(*arguments)

    def ask(*arguments):
        asked.set()
        return is_allowed_now(*arguments)

    monkeypatch.setattr(files, "write_json", write_late)
    monkeypatch.setattr(workspace_trust, "_is_allowed_now", ask)
    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(workspace_trust.begin_workspace, workspace)
        assert marked.wait(HANG_S)
        try:
            workspace_trust.must_be_allowed(workspace, "submit runs")
        finally:
            asked.set()
        beginning.result()
    assert workspace_trust.is_own(workspace)


def test_a_cluster_file_that_is_just_being_written_lets_the_workspace_begin(tmp_path):
    """The shell creates cluster.yaml before `provision init > cluster.yaml` starts, and init stores the host key."""
    (tmp_path / "cluster.yaml").touch()
    workspace_trust.begin_workspace(Workspace(tmp_path))
    assert workspace_trust.is_own(Workspace(tmp_path))


def test_a_cluster_file_of_a_colleague_may_be_a_link(ours, tmp_path):
    shared = tmp_path / "site.yaml"
    shared.write_text("schema: 1\nname: here\nprovider: local\n")
    (ours.path / "cluster.yaml").symlink_to(shared)
    assert workspace_trust.is_own(ours)
    theirs = copied(ours, tmp_path / "theirs")
    workspace_trust.store_consent(theirs, print)
    assert workspace_trust.is_allowed(theirs)
    (theirs.path / "cluster.yaml").write_text("schema: 1\nname: there\nprovider: local\n")
    assert not workspace_trust.is_allowed(theirs)
