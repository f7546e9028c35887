"""The loss of logits whose columns are divided over ranks is torch's loss of the whole logits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support_e2e import HANG_S
from support_split_loss import CASES, WORLD, make_case
from torch.nn import functional

SCRIPT = Path(__file__).parents[1] / "support" / "support_split_loss.py"


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each rank computed, for each case."""
    folder = tmp_path_factory.mktemp("ranks")
    subprocess.run([sys.executable, SCRIPT, folder], check=True, timeout=HANG_S)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("place", range(len(CASES)), ids=[f"{dtype}-{classes}-classes" for dtype, classes in CASES])
def test_ranks_that_divide_the_classes_have_torchs_loss_and_gradient(answers, place):
    """With 20 classes, two of the four ranks have only columns of padding."""
    dtype, classes = CASES[place]
    logits, targets = make_case(dtype, classes)
    exact = logits.double().requires_grad_()
    expected = functional.cross_entropy(exact[:, :classes], targets)
    (3 * expected).backward()
    correct = (exact[:, :classes].argmax(1) == targets).sum().item()
    assert 0 < correct < len(targets)
    gradients = []
    for loss, gradient, right in (rank_answers[place] for rank_answers in answers):
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert right == correct
        gradients.append(torch.tensor(gradient, dtype=torch.double))
    within = {"float32": 1e-6, "bfloat16": 2**-7}[dtype]
    torch.testing.assert_close(torch.cat(gradients, 1), exact.grad, rtol=within, atol=within / 100)
