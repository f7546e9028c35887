"""`jobs plan`, `render` and `submit` with --set: a value in place of one in `defaults` of the matrix, and its record."""

import json

import pytest

from jobs.cli import main
from jobs.on_controller import read_matrix_files
from shardlab.matrix.matrix import load_matrix
from shardlab.verb import format_words
from shardlab.workspace.workspace import Workspace

FILE = """\
schema: 1
name: small
defaults: {workload: gpt2-tiny, strategy: single, gpus: 1, global_batch_size: 8, seq_len: 64,
  optimizer: {name: adamw, lr: 0.001}, steps: 10, warmup_steps: 2, time_limit: "00:10:00"}
axes: {precision: [fp32, bf16]}
"""


@pytest.fixture
def matrix_file(tmp_path):
    (tmp_path / "small.yaml").write_text(FILE)
    return tmp_path / "small.yaml"


def plan(matrix_file, capsys, *options):
    """The JSON document of `jobs plan` of the matrix file, and what is printed beside it."""
    assert main(["plan", "--matrix", str(matrix_file), "--json", "--workspace", str(matrix_file.parent), *options]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def refuse(matrix_file, capsys, *options):
    assert main(["plan", "--matrix", str(matrix_file), "--workspace", str(matrix_file.parent), *options]) == 2
    return capsys.readouterr().err


def test_a_set_value_makes_the_cells_that_a_changed_file_would_make(matrix_file, capsys):
    planned, printed = plan(matrix_file, capsys, "--set", "steps=5", "--set=optimizer.lr=0.01")
    matrix_file.write_text(FILE.replace("steps: 10", "steps: 5").replace("lr: 0.001", "lr: 0.01"))
    changed, _ = plan(matrix_file, capsys)
    assert planned["cells"] == changed["cells"]
    assert "steps: 5 instead of 10: given by --set" in printed
    assert [(entry["key"], entry["study"], entry["here"]) for entry in planned["deviations"]] == [
        ("steps", 10, 5), ("optimizer.lr", None, 0.01),
    ]  # fmt: skip
    assert changed["deviations"] == []


@pytest.mark.parametrize(("setting", "replaced"), [("epochs=1", "steps"), ("gpu_batch_size=4", "global_batch_size")])
def test_a_set_key_replaces_the_key_that_excludes_it(matrix_file, capsys, setting, replaced):
    planned, printed = plan(matrix_file, capsys, "--set", setting)
    key, _, value = setting.partition("=")
    assert [entry["key"] for entry in planned["deviations"]] == [replaced, key]
    assert f"{replaced}: left out instead of " in printed
    cell = planned["cells"][0]["cell"]
    assert str(cell["epochs"] if key == "epochs" else cell["micro_batch_size"]) == value


def test_a_set_mapping_replaces_dotted_keys_below_it(matrix_file, capsys):
    matrix_file.write_text(FILE.replace("optimizer: {name: adamw, lr: 0.001}", "optimizer.name: adamw, optimizer.lr: 0.001"))
    planned, _ = plan(matrix_file, capsys, "--set", "optimizer={name: sgd, lr: 0.5}")
    assert {(entry["cell"]["optimizer"]["name"], entry["cell"]["optimizer"]["lr"]) for entry in planned["cells"]} == {
        ("sgd", 0.5)
    }


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["steps=many"], "--set steps=many: defaults.steps: found the text 'many'"),
        (["step=5"], "--set step=5: defaults.step: unknown cell key 'step'. Did you mean 'steps'?"),
        (["steps"], "--set: found 'steps'. Allowed: KEY=VALUE, such as steps=100."),
        (["steps="], "--set: found 'steps='. Allowed: KEY=VALUE"),
        (["=5"], "--set: found '=5'. Allowed: KEY=VALUE"),
        (["steps=5", "steps=6"], "--set: the key steps is set twice."),
        (["time_limit=1:30:00"], "--set time_limit=1:30:00:1:1: "),
        (
            ["precision=tf32"],
            "--set precision=tf32: changes no cell, because `axes`, `zip`, `include` or `search` gives precision",
        ),
        (["strategy=nothing"], "--set strategy=nothing: defaults.strategy: "),
        (["optimizer.lr=-1"], "--set optimizer.lr=-1: defaults.optimizer.lr: "),
    ],
)
def test_a_wrong_setting_is_refused_with_the_option(matrix_file, capsys, settings, sentence):
    refusal = refuse(matrix_file, capsys, *(word for setting in settings for word in ("--set", setting)))
    assert sentence in refusal
    assert "small.yaml" not in refusal


def test_a_problem_of_the_file_still_names_its_line(matrix_file, capsys):
    matrix_file.write_text(FILE.replace("seq_len: 64", "seq_len: many"))
    assert "small.yaml:3:" in refuse(matrix_file, capsys, "--set", "steps=5")


@pytest.mark.parametrize("section", ["defaults: 3", "defaults: {}\ndeviations: 3"])
def test_a_file_with_wrong_sections_is_refused_with_and_without_settings(matrix_file, capsys, section):
    matrix_file.write_text(f"schema: 1\nname: small\n{section}\n")
    assert refuse(matrix_file, capsys, "--set", "steps=5") == refuse(matrix_file, capsys)


def test_the_recorded_expansion_has_the_set_values_as_deviations(matrix_file, tmp_path, capsys):
    assert main(["render", "--matrix", str(matrix_file), "--set", "steps=5", "--workspace", str(tmp_path)]) == 0
    assert "steps: 5 instead of 10: given by --set" in capsys.readouterr().out
    expansion = Workspace(tmp_path).read_expansion("small")
    assert [(change.key, change.study, change.here, change.why) for change in expansion.deviations] == [
        ("steps", 10, 5, "given by --set")
    ]
    assert {cell.cell.steps for cell in expansion.cells} == {5}
    assert main(["submit", "--matrix", str(matrix_file), "--set", "steps=5", "--dry-run", "--workspace", str(tmp_path)]) == 0


def test_an_adapted_matrix_contains_the_set_values(matrix_file, tmp_path, capsys):
    cluster = tmp_path / "two.yaml"
    cluster.write_text(
        "schema: 1\nname: two\nprovider: slurm\ngpus: {type: a100, per_node: 1}\nstorage: {shared: /scratch}\n"
        "slurm: {partition: gpu, max_nodes: 1}\n"
    )
    matrix_file.write_text(
        FILE.replace("strategy: single, gpus: 1", "strategy: ddp, gpus: 2").replace("[fp32, bf16]", "[fp32]")
    )
    matrix_file.write_text(matrix_file.read_text() + "include: [{strategy: single, gpus: 1, precision: tf32}]\n")
    planned, printed = plan(matrix_file, capsys, "--set", "steps=5", "--adapt", "--cluster", str(cluster))
    assert printed.count("steps: 5 instead of 10: given by --set") == 1
    assert {entry["cell"]["steps"] for entry in planned["cells"]} == {5}
    assert [(entry["study"], entry["here"]) for entry in planned["deviations"] if entry["key"] == "steps"] == [(10, 5)]


def test_a_controller_gets_the_settings_and_the_model_that_a_setting_names(matrix_file, tmp_path):
    from jobs.cli import parser

    words = ["plan", "--matrix", "x", "--set", "steps=5", "--set", "optimizer.lr=0.1"]
    assert parser().parse_args(format_words(parser().parse_args(words))).settings == ["steps=5", "optimizer.lr=0.1"]
    (tmp_path / "model.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2}))
    sent = read_matrix_files(matrix_file, load_matrix(matrix_file, ["workload={transformers: model.json}"]))
    assert sorted(sent) == ["matrices/model.json", "matrices/small.yaml"]
