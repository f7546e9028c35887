"""Models that a matrix defines by naming a configuration file: what is read, what is refused, and what identifies a model."""

import json
import re
import shutil
from pathlib import Path

import pytest
from support_configured import model_of, write

from jobs import on_controller
from jobs.cli import main
from jobs.plugins import own_plugins, plugin_store
from shardlab.errors import InputError
from shardlab.matrix import matrix, model_file
from shardlab.workspace.workspace import Workspace

MATRIX = """\
schema: 1
name: mine
defaults: {{workload: {workload}, strategy: single, launcher: fork, global_batch_size: 4, steps: 2}}
axes: {{seed: [1]}}
"""
PAGE = (Path(__file__).parents[3] / "docs" / "model-by-configuration.md").read_text()
LLAMA = "{transformers: my-llama.json, seq_len: 16}"


def loaded(folder, workload=LLAMA, text=MATRIX):
    """Writes a matrix file that trains this workload into the folder, and returns the loaded matrix."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "m.yaml").write_text(text.format(workload=workload))
    return matrix.load_matrix(folder / "m.yaml")


def test_a_configuration_is_replaced_by_its_name_in_every_key(tmp_path):
    write(tmp_path, "llama")
    (tmp_path / "GPT Small").mkdir()
    shutil.copy(tmp_path / "my-llama.json", tmp_path / "GPT Small" / "config.json")
    text = """\
schema: 1
name: mine
defaults: {{strategy: single, global_batch_size: 4, steps: 2}}
axes:
  workload: [gpt2-tiny, {workload}, {{transformers: GPT Small/config.json, seq_len: 8}}]
exclude: [{{workload: {{transformers: GPT Small/config.json, seq_len: 8}}, why: too large}}]
include:
  - {{workload: {{torchvision: resnet152}}, gpus: 2}}
  - {{when: "workload == 'my-llama'", steps: 3}}
"""
    found = loaded(tmp_path, text=text)
    assert [(point.keys["workload"], point.keys["steps"]) for point in found.points] == [
        ("gpt2-tiny", 2), ("my-llama", 3), ("resnet152", 2),
    ]  # fmt: skip
    assert [entry.cell["workload"] for entry in found.excluded] == ["gpt-small"]
    assert {name: (model.path, model.seq_len) for name, model in found.models.items()} == {
        "my-llama": ("my-llama.json", 16), "gpt-small": ("GPT Small/config.json", 8), "resnet152": (None, None),
    }  # fmt: skip
    assert found.document.data["axes"]["workload"][1] == {"transformers": "my-llama.json", "seq_len": 16}


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ("{}", "exactly one of transformers and torchvision is needed, found neither."),
        ("{transformers: a.json, torchvision: resnet18}", "found both."),
        ("{transformer: a.json}", "unknown key. Did you mean 'transformers'?"),
        ("{transformers: 3}", "expected text, found the number 3"),
        ("{transformers: a.json, seq_len: 0}", "seq_len"),
        ("{torchvision: resnet18, seq_len: 4}", "an image classifier has no sequences. Allowed: leave seq_len out."),
        ("{torchvision: ../resnet18}", "torchvision"),
        ("{transformers: absent.json}", "absent.json: cannot be read: No such file or directory."),
        ("{transformers: ../m.json}", "Allowed: the path of a .json file in the folder of the matrix, or below it"),
        ("{transformers: /etc/passwd}", "Allowed: the path of a .json file in the folder of the matrix, or below it"),
        ("{transformers: m.yaml}", "Allowed: the path of a .json file in the folder of the matrix, or below it"),
    ],
)
def test_another_form_is_refused_at_its_place(tmp_path, workload, said):
    with pytest.raises(InputError) as refused:
        loaded(tmp_path, workload)
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"{tmp_path / 'm.yaml'}:3:")
    assert "defaults.workload" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", "is no configuration of a model."),
        ("{", "is not JSON: Expecting property name"),
        ('{"a": NaN}', "is not JSON: NaN is no number of JSON."),
        ('{"a": 1, "a": 2}', "is not JSON: the key 'a' is there twice."),
        ("[" * 100_000, "is not JSON: nested too deeply."),
        ("[" * 40 + "]" * 40, "is no configuration of a model."),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", "has values deeper than 32 levels."),
        ('{"auto_map": {"AutoModel": "theirs.Model"}}', "has the key 'auto_map': it names Python code of another person"),
        ('{"text": [{"trust_remote_code": true}]}', "has the key 'trust_remote_code': it names Python code"),
        ('{"attn_implementation": "someone/kernel"}', "nothing is downloaded. Allowed: a configuration without this key."),
        ('{"quantization_config": {}}', "random weights are trained, which are not quantized."),
        (" " * (1 << 20) + "{}", "longer than 1 MiB."),
    ],
)
def test_a_file_that_is_not_the_data_of_one_model_is_refused(tmp_path, content, said):
    (tmp_path / "my-llama.json").write_text(content)
    with pytest.raises(InputError) as refused:
        loaded(tmp_path)
    assert f"{tmp_path / 'my-llama.json'}: " in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"torchvision": 1}', b'{"transformers": {"a": {"auto_map": {"b": "c"}}}}'])
def test_a_file_that_came_with_a_run_is_checked_again(content):
    with pytest.raises(InputError):
        model_file.read_content(content)


def test_keys_that_name_nothing_are_allowed(tmp_path):
    """Keys that could name code are allowed if their value is null or false."""
    write(tmp_path, "llama", auto_map=None, trust_remote_code=False)
    assert loaded(tmp_path).models


def test_a_symlink_is_not_followed(tmp_path):
    write(tmp_path / "elsewhere", "llama")
    (tmp_path / "my-llama.json").symlink_to(tmp_path / "elsewhere" / "my-llama.json")
    with pytest.raises(InputError, match="symlink"):
        loaded(tmp_path)


def test_content_identifies_a_model_and_spelling_does_not(tmp_path):
    one, other = model_of(tmp_path / "a", "llama"), model_of(tmp_path / "b", "llama", hidden_size=128)
    assert one.name == other.name
    assert one.source.digest != other.source.digest
    content = json.loads((tmp_path / "a" / "my-llama.json").read_text())
    (tmp_path / "a" / "my-llama.json").write_text(json.dumps(dict(reversed(content.items())), indent=4))
    asked = model_file.ModelByConfiguration(transformers="my-llama.json", seq_len=24)
    assert model_file.read_model(asked, tmp_path / "a").source.digest == one.source.digest


def test_two_models_of_one_name_in_a_matrix_are_refused(tmp_path):
    write(tmp_path, "llama")
    text = MATRIX.replace("axes: {{", "axes: {{workload: [{workload}, {{transformers: my-llama.json, seq_len: 8}}], ")
    with pytest.raises(InputError, match=r"axes.workload\[1\]: found two models with the name my-llama"):
        loaded(tmp_path, text=text)


def test_runs_of_a_model_carry_its_configuration_and_need_no_trust(tmp_path, capsys):
    """Renders a run from a matrix in a process that does not import torch. Then a second workspace, which stands for another
    machine, gets the run folder and can retry the run without --trust."""
    theirs, ours = Workspace(tmp_path / "theirs"), Workspace(tmp_path / "ours")
    write(theirs.path, "llama")
    loaded(theirs.path)
    argv = ["--matrix", str(theirs.path / "m.yaml"), "--workspace", str(theirs.path)]
    assert main(["plan", *argv]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "LlamaForCausalLM of transformers, random weights: 131,008 parameters, 3 blocks (LlamaDecoderLayer)" in shown
    assert "MFLOP per token, in sequences of 16; tp: 1, 2." in shown
    assert "my-llama: where a pipeline may cut it is not known, so tp-pp, pp-fsdp2" in shown
    assert main(["plan", *argv, "--scale", "tiny", "--json"]) == 0
    (twin,) = json.loads(capsys.readouterr().out)["models"]
    assert (twin["name"], twin["blocks"], twin["tensor_degrees"]) == ("my-llama-tiny", 3, [2])
    assert main(["render", *argv]) == 0
    (run_dir,) = theirs.list_run_dirs()
    run = run_dir.read_run()
    assert run.cell.workload_code == matrix.load_matrix(theirs.path / "m.yaml").models["my-llama"].source.digest
    assert run.cell.seq_len == 16
    shutil.copytree(run_dir.path, ours.runs / run_dir.run_id)
    found = own_plugins.read_run_plugins(ours, run, trust=False)
    assert found.workloads.by_name["my-llama"] == run.own_workload
    plugin_store.freeze_sources(ours, found.sources)
    # The second workspace now has its own copy of the configuration.
    assert own_plugins.read_run_plugins(ours, run, trust=False).sources == []
    shutil.rmtree(ours.shardlab_folder)
    frozen = ours.runs / run_dir.run_id / "workloads" / "my-llama.json"
    frozen.write_text(frozen.read_text().replace("96", "97"))
    with pytest.raises(InputError, match="is not complete"):
        own_plugins.read_run_plugins(ours, run, trust=False)


def test_a_cluster_gets_the_configurations_at_their_places_beside_the_matrix(tmp_path):
    write(tmp_path / "here" / "sub", "llama")
    found = loaded(tmp_path / "here", "{transformers: sub/my-llama.json, seq_len: 4}")
    for path, content in on_controller.read_matrix_files(tmp_path / "here" / "m.yaml", found).items():
        (tmp_path / "there" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / path).write_bytes(content)
    there = matrix.load_matrix(tmp_path / "there" / "matrices" / "m.yaml")
    assert there.models["my-llama"].source == found.models["my-llama"].source


def test_the_page_shows_the_plan_of_its_model(tmp_path, capsys):
    blocks = re.findall(r"^```(\w+)(?: title=\"(.*?)\")?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for _, name, text in blocks:
        if name:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
    (command,) = [text.split() for kind, _, text in blocks if kind == "sh"]
    (shown,) = [text for kind, _, text in blocks if kind == "text"]
    assert command[:3] == ["jobs", "plan", "--matrix"]
    assert main(["plan", "--matrix", str(tmp_path / command[3]), "--workspace", str(tmp_path)]) == 0
    assert shown in capsys.readouterr().out


def test_a_shipped_name_and_a_fault_of_a_model_are_reported_at_their_place(tmp_path, capsys):
    write(tmp_path, "nope")
    loaded(tmp_path, "{transformers: my-nope.json, seq_len: 4}")
    assert main(["plan", "--matrix", str(tmp_path / "m.yaml"), "--workspace", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "m.yaml:3:22: defaults.workload: " in said
    assert "my-nope.json: has the model_type 'nope'." in said
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "my-llama.py").write_text("")
    write(tmp_path, "llama")
    shutil.copy(tmp_path / "my-llama.json", tmp_path / "gpt2.json")
    models = {
        name: model_file.read_model(model_file.ModelByConfiguration(transformers=f"{name}.json", seq_len=4), tmp_path)
        for name in ("gpt2", "my-llama")
    }
    found = own_plugins.find_plugins(Workspace(tmp_path), (), (), models).workloads
    assert "gpt2.json: the workload gpt2 ships with shardlab." in found.fault_by_name["gpt2"]
    assert "my-llama.json: workloads/my-llama.py defines another workload my-llama." in found.fault_by_name["my-llama"]
