"""Workloads and strategies that a workspace defines have the same rules: what identifies them, and which code is executed."""

import json
import shutil

import msgspec
import pytest
from support_trust import make_own

from jobs.cli import main
from jobs.plugins import own_plugins, plugin_store
from shardlab.errors import InputError
from shardlab.files import plugin_source
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace
from tests.jobs.plugins import test_own_strategies, test_own_workloads

pytest_plugins = ["support_own_answers"]
pytestmark = [
    pytest.mark.usefixtures("shared_answers"),
    pytest.mark.parametrize("kind", [own_plugins.WORKLOADS, own_plugins.STRATEGIES], ids=lambda kind: kind.noun),
]
# By folder: the name of the file, its text, and the matrix that uses the plug-in.
FILES = {
    "workloads": ("points", test_own_workloads.MODEL, test_own_workloads.MATRIX),
    "strategies": ("alone", test_own_strategies.text_of(), test_own_strategies.MATRIX),
}


def workspace(folder, kind, before="", after=""):
    """An own workspace with a plug-in and a matrix that uses it. before, after: more lines of the plug-in's file."""
    name, text, matrix = FILES[kind.folder]
    (folder / kind.folder).mkdir(parents=True)
    (folder / kind.folder / f"{name}.py").write_text(before + text + after)
    (folder / "m.yaml").write_text(matrix)
    return make_own(folder)


def call(made, verb, *words):
    matrix = ["--matrix", str(made.path / "m.yaml")] if verb in ("plan", "render") else []
    return main([verb, *matrix, *words, "--workspace", str(made.path)])


def rendered(made):
    """Runs `jobs render` in this workspace and returns the folder of the only run that it wrote."""
    assert call(made, "render") == 0
    (run_dir,) = made.list_run_dirs()
    return run_dir


def plugin_of(run, kind):
    return getattr(run, f"own_{kind.noun}")


def test_two_plugins_of_one_name_are_two_cells_and_the_run_carries_its_code(tmp_path, capsys, kind):
    first = rendered(workspace(tmp_path / "a", kind)).read_run()
    assert rendered(workspace(tmp_path / "b", kind)).read_run().cell.hash() == first.cell.hash()
    other = workspace(tmp_path / "c", kind, after="\n")
    run_dir = rendered(other)
    run, file = run_dir.read_run(), f"{FILES[kind.folder][0]}.py"
    words = {"workloads": "workload", "strategies": "strategies"}[kind.folder]
    remark = f"runs execute the workspace's own {words} {other.path / kind.folder / file}."
    assert remark in capsys.readouterr().err
    assert run.cell.hash() != first.cell.hash()
    code = plugin_of(run, kind).code
    assert code == getattr(run.cell, f"{kind.noun}_code") != plugin_of(first, kind).code
    text = (other.path / kind.folder / file).read_bytes()
    assert (run_dir.path / kind.folder / file).read_bytes() == text
    assert (other.shardlab_folder / "own" / code / file).read_bytes() == text


def test_code_that_came_with_a_run_is_not_used_unless_it_is_trusted(tmp_path, kind):
    run_dir = rendered(workspace(tmp_path / "theirs", kind))
    run, ours = run_dir.read_run(), Workspace(tmp_path / "ours")
    carried, name = ours.runs / run_dir.run_id, FILES[kind.folder][0]
    shutil.copytree(run_dir.path, carried)
    refusal = rf"the code of its {kind.noun} {name} .*was not submitted from this workspace, so it is not executed.*--trust"
    with pytest.raises(InputError, match=refusal):
        own_plugins.read_run_plugins(ours, run, trust=False)
    assert not ours.shardlab_folder.exists()
    workspace_trust.store_consent(ours, print)
    with pytest.raises(InputError, match="--trust"):  # the user consented before any code was frozen
        own_plugins.read_run_plugins(ours, run, trust=False)
    plugin_store.freeze_sources(ours, own_plugins.read_run_plugins(ours, run, trust=True).sources)
    found = own_plugins.read_run_plugins(ours, run, trust=False)
    assert getattr(found, kind.folder).by_name == {name: plugin_of(run, kind)}
    assert found.sources == []
    shutil.rmtree(ours.shardlab_folder)
    (carried / kind.folder / f"{name}.py").write_text("changed\n")
    with pytest.raises(InputError, match="is not complete"):
        own_plugins.read_run_plugins(ours, run, trust=True)


def test_a_frozen_copy_is_used_only_where_commands_may_act(tmp_path, kind):
    made = workspace(tmp_path, kind)
    run = rendered(made).read_run()
    assert own_plugins.read_run_plugins(made, run, trust=False).sources == []
    workspace_trust.make_mark_path(made).unlink()
    with pytest.raises(InputError, match="was not submitted from this workspace, so it is not executed"):
        own_plugins.read_run_plugins(made, run, trust=False)


def test_only_the_configuration_of_a_model_is_data_that_needs_no_trust(tmp_path, kind):
    made = workspace(tmp_path, kind)
    run_dir = rendered(made)
    run = run_dir.read_run()
    (carried,) = (run_dir.path / kind.folder).iterdir()
    plugin_file = carried.rename(carried.with_suffix(".json"))
    code = plugin_source.read_plugin(plugin_file).digest
    plugin = msgspec.structs.replace(plugin_of(run, kind), code=code, file=str(plugin_file))
    cell = msgspec.structs.replace(run.cell, **{f"{kind.noun}_code": code})
    run = msgspec.structs.replace(run, cell=cell, **{f"own_{kind.noun}": plugin})
    if kind is own_plugins.STRATEGIES:
        with pytest.raises(InputError, match="is not executed"):
            own_plugins.read_run_plugins(made, run, trust=False)
    assert own_plugins.read_run_plugins(made, run, trust=kind is own_plugins.STRATEGIES).sources[0].digest == code


def test_a_file_that_changes_while_it_is_described_is_an_error(tmp_path, kind):
    made = workspace(tmp_path, kind, before="# a text that no other test has described\n")
    (file,) = (made.path / kind.folder).iterdir()
    source = plugin_source.read_plugin(file)
    file.write_text(f"{file.read_text()}\n")
    with pytest.raises(InputError, match=rf"{file}: changed while it was read; run the command again\."):
        plugin_store.describe_plugins(made, kind, source)
    assert list(made.shardlab_folder.glob("own/*.json")) == []


def test_a_workspace_that_came_from_elsewhere_executes_no_code(tmp_path, capsys, kind):
    marker = tmp_path / "executed"
    made = workspace(tmp_path / "w", kind, before=f"open({str(marker)!r}, 'w')\n")
    workspace_trust.make_mark_path(made).unlink()
    assert call(made, kind.folder) == 1
    assert call(made, "plan") == 2
    assert capsys.readouterr().err.count("allow it with --trust") == 2
    assert not marker.exists()
    assert call(made, "plan", "--trust") == 0
    assert marker.exists()


def test_a_file_with_a_shipped_name_is_named_and_the_others_work(tmp_path, capsys, kind):
    made = workspace(tmp_path, kind)
    name, text, _ = FILES[kind.folder]
    shipped = {"workloads": "gpt2", "strategies": "ddp"}[kind.folder]
    (made.path / kind.folder / f"{shipped}.py").write_text(text.replace(name, shipped))
    assert call(made, kind.folder, "--json") == 1
    shown = capsys.readouterr()
    assert (
        f"{shipped}.py: the {kind.noun} {shipped} ships with shardlab and cannot be replaced. Allowed: another name."
        in shown.err
    )
    files = {entry["name"]: entry["file"] for entry in json.loads(shown.out)}
    assert files[name] == str(made.path / kind.folder / f"{name}.py")
    assert files[shipped] is None
