"""What the planner says that a rank exchanges, for every strategy on the menu, compared with numbers worked out by hand."""

import re
from pathlib import Path

import pytest
from support_planner import cell
from support_sent_bytes import BY_HAND, PSI

from jobs.planner import exchanges
from trainers import menu
from trainers.plans.gpt2 import Gpt2Plan
from trainers.plans.llama import LlamaPlan
from trainers.plans.vit import VitPlan
from trainers.theory import fsdp
from trainers.theory.term import Term

MICRO = 32_768  # bytes of the hidden state of 2 sequences: 2 x 64 positions x 64 numbers x 4 bytes
TIED = 65_536  # bytes of the token embedding, 256 x 64 numbers, which is also the head: the first and the last rank share it
NOT_KNOWN = {"ddp-powersgd", "ps-async", "ps-ssp", "ps-sync"}
# The relative error that is allowed. For these strategies, the planner divides all parameters of a transformer block by tp, but
# each rank has all biases and norms.
WITHIN = {"tp-fsdp2": 0.003, "tp": 0.003}
IN_PIPELINES = [
    # (strategy, keys, what the rank that sends most sends), with micro-batches of 2 sequences
    # A rank between two other ranks sends each micro-batch onward and its gradient back.
    ("pp-gpipe", {"gpus": 4, "pp": 4, "passes": 4}, 8 * MICRO + TIED),
    ("pp-1f1b", {"gpus": 4, "pp": 4, "passes": 8}, 16 * MICRO + TIED),
    # Of two ranks, the first only sends micro-batches onward, and the second only gradients back.
    ("pp-1f1b", {"gpus": 2, "pp": 2, "passes": 4}, 4 * MICRO + TIED),
    # Stages 0 and 2 are on rank 0, 1 and 3 on rank 1. Rank 0 sends from 0 to 1, from 2 to 3, and the gradient from 2 to 1.
    ("pp-interleaved", {"gpus": 2, "pp": 2, "passes": 4}, 3 * 4 * MICRO + TIED),
    # Two replicas of a pipeline of two ranks: a rank has two blocks of 199,936 bytes, and outside of blocks the embedding, and
    # half of the positions and the norm. They are gathered and reduce-scattered once a step. Each replica has half of the
    # embedding's gradient. Four ranks together sent 2,288,648 bytes, counted, with 8 of the loss.
    ("pp-fsdp2", {"gpus": 4, "pp": 2, "passes": 2}, 2 * MICRO + TIED / 2 + 2 * (2 * 199_936 + TIED + 8_448) / 2),
    # Each of two blocks all-reduces a hidden state twice in forward and twice in backward, in each pass, over two ranks of tp.
    # The last stage has half of the head, whose input's gradient it all-reduces, and 3 numbers of each of 128 rows of logits.
    ("tp-pp", {"gpus": 4, "tp": 2, "pp": 2, "passes": 2}, 2 * MICRO + TIED / 2 + (4 * 2 * 2 + 2) * MICRO + 2 * 1_536),
    # As for `tp-pp`, and the rank's parts of the blocks are also gathered and reduce-scattered over two replicas.
    (
        "tp-pp-fsdp2",
        {"gpus": 8, "tp": 2, "pp": 2, "passes": 2},
        2 * MICRO + TIED / 4 + (4 * 2 * 2 + 2) * MICRO + 2 * 1_536 + 2 * (199_936 + TIED / 2 + 8_448) / 2,
    ),
]


@pytest.mark.parametrize(
    ("strategy", "keys", "sent"),
    [(strategy, keys, sent) for strategy, keys, sent, _, _ in BY_HAND],
    ids=[f"{row[0]}-{place}" for place, row in enumerate(BY_HAND)],
)
def test_a_rank_sends_what_the_ring_needs(strategy, keys, sent):
    of_cell = dict(keys)
    gpus, passes = 1 if strategy == "single" else 4, of_cell.pop("accumulation", 1)
    dp, batch = gpus // of_cell.get("tp", 1), of_cell.pop("global_batch_size", 8)
    one = cell("gpt2-tiny", strategy, gpus, micro=batch // dp // passes, passes=passes, **of_cell)
    assert exchanges.sum_sent_bytes(one) == pytest.approx(sent, rel=WITHIN.get(strategy, 1e-9))


@pytest.mark.parametrize(("strategy", "keys", "sent"), IN_PIPELINES, ids=[f"{row[0]}-{row[1]['pp']}" for row in IN_PIPELINES])
def test_a_rank_of_a_pipeline_sends_its_neighbours_each_micro_batch(strategy, keys, sent):
    assert exchanges.sum_sent_bytes(cell("gpt2-tiny", strategy, micro=2, **keys)) == pytest.approx(sent)


def test_the_planner_reduces_hidden_states_as_often_as_the_plans_of_models():
    plans = {"gpt2": Gpt2Plan, "llama": LlamaPlan, "vit": VitPlan}
    assert {name: plan.backward_reductions for name, plan in plans.items()} == exchanges.BACKWARD_REDUCTIONS
    assert {plan.forward_reductions for plan in plans.values()} == {exchanges.FORWARD_REDUCTIONS}


def test_the_planner_sees_a_wrong_term_of_the_theory(monkeypatch):
    """`test_bytes.py` breaks the same term for the engines."""
    monkeypatch.setattr(fsdp, "Term", lambda name, op, size, *rest, **keys: Term(name, op, size / 2, *rest, **keys))
    assert exchanges.sum_sent_bytes(cell("gpt2-tiny", "fsdp2-zero2", 4, micro=2)) == 0.75 * PSI


def test_every_strategy_on_the_menu_is_worked_out_or_not_known():
    """Each strategy has numbers by hand in this file or is in NOT_KNOWN, for which the planner gives no bytes."""
    by_hand = {row[0] for row in BY_HAND} | {row[0] for row in IN_PIPELINES}
    assert by_hand | NOT_KNOWN == menu.load_strategies().keys()
    assert not by_hand & NOT_KNOWN
    assert exchanges.list_exchanges(cell("gpt2-tiny", "ddp-powersgd", 4)) is None
    assert exchanges.list_exchanges(cell("gpt2-tiny", "ps-sync", 4, servers=1)) is None


def test_the_bytes_of_several_passes_in_the_docs_are_those_of_theory():
    """Not compared: ZeRO-3 with other options, and pipelines, whose ranks differ. One rank of tp has other parts of a block."""
    page = (Path(__file__).parents[3] / "docs/strategies.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (`?\w+`?.*?) \|.*\| ([0-9., -]+) \|$", page, re.MULTILINE)
    compared = []
    for names, sync, numbers in rows:
        for name in set(re.findall(r"`([a-z0-9-]+)`", names)) - {"zero3", "pp-fsdp2", "tp-pp-fsdp2"}:
            options = {"sync": re.findall(r"\w+", sync)[0]} if name.startswith(("fsdp", "tp")) else {}
            tp = 2 if name == "tp-fsdp2" else 1
            cells = [cell("gpt2-tiny", name, 4, tp=tp, micro=4 * tp // n, passes=n, options=options) for n in (1, 2, 4)]
            sent = [exchanges.sum_sent_bytes(one) / PSI for one in cells]
            assert sent == pytest.approx([float(number) for number in numbers.split(",")], rel=0.005), (name, sync)
            compared.append((name, sync))
    assert len(compared) == len(set(compared)) == 26


@pytest.mark.parametrize(("threshold", "gathers"), [(40_000, 1), (10_000, 3)])
def test_parameters_too_small_for_zero3_are_gathered_once_a_step(threshold, gathers):
    """Each of three passes reduces gradients of PSI bytes."""
    one = cell("gpt2-tiny", "zero3", 2, micro=2, passes=3, options={"param_persistence_threshold": threshold})
    assert exchanges.sum_sent_bytes(one) == pytest.approx((gathers + 3) * PSI / 2)


def test_more_passes_gather_more_and_reduce_gradients_once():
    once, twice = (exchanges.list_exchanges(cell("gpt2-tiny", "fsdp2", 4, passes=passes)) for passes in (1, 2))
    gathered, reduced = zip(*([one.payload_bytes for one in found] for found in (once, twice)), strict=True)
    assert gathered[1] == 2 * gathered[0]
    assert reduced == (PSI, PSI)
