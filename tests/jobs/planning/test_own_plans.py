"""The user's own models under tensor and pipeline parallelism: what the model files declare, what is refused, and that every
strategy does the same work."""

import pytest
from support_own import cell_of, described, run_dir_of

from trainers import menu

pytest_plugins = ["support_trainers"]
MODEL = """\
"Tokens through blocks of attention."
import torch
from torch import nn
ITEMS = 64
tokens = torch.randint(32, (ITEMS, 9), generator=torch.Generator().manual_seed(0))
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    def forward(self, hidden):
        read = self.norm(hidden)
        q, k, v = (layer(read).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(torch.relu(self.up(self.norm2(hidden))))
def model(width: int = 24, heads: int = 6, depth: int = 4) -> nn.Module:
    blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
    return nn.Sequential(nn.Embedding(32, width), blocks, nn.Linear(width, 32))
def batch(items):
    return tokens[items, :-1], tokens[items, 1:]
"""
TENSOR = """\
def tensor_parallel(block, ranks):
    if block.heads % ranks:
        raise ValueError(f"{block.heads} heads cannot be divided by {ranks}")
    block.heads //= ranks
    return {**dict.fromkeys(["q", "k", "v", "up"], "columns"), "out": "rows", "down": "rows"}
"""
PIPELINE = "def pipeline(model):\n    return model[0], model[2]\n"


def test_an_own_model_declares_its_tensor_parallel_degrees_and_its_stages(tmp_path):
    (known,) = described(tmp_path, MODEL + TENSOR + PIPELINE).plugins
    # The degrees are the common divisors of the widths 24, 24 and 48 that also divide the number of heads, which is 6.
    assert known.tensor_degrees == (2, 3, 6)
    assert known.most_stages == 4
    workload = menu.add_own_workload(known, tmp_path / "workloads" / "mine.py")
    assert menu.refuse(cell_of(known, "tp", tp=2)) is None
    assert "Allowed tp: 1, 2, 3, 6." in menu.refuse(cell_of(known, "tp", gpus=4, tp=4))
    assert menu.refuse(cell_of(known, "pp-gpipe", pp=4, gpus=4)) is None
    assert "mine has 4 blocks, too few for 5 stages" in menu.refuse(cell_of(known, "pp-gpipe", pp=5, gpus=5))
    options = {**cell_of(known, "tp", tp=2).options, "heads": 4}
    assert not workload.has_default_options(cell_of(known, "tp", options=options))
    # If options differ from their defaults, `menu.refuse` accepts the cell, because only the ranks can check it.
    assert menu.refuse(cell_of(known, "tp", gpus=4, tp=4, options=options)) is None


def test_without_the_functions_the_refusal_says_how_to_add_them(tmp_path):
    (known,) = described(tmp_path, MODEL).plugins
    menu.add_own_workload(known, tmp_path / "workloads" / "mine.py")
    assert "defines no function tensor_parallel(block, ranks)" in menu.refuse(cell_of(known, "tp", tp=2))
    assert "defines no function pipeline(model)" in menu.refuse(cell_of(known, "pp-gpipe", pp=2))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def tensor_parallel(block, ranks):\n    return {'upper': 'columns'}\n", "a block has no linear layer 'upper'"),
        ("def tensor_parallel(block, ranks):\n    return {'up': 'column'}\n", "Allowed: 'columns' or 'rows'"),
        ("def tensor_parallel(block, ranks):\n    return {'down': 'columns'}\n", "split by columns, reads 48 numbers"),
        ("def tensor_parallel(block, ranks):\n    return 1 / 0\n", "mine.py:24: ZeroDivisionError"),
        ("def pipeline(model):\n    return model[0]\n", "pipeline() returned a Embedding"),
        ("def pipeline(model):\n    return model[0], nn.Identity()\n", "the parameter 2.weight is neither before the blocks"),
        (
            PIPELINE + "def blocks(model):\n    return [model[0], *model[1]]\n",
            "blocks that take and return one tensor of one shape",
        ),
    ],
)
def test_a_function_that_cannot_be_right_is_a_fault_of_the_file(tmp_path, text, said):
    assert said in described(tmp_path, MODEL + text).fault


@pytest.mark.parametrize(
    ("strategy", "gpus", "keys"),
    [
        ("tp", 2, {"tp": 2, "accumulation": 2}),
        ("tp", 2, {"tp": 2, "activation_checkpointing": "full"}),
        ("tp-pp", 4, {"tp": 2, "pp": 2, "accumulation": 2}),
    ],
)
def test_strategies_that_divide_the_model_do_the_work_of_one_process(bench, tmp_path, strategy, gpus, keys):
    """The same-work proof of each run succeeds, and the run sends exactly the bytes that theory predicts."""
    (known,) = described(tmp_path, MODEL + TENSOR + PIPELINE).plugins
    run_dir = run_dir_of(bench, tmp_path, known, strategy, gpus=gpus, prove="auto", **keys)
    code, errors = bench.finish(run_dir)
    assert code == 0, errors + "".join(log.read_text() for log in run_dir.log.glob("*"))
    found = run_dir.read_result().same_work
    assert found.verdict == "proven", found.why
    assert found.communication_bytes["counted"] == pytest.approx(found.communication_bytes["theory"], rel=1e-6)
