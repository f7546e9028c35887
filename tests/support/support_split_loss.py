"""Forks four gloo ranks that compute a loss of logits whose columns they divide. Usage: python support_split_loss.py FOLDER

Each rank writes FOLDER/RANK.json: for each case, the loss, the gradient of the rank's logits, and the number of right
predictions.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from support_rank_processes import fork_ranks

from trainers import cross_entropy

WORLD, ROWS, COLUMNS = 4, 7, 64
CASES = [(dtype, classes) for dtype in ("float32", "bfloat16") for classes in (None, 61, 20)]


def make_case(dtype: str, classes: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (rows, columns) and targets (rows,); the first target is the largest logit of its row."""
    generator = torch.Generator().manual_seed(classes or 1)
    logits = (4 * torch.randn(ROWS, COLUMNS, generator=generator)).to(getattr(torch, dtype))
    targets = torch.randint(classes or COLUMNS, (ROWS,), generator=generator)
    targets[0] = logits[0, :classes].argmax()
    return logits, targets


def compute(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    cross_entropy.CHUNK_LOGITS = 3 * COLUMNS // WORLD  # each chunk has three rows
    answers = []
    for dtype, classes in CASES:
        logits, targets = make_case(dtype, classes)
        mine = logits.chunk(WORLD, 1)[rank].clone().requires_grad_()
        before = mine.detach().clone()
        loss = cross_entropy.compute_cross_entropy(mine, targets, classes, dist.group.WORLD)
        (3 * loss).backward()
        correct = cross_entropy.count_correct_predictions(mine.detach(), targets, classes, dist.group.WORLD)
        assert torch.equal(mine, before), "the loss changed the logits"
        answers.append([loss.item(), mine.grad.tolist(), correct.item()])
    (folder / f"{rank}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(WORLD, partial(compute, folder=Path(sys.argv[1])))
