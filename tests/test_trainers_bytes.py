"""Checks the bytes that a rank sends in a step, in theory and as counted, against numbers that were worked out by hand from
what each collective sends.

Theory and counting share one table of factors (`communication.FACTORS`), so a comparison of the two would not show a wrong
factor. All numbers here are for gpt2-tiny in fp32, a batch of 8 sequences, and rank 0 of 4.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainers import communication
from trainers.communication import Call, Term
from trainers.parallel.schedule import Pipeline
from trainers.parameter_server.ledger import Mode
from trainers.parameter_server.server import ParameterServer
from trainers.parameter_server.worker import WorkerEngine

# Bytes of the 220,544 parameters of gpt2-tiny, and also of their gradients. BLOCKS of these bytes are in the blocks, and REST
# are outside of the blocks.
PSI = 882_176
BLOCKS, REST = 799_744, 82_432
HIDDEN = 131_072  # bytes of the hidden state between two blocks: 8 sequences x 64 positions x 64 numbers x 4 bytes


@pytest.mark.parametrize(
    ("op", "sent"),
    [  # bytes sent for a payload of 1,200 bytes by one of 4 ranks in a ring: three times a quarter, for an all-reduce six times
        ("all_reduce", 1800),
        ("all_gather", 900),
        ("reduce_scatter", 900),
        ("all_to_all", 900),
        ("broadcast", 900),
        ("send", 1200),
    ],
)
def test_a_rank_sends_of_a_collective_what_the_ring_needs(op, sent):
    assert Call(op, 1200, 4).sent_bytes == sent
    assert Term("", op, 1200, 4, times=2).sent_bytes == 2 * sent
    assert Term("", op, 1200, 1).sent_bytes == (1200 if op == "send" else 0)
    assert op in communication.FACTORS
    on_gloo = 2 * sent if op == "reduce_scatter" else sent  # gloo executes a reduce_scatter as an all_reduce
    assert Call(op, 1200, 4).wire_bytes("gloo") == Term("", op, 1200, 4).wire_bytes("gloo") == on_gloo
    assert Call(op, 1200, 4).wire_bytes("nccl") == sent


# A program that makes three steps as rank 0 of 4 and counts the bytes of the last step. It uses torch's fake process group,
# whose collectives move no data.
RANK_0 = """
import json, sys, tempfile
from pathlib import Path
sys.path.insert(0, "TESTS")
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from support_trainers import Bench
from trainers import communication, menu
from trainers.instruments.timing import clock_for
from trainers.ranks import Ranks

class Alone(Ranks):
    def __init__(self):
        self.rank = self.local_rank = 0
        self.world_size, self.forked, self.trains_on, self.backend, self.device = 4, True, "cpu", "fake", torch.device("cpu")

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
folder = Path(tempfile.mkdtemp())
bench = Bench(folder, folder)
for strategy, keys, counted in json.loads(sys.argv[1]):
    cell = bench.run_dir(strategy=strategy, gpus=4, **keys).read_run().cell
    cell.options["data"] = "synthetic"
    task = menu.workload(cell.workload).build(cell, folder)
    engine, clock = menu.strategy(strategy).build(cell, task, Alone()), clock_for(torch.device("cpu"))
    calls = []
    for _ in range(3 if counted else 0):
        import numpy as np
        batch = task.fetch(np.arange(cell.micro_batch_size), torch.device("cpu"))
        clock.start()
        with communication.counting() as calls:
            engine.forward_backward([batch] * cell.gradient_accumulation_steps, clock)
            engine.update()
    theory = sum(term.sent_bytes for term in engine.theory())
    found = sum(call.sent_bytes for call in calls) if counted else None
    print("BYTES", json.dumps([theory, found, engine.textbook_bytes()]), flush=True)
"""
ALL_REDUCED = 1_323_264  # bytes sent for an all-reduce of psi: 2 x 3/4 of psi
GATHERED = 661_632  # bytes sent for an all-gather or a reduce-scatter of psi: 3/4 of psi
IN_TURNS = 196_608  # bytes sent for an all-reduce of HIDDEN: 2 x 3/4 of HIDDEN
# The program makes no step of DDP, because DDP's reducer waits for a result that a fake process group never gives. The
# same-work proofs of other tests, which have real ranks, count the bytes of DDP.
BY_HAND = [
    # (strategy, keys of the cell, bytes sent, bytes according to textbooks, whether the program counts the bytes of a step)
    ("single", {}, 0, 0, False),
    ("ddp", {}, ALL_REDUCED, 2 * PSI, False),
    ("ddp", {"accumulation": 2}, ALL_REDUCED, 2 * PSI, False),
    ("ddp", {"options": {"comm_hook": "bf16"}, "precision": "bf16"}, ALL_REDUCED / 2, 2 * PSI, False),
    ("fsdp1-no-shard", {}, ALL_REDUCED, 2 * PSI, True),
    # The parameters of blocks are gathered for forward and again for backward, the other parameters once. All gradients are
    # reduce-scattered.
    ("fsdp1-full-shard", {}, 2 * 599_808 + 61_824 + GATHERED, 3 * PSI, True),
    ("fsdp1-full-shard", {"accumulation": 2}, 4 * 599_808 + 2 * 61_824 + GATHERED, 3 * PSI, True),
    ("fsdp1-shard-grad-op", {}, 2 * GATHERED, 2 * PSI, True),
    ("fsdp2", {}, 2 * 599_808 + 61_824 + GATHERED, 3 * PSI, True),
    ("fsdp2-zero2", {}, 2 * GATHERED, 2 * PSI, True),
    # Two replicas of two ranks each: a gather sends half of psi instead of 3/4. Each rank holds half of the gradients and
    # all-reduces it with the other replica.
    ("fsdp1-hybrid-shard", {}, 2 * 399_872 + 41_216 + 441_088 + 441_088, 3 * PSI, True),
    ("fsdp1-hybrid-shard-zero2", {}, 3 * 441_088, 2 * PSI, True),
    ("fsdp2-hsdp", {}, 2 * 399_872 + 41_216 + 441_088 + 441_088, 3 * PSI, True),
    ("fsdp2-hsdp-zero2", {}, 3 * 441_088, 2 * PSI, True),
    # Each of the 4 blocks all-reduces the hidden state twice in forward (Megatron-LM, section 3) and twice in backward.
    ("tp", {"tp": 4}, 16 * IN_TURNS, None, True),
    # With sequence parallelism, a reduce-scatter and an all-gather replace each all-reduce and send as many bytes together. One
    # more pair is needed, for the input of the first block and the output of the last block. The gradients of 2 norms (256
    # numbers) in each of 4 blocks, 4,096 bytes, are all-reduced. The gradients of biases are computed from a gathered gradient.
    ("tp", {"tp": 4, "options": {"sequence_parallel": True}}, 16 * IN_TURNS + IN_TURNS + 6_144, None, True),
    # Two ranks share each all-reduce, for half the batch: 16 x 65,536 bytes. A rank holds 25,184 numbers of a block (half of
    # the matrices with 12 x 64 x 64 numbers, half of 448 biases, all of 384 other numbers), which are 402,944 bytes in 4
    # blocks. FSDP2 sends half of these bytes, and half of the bytes outside of the blocks.
    ("tp-fsdp2", {"tp": 2}, 16 * 65_536 + 2 * 201_472 + 41_216 + 242_688, None, True),
    ("zero0", {}, ALL_REDUCED, 2 * PSI, True),
    # Gradients are all-reduced in whole buckets, and the updated parameters are gathered.
    ("zero1", {}, ALL_REDUCED + GATHERED, 2 * PSI, True),
    ("zero2", {}, ALL_REDUCED + GATHERED, 2 * PSI, True),
    # DeepSpeed does not shard parameters with less than 100,000 elements. All parameters of this model are smaller, so each
    # parameter is gathered once.
    ("zero3", {}, 2 * GATHERED, 3 * PSI, True),
]  # fmt: skip
SCALARS = 40  # bytes of norms, losses and flags, which no row of BY_HAND contains


@pytest.fixture(scope="module")
def told():
    """Returns [bytes in theory, bytes counted or None, bytes according to textbooks] for each entry of BY_HAND."""
    code = RANK_0.replace("TESTS", str(Path(__file__).parent))
    asked = json.dumps([[strategy, keys, counted] for strategy, keys, _, _, counted in BY_HAND])
    done = subprocess.run([sys.executable, "-c", code, asked], capture_output=True, text=True, check=False)
    lines = [json.loads(line.removeprefix("BYTES ")) for line in done.stdout.splitlines() if line.startswith("BYTES ")]
    assert len(lines) == len(BY_HAND), done.stderr[-3000:]
    return lines


@pytest.mark.parametrize("place", range(len(BY_HAND)), ids=[f"{one[0]}-{place}" for place, one in enumerate(BY_HAND)])
def test_a_strategy_sends_what_was_worked_out_by_hand(told, place):
    _, _, sent, textbook, counts = BY_HAND[place]
    theory, counted, of_textbooks = told[place]
    assert sent <= theory <= sent + SCALARS
    assert of_textbooks == textbook
    if counts:
        assert sent <= counted <= sent + SCALARS


@pytest.mark.parametrize(("rank", "sent"), [(0, 4 * 32_768 + 3), (1, 8 * 32_768 + 3), (3, 4 * 32_768 + 3)])
def test_a_stage_sends_its_neighbours_what_is_hidden_and_its_gradient(rank, sent):
    """For each of 4 micro-batches of 2 sequences, a stage sends the hidden state (32,768 bytes) to the next stage and its
    gradient to the previous stage. The broadcast of the loss sends 3/4 of 4 bytes."""
    stage = SimpleNamespace(is_first=rank == 0, is_last=rank == 3)
    pipeline = SimpleNamespace(
        _task=SimpleNamespace(plan=lambda: SimpleNamespace(hidden=(64, 64))),
        _cell=SimpleNamespace(micro_batch_size=2, gradient_accumulation_steps=4),
        _between=torch.float32,
        _pp=4,
        _stages=[stage],
    )
    assert sum(term.sent_bytes for term in Pipeline.theory(pipeline)) == sent


@pytest.mark.parametrize(("interval", "pulled"), [(1, 4 * PSI), (2, 2 * PSI)])
def test_workers_push_a_gradient_and_the_server_answers_with_parameters(interval, pulled):
    cell = SimpleNamespace(gpus=4, world_size=5, precision="fp32")
    gradients = torch.empty(PSI // 4)
    worker = SimpleNamespace(cell=cell, data_ranks=4, _mode=Mode(waits=True), _psi=lambda: float(gradients.nbytes))
    assert sum(term.sent_bytes for term in WorkerEngine.theory(worker)) == PSI
    assert WorkerEngine.textbook_bytes(worker) == 2 * PSI
    ledger = SimpleNamespace(mode=Mode(pull_interval=interval))
    server = SimpleNamespace(_parameters=gradients, _cell=cell, _ledger=ledger)
    assert sum(term.sent_bytes for term in ParameterServer.theory(server)) == pulled
