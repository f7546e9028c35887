"""The folder of a command: which files runs get, and that a copy is what was submitted."""

import subprocess
from types import SimpleNamespace

import pytest

from jobs.plugins import command_folder, plugin_store
from shardlab.errors import InputError
from shardlab.matrix.command import CommandWorkload
from shardlab.plugins import command_copies
from shardlab.workspace.workspace import Workspace


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "mine"
    (made / "data").mkdir(parents=True)
    (made / "__pycache__").mkdir()
    for name in ("train.py", ".gitignore", "data/a.bin", "model.pt", "__pycache__/x.pyc"):
        (made / name).write_text(name)
    (made / ".gitignore").write_text("*.pt\n__pycache__\n")
    return made


@pytest.mark.parametrize("in_git", [True, False])
def test_runs_get_the_files_that_git_would_add(folder, in_git):
    if in_git:
        subprocess.run(["git", "init", "-q", folder], check=True)
    assert command_folder.read_folder(folder, []).files == [".gitignore", "data/a.bin", "train.py"]
    assert command_folder.read_folder(folder, ["data"]).files == [".gitignore", "train.py"]
    assert command_folder.read_folder(folder, ["data/*.bin", ".gitignore"]).files == ["train.py"]
    assert (folder / ".git").exists() == in_git


@pytest.mark.parametrize("git", ["inside a repository", "outside of a repository", "not installed"])
def test_a_pattern_without_a_slash_leaves_out_files_at_every_level(tmp_path, monkeypatch, git):
    for name in ("a.bin", "sub/b.bin", "sub/deep/c.bin", "out/d.txt", "sub/out/e.txt", "train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    if git == "inside a repository":
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
    if git == "not installed":
        monkeypatch.setenv("PATH", "")
    assert command_folder.read_folder(tmp_path, ["*.bin", "out/"]).files == ["train.py"]
    assert command_folder.read_folder(tmp_path, ["/*.bin", "sub/out", "/out"]).files == [
        "sub/b.bin",
        "sub/deep/c.bin",
        "train.py",
    ]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["python", "missing.py"], "it does not exist"),
        (["./missing.sh", "--x"], "it does not exist"),
        (["python", "../train.py"], "it is outside, git ignores it, or `exclude` names it"),
        (["python", "left.py"], "it is outside, git ignores it, or `exclude` names it"),
        (["python3.11", "-u", "-X", "dev", "missing.py"], "it does not exist"),
        (["bash", "missing.sh"], "it does not exist"),
        (["sub/missing.py"], "it does not exist"),
        (["python", "./train.py"], None),
        (["--log-dir=a/b", "missing.py"], None),
        (["sub/"], None),
        (["train.py"], None),
        (["python", "-m", "missing.py"], None),
        (["python", "{set.script}.py"], None),
        (["python", "/opt/missing.py"], None),
        (["torchrun", "missing.py"], None),
    ],
)
def test_a_script_that_runs_would_not_find_is_refused_before_they_start(tmp_path, words, fault):
    (tmp_path / "train.py").touch()
    (tmp_path / "left.py").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "part.py").touch()
    (tmp_path.parent / "train.py").touch()
    workload = CommandWorkload(command=words, exclude=["left.py"])
    matrix = SimpleNamespace(path=str(tmp_path / "matrix.yaml"), command_by_name={"mine": workload})
    if fault is None:
        assert command_folder.read_folders(matrix, None)["mine"].files == ["sub/part.py", "train.py"]
    else:
        with pytest.raises(InputError, match=f"mine: runs would not find .*: {fault}"):
            command_folder.read_folders(matrix, None)


@pytest.mark.parametrize("in_git", [True, False])
def test_runs_get_ignored_files_that_include_names_and_a_note_names_the_others(folder, in_git):
    if in_git:
        subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / "other.pt").touch()
    read = command_folder.read_folder(folder, [], ["model.*"])
    assert read.files == [".gitignore", "data/a.bin", "model.pt", "train.py"]
    (note,) = command_folder.describe_folders({"mine": read})
    assert note.startswith("mine: runs do not get what git ignores: other.pt. If")
    assert command_folder.read_folder(folder, ["*.pt"], ["model.*"]).ignored == []
    (folder / ".gitignore").write_text("data\n")
    assert command_folder.read_folder(folder, []).ignored == ["data/"]
    read = command_folder.read_folder(folder, [], ["data/*.bin"])
    assert ("data/a.bin" in read.files, command_folder.describe_folders({"mine": read})) == (True, [])


def test_each_change_of_a_file_changes_the_digest(folder):
    def read_digest():
        return command_folder.read_folder(folder, []).digest

    digests = [read_digest()]
    (folder / "train.py").chmod(0o755)
    digests.append(read_digest())
    (folder / "train.py").write_text("new")
    digests.append(read_digest())
    (folder / "train.py").rename(folder / "other.py")
    digests.append(read_digest())
    assert len(set(digests)) == 4


def test_a_run_gets_what_was_frozen_and_a_damaged_copy_is_refused(folder, tmp_path):
    workspace = Workspace(tmp_path / "workspace")
    read = command_folder.read_folder(folder, [])
    command_folder.freeze_folders(workspace, [read])
    (folder / "train.py").write_text("later")
    store = plugin_store.find_store(workspace)
    (tmp_path / "run").mkdir()
    command_folder.copy_into_run(store, read.digest, tmp_path / "run")
    assert (tmp_path / "run" / "work" / "train.py").read_text() == "train.py"
    with pytest.raises(InputError, match="changed while it was copied"):
        command_folder.freeze_folders(Workspace(tmp_path / "second"), [read])
    (command_copies.find_copy(store, read.digest) / "train.py").write_text("changed")
    with pytest.raises(InputError, match="missing or damaged"):
        command_folder.must_have_frozen_copy(store, read.digest)


def test_a_folder_that_is_too_large_names_its_largest_files(folder, monkeypatch):
    monkeypatch.setattr(command_folder, "MOST_BYTES", 20)
    with pytest.raises(InputError, match=r"the largest are .*data/a.bin.*exclude"):
        command_folder.read_folder(folder, [])


def test_a_link_to_a_file_outside_is_refused(folder):
    (folder / "inside").symlink_to("train.py")
    assert "inside" in command_folder.read_folder(folder, []).files
    (folder / "outside").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match="outside of"):
        command_folder.read_folder(folder, [])


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(InputError, match="is no folder"):
        command_folder.read_folder(tmp_path / "none", [])


@pytest.mark.parametrize("pattern", ["", "/", "!train.py", "../data", "./data", "#x"])
def test_a_pattern_that_git_would_read_in_another_way_is_refused(folder, pattern):
    with pytest.raises(InputError, match=r"exclude: found .* Allowed: a pattern of files in the folder as in \.gitignore"):
        command_folder.read_folder(folder, [pattern])
    with pytest.raises(InputError, match="include: found"):
        command_folder.read_folder(folder, [], [pattern])


def test_the_repository_of_a_git_hook_is_not_that_of_the_folder(folder, tmp_path, monkeypatch):
    expected = command_folder.read_folder(folder, []).files
    subprocess.run(["git", "init", "-q", tmp_path / "other"], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert command_folder.read_folder(folder, []).files == expected != []
