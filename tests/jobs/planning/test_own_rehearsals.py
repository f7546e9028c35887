"""Rehearsals of models that do not ship with shardlab: models that a configuration describes, and models of the user's own
code, whose `batch` may read data with any library."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from support_configured import described, model_of, use, write
from support_own import cell_of
from support_own import described as described_code
from support_rehearsal import Rehearser

from jobs.cli import main
from shardlab.runs import rehearsed
from shardlab.runs.rehearsed import Rehearsed
from trainers import menu
from trainers.task import Batch

pytest_plugins = ["support_trainers"]
CONFIGURED = """\
schema: 1
name: m
defaults: {launcher: fork, strategy: fsdp2, gpus: 2, global_batch_size: 4, steps: 2}
axes:
  workload:
    - {transformers: models/my-gpt_neox.json, seq_len: 24}
    - {transformers: models/my-llama.json, seq_len: 24}
    - {torchvision: resnet18}
"""
MODEL = """\
"A residual network of tokens."
import numpy as np
import torch
from torch import nn
ITEMS = 64
TABLE = torch.ones(50, 8)
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(hidden)))
def model(width: int = 8, depth: int = 3) -> nn.Module:
    blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
    return nn.Sequential(nn.Embedding(50, width), blocks, nn.Linear(width, 5))
def tensor_parallel(block, ranks):
    return {"up": "columns", "down": "rows"}
def pipeline(model):
    return model[0], model[2]
"""
BATCHES = {
    "arange": "return torch.stack([torch.arange(6) + i % 9 for i in items]), torch.stack([torch.arange(6) % 5 for _ in items])",
    "numpy": "read = np.arange(ITEMS * 6).reshape(ITEMS, 6)[items.numpy()]\n"
    "    return torch.from_numpy(read % 50), torch.from_numpy(read % 5)",
    "randint": "drawn = torch.randint(5, (ITEMS, 6), generator=torch.Generator().manual_seed(1))\n"
    "    return torch.from_numpy(drawn.numpy()[items.numpy()]), torch.as_tensor(drawn[items].tolist())",
}


def batch(name):
    return f"def batch(items):\n    {BATCHES[name]}\n"


@pytest.fixture(scope="module")
def rehearse():
    """Returns a function that rehearses a cell with a workload of some source text, on two ranks."""
    process = Rehearser()

    def rehearsal(folder, text, strategy, **keys):
        found = described_code(folder, text)
        assert not found.fault, found.fault
        cell = cell_of(found.plugins[0], strategy, **{"dp": 2, "micro_batch_size": 2, "global_batch_size": 4, **keys})
        return process(cell, own=found.plugins[0])[0]

    yield rehearsal
    process.close()


def test_a_plan_rehearses_configured_models_of_a_matrix_outside_the_workspace(tmp_path, capsys):
    for name in ("gpt_neox", "llama"):
        write(tmp_path / "study" / "models", name)
    (tmp_path / "study" / "m.yaml").write_text(CONFIGURED)
    (tmp_path / "workspace").mkdir()
    words = ["plan", "--matrix", str(tmp_path / "study" / "m.yaml"), "--workspace", str(tmp_path / "workspace"), "--json"]
    assert main([*words, "--rehearse"]) == 0
    printed = capsys.readouterr()
    predicted = [entry["predicted"] for entry in json.loads(printed.out)["cells"]]
    assert [one["memory_from"] for one in predicted] == ["rehearsal"] * 3, printed.err
    assert main(words) == 0  # the stored rehearsals are used, without the folder in which they were made
    assert [entry["predicted"] for entry in json.loads(capsys.readouterr().out)["cells"]] == predicted


def test_the_configuration_in_the_folder_of_a_run_is_rehearsed(bench, tmp_path):
    """`python -m trainers rehearse` reads a run.json; the run may come from another machine and its own folder is enough."""
    model = model_of(tmp_path, "bert")
    run_dir = bench.run_dir(strategy="ddp", gpus=2)
    use(run_dir, model, described(tmp_path / "described", model).plugins[0])
    command = [sys.executable, "-W", "ignore", "-m", "trainers", "rehearse", str(run_dir.run_json)]
    done = subprocess.run(command, capture_output=True, check=False)
    answer = rehearsed.decode_answer(done.stdout)
    assert isinstance(answer, Rehearsed), answer.why
    assert answer.worst_rank.kept.parameter == 4 * run_dir.read_run().own_workload.parameters


@pytest.mark.parametrize(
    ("name", "strategy", "keys"),
    [
        ("numpy", "fsdp2", {}),
        ("randint", "pp-1f1b", {"pp": 2, "dp": 1, "gradient_accumulation_steps": 2, "micro_batch_size": 2}),
        ("arange", "ddp-powersgd", {}),
    ],
)
def test_a_batch_may_read_its_data_from_any_place(rehearse, tmp_path, name, strategy, keys):
    answer = rehearse(tmp_path, MODEL + batch(name), strategy, **keys)
    assert isinstance(answer, Rehearsed), answer.why


def test_weights_that_were_made_before_the_model_are_counted(rehearse, tmp_path):
    """A file may make weights when it is imported, and model() may use them."""
    text = MODEL.replace("nn.Embedding(50, width)", "nn.Embedding.from_pretrained(TABLE, freeze=False)").partition(
        "def tensor_"
    )[0]
    answer = rehearse(tmp_path, text + batch("arange"), "ddp")
    assert isinstance(answer, Rehearsed), answer.why
    parameters = 50 * 8 + 3 * (8 * 16 + 16 + 16 * 8 + 8) + 8 * 5 + 5
    assert answer.worst_rank.kept.parameter == 4 * parameters


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        ("return (outputs[targets > 0] - 1).square().mean()", "DynamicOutputShapeException"),
        ("return outputs.square().mean() * float(targets.numpy().max())", "RuntimeError"),
    ],
)
def test_a_loss_that_needs_values_is_refused_with_advice(rehearse, tmp_path, loss, error):
    text = f"{MODEL}{batch('arange')}def loss(outputs, targets):\n    {loss}"
    answer = rehearse(tmp_path, text, "ddp")
    line = len(text.splitlines())
    assert answer.why.startswith(f"the rehearsal failed: {tmp_path}/workloads/mine.py:{line}: {error}: ")
    assert "the shapes of tensors and not their values. Needed: model() and loss() without numpy" in answer.why


def test_a_loss_of_the_user_gets_the_outputs_in_fp32_and_replaces_the_cross_entropy(tmp_path):
    """A loss in 16 bits would lose digits that the cross-entropy of shipped models keeps."""
    text = MODEL + batch("arange") + "def loss(outputs, targets):\n    assert outputs.dtype is torch.float32, outputs.dtype\n"
    known = described_code(tmp_path, f"{text}    return (outputs * targets[..., None]).sum() + 1\n").plugins[0]
    workload = menu.add_own_workload(known, tmp_path / "workloads" / "mine.py")
    task = workload.build(cell_of(known, "single", dp=1, gpus=1), tmp_path)
    outputs = torch.full((2, 6, 5), 3.0, dtype=torch.bfloat16, requires_grad=True)
    read = Batch(*task.read_items(np.arange(2)))
    found = task.criterion(outputs, read.targets)
    assert (found.item(), found.dtype) == (3.0 * 5 * read.targets.sum().item() + 1, torch.float32)
    found.backward()
    assert outputs.grad.dtype is torch.bfloat16
    assert outputs.grad[0, 2, 0].item() == read.targets[0, 2].item()


def test_a_loss_that_is_no_mean_is_refused(tmp_path):
    text = MODEL + batch("arange") + "def loss(outputs, targets):\n    return outputs.sum(-1)\n"
    known = described_code(tmp_path, text).plugins[0]
    task = menu.add_own_workload(known, tmp_path / "workloads" / "mine.py").build(cell_of(known, "single"), tmp_path)
    with pytest.raises(Exception, match=r"loss\(\) returned a tensor of shape \(2, 6\) on cpu. Allowed: the mean loss"):
        task.criterion(torch.zeros(2, 6, 5), torch.zeros(2, 6))
