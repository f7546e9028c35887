"""Bytes that a rank sends in a step, compared with numbers that were worked out by hand from what each collective sends.

Theory and counting share one table of factors (`term.FACTORS`), so comparing them would not show a wrong factor. All
numbers here are for gpt2-tiny in fp32: a batch of 8 sequences, rank 0 of 4.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support_planner import cell
from support_sent_bytes import BY_HAND, PSI

from trainers.communication import CountedCall
from trainers.parallel.mesh_model import MeshModel
from trainers.parameter_server.ledger import ServerMode
from trainers.parameter_server.server import ParameterServer
from trainers.parameter_server.worker import WorkerEngine
from trainers.theory import term
from trainers.theory.mesh import list_mesh_terms
from trainers.theory.term import ModelPart, Term


@pytest.mark.parametrize(
    ("op", "sent"),
    [  # bytes that a rank sends for 1,200 bytes in a ring of 4 ranks: three quarters, and twice as many for an all-reduce
        ("all_reduce", 1800),
        ("all_gather", 900),
        ("reduce_scatter", 900),
        ("all_to_all", 900),
        ("broadcast", 900),
        ("send", 1200),
    ],
)
def test_a_rank_sends_the_bytes_of_the_ring_algorithm(op, sent):
    assert CountedCall(op, 1200, 4).sent_bytes == sent
    assert Term("", op, 1200, 4, times=2).sent_bytes == 2 * sent
    assert Term("", op, 1200, 1).sent_bytes == (1200 if op == "send" else 0)
    assert op in term.FACTORS
    on_gloo = 2 * sent if op == "reduce_scatter" else sent  # gloo executes reduce_scatter as an all-reduce
    assert CountedCall(op, 1200, 4).wire_bytes("gloo") == Term("", op, 1200, 4).wire_bytes("gloo") == on_gloo
    assert CountedCall(op, 1200, 4).wire_bytes("nccl") == sent


# Makes three steps as rank 0 of 4 with torch's fake process group, whose collectives move no data. Counts the bytes of the last
# step. Before the last cell, the theory of FSDP is broken: each of its terms has half its bytes.
RANK_0 = """
import json, sys, tempfile
from pathlib import Path
sys.path.insert(0, "SUPPORT")
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from support_trainers import Bench
from trainers import communication, menu
from trainers.instruments.timing import make_clock
from trainers.ranks.ranks import Ranks
from trainers.theory import fsdp
from trainers.theory.term import Term

class Alone(Ranks):
    def __init__(self):
        self.rank = self.local_rank = 0
        self.world_size, self.trains_on, self.backend, self.device = 4, "cpu", "fake", torch.device("cpu")

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
folder = Path(tempfile.mkdtemp())
bench = Bench(folder)
cells = json.loads(sys.argv[1])
for number, (strategy, keys, counted) in enumerate(cells, 1):
    if number == len(cells):
        fsdp.Term = lambda name, op, size, *rest, **more: Term(name, op, size / 2, *rest, **more)
    cell = bench.run_dir(strategy=strategy, gpus=4, **keys).read_run().cell
    cell.options["data"] = "synthetic"
    task = menu.find_workload(cell.workload).build(cell, folder)
    engine, clock = menu.find_strategy(strategy).build(cell, task, Alone()), make_clock(torch.device("cpu"))
    calls = []
    for _ in range(3 if counted else 0):
        import numpy as np
        batch = task.fetch(np.arange(cell.micro_batch_size), torch.device("cpu"))
        clock.start()
        with communication.count_collectives() as calls:
            engine.forward_backward([batch] * cell.gradient_accumulation_steps, clock)
            engine.update()
    theory = sum(term.sent_bytes for term in engine.theory())
    found = sum(call.sent_bytes for call in calls) if counted else None
    print("BYTES", json.dumps([theory, found, engine.compute_textbook_bytes()]), flush=True)
"""
SCALARS = 40  # bytes of norms, losses and flags, which are in no table
BROKEN = next(row for row in BY_HAND if row[0] == "fsdp2")


@pytest.fixture(scope="module")
def told():
    """Returns a list with [theory, counted or None, textbook] for each entry of BY_HAND, and for BROKEN with a broken
    theory."""
    code = RANK_0.replace("SUPPORT", str(Path(__file__).parents[2] / "support"))
    asked = json.dumps([[strategy, keys, counted] for strategy, keys, _, _, counted in (*BY_HAND, BROKEN)])
    done = subprocess.run([sys.executable, "-c", code, asked], capture_output=True, text=True, check=False)
    lines = [json.loads(line.removeprefix("BYTES ")) for line in done.stdout.splitlines() if line.startswith("BYTES ")]
    assert len(lines) == len(BY_HAND) + 1, done.stderr[-3000:]
    return lines


@pytest.mark.parametrize("place", range(len(BY_HAND)), ids=[f"{one[0]}-{place}" for place, one in enumerate(BY_HAND)])
def test_a_strategy_sends_the_bytes_that_were_computed_by_hand(told, place):
    must_send(BY_HAND[place], told[place])


def test_the_comparison_sees_a_wrong_term_of_the_theory(told):
    _, counted, of_textbooks = told[-1]
    must_send(BROKEN, [counted, counted, of_textbooks])
    with pytest.raises(AssertionError):
        must_send(BROKEN, told[-1])


def must_send(row, measured):
    """Check what an engine says and what was counted. row: of BY_HAND. measured: as in `told`."""
    _, _, sent, textbook, counts = row
    theory, counted, of_textbooks = measured
    assert sent <= theory <= sent + SCALARS
    assert of_textbooks == textbook
    if counts:
        assert sent <= counted <= sent + SCALARS


@pytest.mark.parametrize(("rank", "sent"), [(0, 4 * 32_768 + 3), (1, 8 * 32_768 + 3), (3, 4 * 32_768 + 3)])
def test_a_stage_sends_its_neighbours_hidden_states_and_their_gradients(rank, sent):
    """4 micro-batches of 2 sequences send a hidden state of 32,768 bytes each. The loss is broadcast: 3/4 of 4 bytes."""
    messages = MeshModel.count_messages(SimpleNamespace(stages=4, stage_modules={rank: "the stage"}))
    part = ModelPart(elements=0, hidden_elements=2 * 64 * 64, messages=messages)
    one = cell("gpt2-tiny", "pp-1f1b", 4, pp=4, micro=2, passes=4)
    assert sum(term.sent_bytes for term in list_mesh_terms(one, part, pipelined=True)) == sent


@pytest.mark.parametrize(("interval", "pulled"), [(1, 4 * PSI), (2, 2 * PSI)])
def test_workers_push_a_gradient_and_the_server_answers_with_parameters(interval, pulled):
    one = cell("gpt2-tiny", "ps-async", 4, servers=1, options={"pull_interval": interval})
    gradients = torch.empty(PSI // 4)
    worker = SimpleNamespace(
        cell=one, _gradients=gradients, _mode=ServerMode(waits=True), _count_parameter_bytes=lambda: float(gradients.nbytes)
    )
    assert sum(term.sent_bytes for term in WorkerEngine.theory(worker)) == PSI
    assert WorkerEngine.compute_textbook_bytes(worker) == 2 * PSI
    server = SimpleNamespace(_parameters=gradients, _cell=one)
    assert sum(term.sent_bytes for term in ParameterServer.theory(server)) == pulled
