"""What the training loop costs beside a bare loop of the same model on the same data, in one process, in turns.

    python benchmarks/loop.py [--rounds 15] [--steps 20] [--n-embd 192] [--seq-len 128]

Prints milliseconds a step of both (median over rounds) and their ratio round by round, so that a machine whose speed
drifts slows both alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch.nn.functional import cross_entropy

from shardlab.cell import Cell, Optimizer, Schedule
from shardlab.record import LineWriter
from trainers import loop, menu
from trainers.data.order import TIMED, Order
from trainers.ranks import Place, Ranks


def cell(arguments: argparse.Namespace) -> Cell:
    return Cell(
        workload="gpt2-tiny",
        strategy="single",
        gpus=1,
        nnodes=1,
        dp=1,
        tp=1,
        pp=1,
        servers=0,
        launcher="torchrun",
        global_batch_size=8,
        micro_batch_size=8,
        gradient_accumulation_steps=1,
        seq_len=arguments.seq_len,
        steps=arguments.steps,
        epochs=None,
        warmup_steps=0,
        precision="fp32",
        activation_checkpointing="none",
        compile=False,
        max_grad_norm=None,
        prove="off",
        optimizer=Optimizer("sgd", 0.01),
        schedule=Schedule(),
        seed=42,
        time_limit_s=None,
        expect=[],
        options={"n_layer": 4, "n_embd": arguments.n_embd, "n_head": 4, "data": "stdlib-text", "tokens_file": None},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--rounds", 15), ("--steps", 20), ("--n-embd", 192), ("--seq-len", 128)):
        parser.add_argument(name, type=int, default=default, help=f"(default: {default})")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ours, bare = measure(cell(arguments), arguments.rounds, Path(folder))
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    low, high = sorted(ratios)[len(ratios) // 10], sorted(ratios)[-1 - len(ratios) // 10]
    print(f"the loop   {statistics.median(ours):.3f} ms a step")
    print(f"a bare one {statistics.median(bare):.3f} ms a step")
    print(f"ratio      {statistics.median(ratios):.4f} (of {len(ratios)} rounds the middle 80 %: {low:.4f} to {high:.4f})")


def measure(one: Cell, rounds: int, folder: Path) -> tuple[list[float], list[float]]:
    """Milliseconds a step of the loop and of the bare loop, a pair a round; the two take turns in being first."""
    ranks = Ranks(Place())
    task = menu.workload(one.workload).build(one, folder)
    order = Order(task.source.items, one.global_batch_size, one.seed)
    torch.manual_seed(one.seed)
    engine = menu.strategy(one.strategy).build(one, task, ranks)
    torch.manual_seed(one.seed)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def with_loop(number: int) -> float:
        with LineWriter(folder / f"steps-{number}.jsonl") as lines:
            started = time.perf_counter()
            loop._steps(one, task, order, engine, ranks, loop.Recorder(lines))
            return (time.perf_counter() - started) / (one.steps or 1) * 1000

    def without(_: int) -> float:
        started = time.perf_counter()
        for step in range(one.steps or 0):
            batch = task.fetch(order.batch(TIMED, step), ranks.device)
            logits = model(input_ids=batch.inputs).logits
            cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return (time.perf_counter() - started) / (one.steps or 1) * 1000

    ours, bare = [], []
    for number in range(-1, rounds):  # the first is warm-up
        pair = [(ours, with_loop), (bare, without)]
        for kept, run in pair if number % 2 else pair[::-1]:
            took = run(number)
            if number >= 0:
                kept.append(took)
    ranks.leave()
    return ours, bare


if __name__ == "__main__":
    main()
