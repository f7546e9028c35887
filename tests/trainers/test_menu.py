"""The menus of strategies and workloads, which are printed without importing torch, agree with the models that torch builds."""

import subprocess
import sys

import numpy as np
import pytest

from shardlab.matrix.cell import Optimizer, Schedule
from trainers import menu
from trainers.model import optimization

pytest_plugins = ["support_trainers"]


def test_the_menus_need_no_torch():
    code = (
        "import sys; from trainers import menu; menu.load_strategies(); menu.load_workloads(); import trainers.forking.client\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'psutil'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_menus_are_complete():
    assert {"single", "ddp", "fsdp2", "fsdp2-zero2", "tp", "pp-1f1b", "tp-pp-fsdp2", "ps-sync"} <= set(menu.load_strategies())
    assert {"gpt2-tiny", "vit-tiny", "resnet50", "resnet50-tiny", "llm-7b"} <= set(menu.load_workloads())


@pytest.fixture(params=["gpt2-tiny", "vit-tiny"])
def built(request, bench):
    """Returns (the workload, its task, the model of the task), with the default options of the workload."""
    workload = menu.find_workload(request.param)
    run = bench.run_dir(workload=request.param).read_run()
    task = workload.build(run.cell, bench.data)
    return workload, task, task.model()


def test_blocks_hold_most_of_the_model_and_targets_are_the_next_byte(built):
    import torch

    workload, task, model = built
    assert len(task.blocks(model)) == 4
    assert sum(p.numel() for block in task.blocks(model) for p in block.parameters()) > 0.8 * workload.parameters
    batch = task.fetch(np.array([3, 0]), torch.device("cpu"))
    if workload.unit == "tokens":
        assert batch.inputs.shape == batch.targets.shape == (2, 64)
        assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    else:
        assert batch.inputs.shape == (2, 3, 32, 32)
        assert task.source.synthetic
        assert "synthetic" in task.source.name
        assert task.source.classes == 10


def test_the_learning_rate_rises_is_held_or_falls_to_nothing():
    rule = Optimizer(name="sgd", lr=2.0)

    def rates(name, rise, steps=10):
        return [optimization.compute_learning_rate(rule, Schedule(name, rise), step, steps, 1) for step in range(steps)]

    assert rates("constant", 0) == [2.0] * 10
    assert rates("constant", 3)[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates("linear", 0) == pytest.approx([2.0 * (1 - step / 10) for step in range(10)])
    cosine = rates("cosine", 2)
    assert cosine[2] == 2.0
    assert cosine[6] == pytest.approx(1.0)
    assert 0 < cosine[9] < 0.1
    assert rates("linear", 20)[-1] == pytest.approx(2.0 * 10 / 21)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_each_optimizer_is_that_of_torch_with_the_values_of_the_cell(name):
    import torch

    rule = Optimizer(name=name, lr=0.5, momentum=0.8, weight_decay=0.25, beta1=0.7, beta2=0.6, eps=1e-3)
    group = optimization.make_optimizer(rule, [torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    expected = {"momentum": 0.8} if name == "sgd" else {"betas": (0.7, 0.6), "eps": 1e-3}
    assert {"lr": 0.5, "weight_decay": 0.25, **expected}.items() <= group.items()
