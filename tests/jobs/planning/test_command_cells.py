"""Cells of commands: what a matrix may say about them, and what the cells have."""

import json

import msgspec
import pytest

from jobs.planning import command_cells, resolve
from jobs.plugins import command_folder
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.errors import InputError
from shardlab.matrix import matrix
from shardlab.matrix.cell import AnyCell, Cell, compute_cell_hash
from shardlab.workspace.workspace import Workspace

COMMAND = {"command": ["python", "t.py", "{set.n}"], "folder": "mine"}


def resolve_file(folder, workload=None, **keys):
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "t.py").write_text("")
    content = {"workload": {**COMMAND, **(workload or {})}, "launcher": "none", "set.n": 1, **keys}
    path = folder / "m.yaml"
    path.write_text(json.dumps({"schema": 1, "name": "m", "defaults": content}))
    loaded = matrix.load_matrix(path)
    return resolve.resolve_cells(
        loaded, plugins=OwnPlugins(command_folders=command_folder.read_folders(loaded, Workspace(folder)))
    )


def test_a_cell_of_a_command_states_only_what_is_known(tmp_path):
    (cell,) = resolve_file(tmp_path, {"command": ["t.py", "{set.n}", "{seed}"]}, seed=3, gpus=2, env={"A": True})
    assert not isinstance(cell, Cell)
    assert (cell.workload, cell.strategy, cell.strategy_text) == ("mine", "command", "command (label)")
    assert (cell.command.words, cell.set, cell.env) == (["t.py", "1", "3"], {"n": 1}, {"A": "true"})
    assert (cell.seed, cell.gpus, cell.recording_ranks, cell.data_ranks) == (3, 2, 1, 2)
    assert (cell.optimizer, cell.precision, cell.global_batch_size, cell.dp) == (None,) * 4
    assert msgspec.json.decode(msgspec.json.encode(cell), type=AnyCell).hash() == cell.hash()


def test_the_hash_of_a_training_does_not_know_commands():
    cell = msgspec.to_builtins(Cell(workload="a", strategy="b", gpus=1, dp=1, global_batch_size=1, micro_batch_size=1, steps=1,
                                    optimizer={"name": "sgd", "lr": 0.1}))  # fmt: skip
    older = {key: value for key, value in cell.items() if key not in ("command", "set", "env")}
    assert compute_cell_hash(older) == compute_cell_hash(cell) != compute_cell_hash(cell | {"env": {"A": "1"}})


def test_a_label_is_the_strategy_of_a_command(tmp_path):
    (cell,) = resolve_file(tmp_path, {"command": ["t.py", "{strategy}", "{set.n}"]}, strategy={"label": "my fsdp"})
    assert (cell.strategy, cell.command.words) == ("my fsdp", ["t.py", "my fsdp", "1"])


def test_labels_of_one_command_line_are_named(tmp_path):
    (cell,) = resolve_file(tmp_path, strategy={"label": "ddp"})
    other = msgspec.structs.replace(cell, strategy="fsdp")
    (sentence,) = command_cells.describe_commands(matrix.load_matrix(tmp_path / "m.yaml"), [cell, other])
    assert "the labels ddp, fsdp are of one command" in sentence
    longer = msgspec.structs.replace(other, gpus=2)
    assert command_cells.describe_commands(matrix.load_matrix(tmp_path / "m.yaml"), [cell, longer]) == []


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"strategy": "ddp"}, r"Allowed: a label, written {label: ddp}"),
        ({"set.other": 1}, r"no placeholder {set.other}"),
        ({"micro_batch_size": 4}, r"no placeholder {micro_batch_size}"),
        ({"options.x": 1}, "a key of trainings by shardlab"),
        ({"launcher": "fork"}, "fork starts no command"),
        ({"instruments.memory": "categories"}, "only shardlab's own trainings have instruments"),
        ({"env.RANK": 1}, "sets this variable itself"),
        ({"gpus": 3, "nnodes": 2}, "cannot be divided evenly"),
    ],
)
def test_a_key_that_a_command_cannot_have_is_refused_at_its_place(tmp_path, keys, sentence):
    with pytest.raises(InputError, match=sentence.replace("{", r"\{").replace("}", r"\}")):
        resolve_file(tmp_path, **keys)


def test_options_for_a_launcher_that_takes_none_are_refused(tmp_path):
    (cell,) = resolve_file(tmp_path, {"launcher_options": ["--x={set.n}"]}, launcher="torchrun")
    assert cell.command.launcher_options == ["--x=1"]
    with pytest.raises(InputError, match=r"srun takes no launcher_options\. Allowed: accelerate, deepspeed, torchrun"):
        resolve_file(tmp_path, {"launcher_options": ["--x={set.n}"]}, launcher="srun")


def test_launchers_of_commands_train_nothing(tmp_path):
    (tmp_path / "m.yaml").write_text(
        json.dumps({"schema": 1, "name": "m", "defaults": {"workload": "vgg16-tiny", "strategy": "single", "launcher": "none",
                                                           "global_batch_size": 4, "steps": 1}})
    )  # fmt: skip
    with pytest.raises(InputError, match="none"):
        resolve.resolve_cells(matrix.load_matrix(tmp_path / "m.yaml"))
