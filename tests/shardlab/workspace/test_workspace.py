"""A workspace is one folder, and shardlab treats all spellings of the path of this folder alike."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support_trust import make_own

from jobs.cli import main
from provision.providers import virtual
from provision.providers.virtual import PracticeNodeError
from shardlab.cluster import cluster
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.remote import remote_workspace
from shardlab.workspace.workspace import Workspace

FILE = """\
schema: 1
name: far
provider: ssh
nodes: [{name: gpu0, host: 10.9.9.1, roles: [controller, worker]}]
storage: {shared: /mydata}
slurm: {partition: batch}
"""
PRACTICE = """\
schema: 1
name: near
provider: virtual
nodes: [{name: head, roles: [controller, worker]}]
"""
SPELLINGS = {
    "absolute": "{parent}/ws", "by the parent": "../ws", "a dot": ".", "a slash at the end": "../ws/",
    "a symlink": "{parent}/link", "through a symlink and back": "{parent}/link/../ws", "twice": "../ws/../ws",
}  # fmt: skip
# A fake `ssh` that answers the upload of files as a controller does. It logs the path of the workspace on the controller for
# each command.
SSH = f"""\
#!{sys.executable}
import base64, re, shlex, sys
if "-G" not in sys.argv:
    script = re.search(r"echo ([^ ]+) [|]", sys.argv[-1])
    words = shlex.split(base64.b64decode(script[1]).decode() if script else sys.argv[-1])
    if script:
        print(words[1].rstrip(";"))
    with open({{log!r}}, "a") as log:
        print(words[words.index("--workspace") + 1], file=log)
    print('{{{{"version": "1"}}}}')
"""


@pytest.fixture
def ws(tmp_path, monkeypatch):
    folder = tmp_path / "ws"
    make_own(folder)
    (tmp_path / "link").symlink_to("ws")
    (folder / "cluster.yaml").write_text(FILE)
    node = {"name": "gpu0", "host": "10.9.9.1", "roles": ["controller"], "python": "/opt/bin/python"}
    (folder / ".shardlab/inventory.json").write_text(json.dumps({"schema": 1, "cluster": "far", "nodes": [node]}))
    monkeypatch.chdir(folder)
    return folder


def spelled(tmp_path, how):
    return SPELLINGS[how].format(parent=tmp_path)


def folder_of(path):
    found = Workspace(Path(path))
    return remote_workspace.find_remote_workspace(found, cluster.load_cluster(found.path / "cluster.yaml")).workspace


def test_runs_are_sent_to_one_folder_of_the_cluster_by_every_spelling(ws, tmp_path, monkeypatch):
    log = tmp_path / "log"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(SSH.format(log=str(log)))
    (tmp_path / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    for how in SPELLINGS:
        # Without away.json, shardlab must compute the path of the workspace on the controller again for each spelling.
        (ws / ".shardlab/away.json").unlink(missing_ok=True)
        assert main(["submit", "--matrix", "quickstart", "--workspace", spelled(tmp_path, how)]) == 0
    folders = log.read_text().splitlines()
    assert len(folders) == 2 * len(SPELLINGS)
    assert len(set(folders)) == 1
    assert folders[0].startswith("/mydata/workspaces/ws-")


@pytest.mark.parametrize("how", SPELLINGS)
def test_a_workspace_that_was_recorded_by_another_spelling_keeps_its_folder(ws, tmp_path, how):
    old = recorded_away(ws, f"{tmp_path}/link")
    assert folder_of(spelled(tmp_path, how)) == old.workspace
    assert remote_workspace.find_remote_workspace(Workspace(ws), cluster.load_cluster(ws / "cluster.yaml")).mark == old.mark


def recorded_away(ws, path, shared="/mydata"):
    """Writes the record that an older version of shardlab would have written for this spelling of the path. Returns the
    record."""
    there = remote_workspace.find_remote_workspace(Workspace(ws), cluster.load_cluster(ws / "cluster.yaml"))
    fields = {name: getattr(there, name) for name in there.__struct_fields__}
    old = remote_workspace.RemoteWorkspace(
        **fields | {"workspace": f"{shared}/workspaces/link-01234567", "mark": f"host:{path}\n"}
    )
    remote_workspace.write_remote_workspace(Workspace(ws), old)
    return old


def test_a_workspace_that_was_moved_keeps_its_folder_and_a_copy_gets_its_own(ws, tmp_path):
    old = recorded_away(ws, ws)
    shutil.copytree(ws, tmp_path / "copy")
    assert folder_of(ws) == old.workspace
    assert folder_of(tmp_path / "copy") not in (old.workspace, folder_of(tmp_path / "nowhere/../copy/../ws"))
    ws.rename(tmp_path / "moved")
    assert folder_of(tmp_path / "moved") == old.workspace


@pytest.mark.parametrize("verb", ["cancel", "retry"])
def test_a_copy_of_a_workspace_changes_no_runs_of_the_first_one(ws, tmp_path, verb, capsys):
    recorded_away(ws, ws)
    shutil.copytree(ws, tmp_path / "copy")
    asked = main([verb, *(["--all"] if verb == "cancel" else []), "--workspace", str(tmp_path / "copy")])
    said = capsys.readouterr().err
    assert (asked, said.count("\n")) == (2, 1)
    assert f"{tmp_path / 'copy'}: is a copy of {ws}, and this command would change the runs of the original on far" in said
    assert remote_workspace.read_workspace_to_change(Workspace(ws)) == remote_workspace.read_remote_workspace(
        Workspace(tmp_path / "copy")
    )


def test_a_matrix_that_was_delivered_is_named_by_its_path_here(ws, tmp_path):
    there = recorded_away(ws, ws)
    remote_workspace.record_matrix_path(Workspace(ws), tmp_path / "my study.yaml")
    delivered = f"{there.workspace}/matrices/my study.yaml"
    assert remote_workspace.find_local_matrix_path(Workspace(ws), delivered) == str(tmp_path / "my study.yaml")
    for other in ("/opt/shardlab/matrices/paper1.yaml", f"{there.workspace}/matrices/unknown.yaml"):
        assert remote_workspace.find_local_matrix_path(Workspace(ws), other) == other


def test_another_shared_folder_of_the_cluster_gets_a_folder_of_its_own(ws):
    recorded_away(ws, ws, shared="/before")
    assert folder_of(ws).startswith("/mydata/workspaces/ws-")


@pytest.mark.parametrize("how", SPELLINGS)
@pytest.mark.parametrize("recorded", ["absolute", "a symlink", "through a symlink and back"])
def test_practice_nodes_belong_to_their_workspace_by_every_spelling(ws, tmp_path, monkeypatch, how, recorded):
    (ws / "near.yaml").write_text(PRACTICE)
    described = cluster.load_cluster(ws / "near.yaml")
    monkeypatch.setattr(virtual, "STATE_FOLDER", tmp_path / "state")
    (tmp_path / "state/near").mkdir(parents=True)
    (tmp_path / "state/near/workspace").write_text(f"{spelled(tmp_path, recorded)}\n")
    virtual._check_owner(described, Workspace.find(spelled(tmp_path, how)))
    with pytest.raises(PracticeNodeError, match="has practice nodes of the name near"):
        virtual._check_owner(described, Workspace(tmp_path / "other"))


@pytest.mark.parametrize("name", ["a\n", "../a", "", "A", ".a", "a/b", "a" * 65])
def test_a_name_that_is_no_run_id_is_refused(tmp_path, name):
    with pytest.raises(InputError, match="is no name of a run"):
        Workspace(tmp_path).find_run_dir(name)


def test_a_workspace_whose_path_is_no_utf_8_is_refused(tmp_path, capsysbinary):
    folder = tmp_path / os.fsdecode(b"w\xff")
    folder.mkdir()
    assert main(["status", "--workspace", str(folder)]) == 2
    assert b"contains bytes that are not UTF-8" in capsysbinary.readouterr().err
    with pytest.raises(InputError, match="not UTF-8, which no JSON file can store"):
        files.write_json(tmp_path / "x.json", {"path": str(folder)})
    assert not (tmp_path / "x.json").exists()


def test_git_ignores_what_commands_write_into_a_checkout(tmp_path, monkeypatch):
    """A user may take the checkout itself as the workspace. `git status` then shows only the user's own files."""
    shutil.copy(Path(__file__).parents[3] / ".gitignore", tmp_path)
    for name in (
        "runs/a/run.json",
        ".shardlab/inventory.json",
        "report/index.html",
        "cluster.yaml",
        "mine.yaml",
        "docs/runs/a.md",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):  # the settings of this machine may ignore more files
        monkeypatch.setenv(name, os.devnull)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    command = ["git", "-C", tmp_path, "status", "--porcelain", "--untracked-files=all"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == ["?? .gitignore", "?? docs/runs/a.md", "?? mine.yaml"]
