"""Errors in the user's own model: a lack of memory ends the run as `oom`, and other errors name the line of the file."""

import numpy as np
import pytest
import torch
from support_own import cell_of, described, run_dir_of

from shardlab.errors import InputError
from trainers import menu
from trainers.ranks.out_of_memory import is_out_of_memory

pytest_plugins = ["support_trainers"]
MODEL = """\
"A linear model of random points."
import torch
from torch import nn
ITEMS, FLOPS_PER_UNIT = 64, 24.0
points = torch.randn(ITEMS, 4, generator=torch.Generator().manual_seed(0))
def model() -> nn.Module:
    return nn.Linear(4, 3)
def batch(items):
    return points[items], items % 3
"""
# The first step ends, and the second is out of memory.
FULL_AT_STEP_2 = """\
calls = []
def loss(outputs, targets):
    assert outputs.dtype is torch.float32, outputs.dtype
    calls.append(outputs.shape)
    if len(calls) > 1:
        raise RuntimeError("CUDA error: out of memory")
    return nn.functional.cross_entropy(outputs, targets)
"""


def task_of(folder, text):
    """The task of a model file with this text."""
    (known,) = described(folder, text).plugins
    workload = menu.add_own_workload(known, folder / "workloads" / "mine.py")
    return workload.build(cell_of(known, "single", dp=1, gpus=1), folder)


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        ("torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')", True),
        ("RuntimeError('CUDA error: out of memory')", True),
        ("MemoryError()", True),
        ("RuntimeError('mat1 and mat2 shapes cannot be multiplied')", False),
    ],
)
def test_an_error_of_torch_in_an_own_loss_is_not_reported_as_a_mistake_in_the_file(tmp_path, error, is_full):
    task = task_of(tmp_path, f"{MODEL}def loss(outputs, targets):\n    raise {error}\n")
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        task.criterion(torch.zeros(2, 3), torch.zeros(2))
    assert is_out_of_memory(caught.value) == is_full
    assert not isinstance(caught.value, InputError)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("def loss(outputs, targets):\n    return targets['label']\n", 11, "IndexError"),
        (
            "def loss(outputs, targets):\n    return float(outputs.sum())\n",
            None,
            "loss() returned a float. Allowed: the mean loss",
        ),
        ("def loss(outputs, targets):\n    return None\n", None, "loss() returned a NoneType. Allowed: the mean loss"),
    ],
)
def test_a_mistake_in_the_users_loss_names_the_file_and_its_line(tmp_path, text, line, says):
    task = task_of(tmp_path, MODEL + text)
    with pytest.raises(InputError) as caught:
        task.criterion(torch.zeros(2, 3), torch.from_numpy(np.zeros(2)))
    place = f"{tmp_path}/workloads/mine.py{f':{line}' if line else ''}: "
    assert str(caught.value).startswith(place)
    assert says in str(caught.value)


def test_a_run_whose_own_loss_exhausts_memory_is_oom_and_its_loss_got_fp32(bench, tmp_path):
    (known,) = described(tmp_path, MODEL + FULL_AT_STEP_2).plugins
    run_dir = run_dir_of(bench, tmp_path, known, "single", precision="bf16", steps=3)
    code, errors = bench.finish(run_dir)
    assert code == 1, errors
    (event,) = [event for event in run_dir.read_events() if event.event not in ("met", "started")]
    assert event.event == "oom", event
    place = f"{run_dir.path}/workloads/mine.py:15: RuntimeError: "
    assert event.data["why"] == f"{place}CUDA error: out of memory (while training)"
    assert len(run_dir.steps(0).records) == 1
