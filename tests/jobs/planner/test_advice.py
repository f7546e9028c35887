"""`jobs advise`: all strategies with one global batch, groups of ties, reasons, what would change the advice, and its text."""

import json
import re
from pathlib import Path

import msgspec
import pytest
import support_configured
from support_planner import cell, make_question
from support_trust import make_own

from jobs.cli import main
from jobs.planner import advise, gpu, link, predict
from jobs.planner.advise import Advice
from jobs.planner.machine import NO_GPU_MACHINE, PlannedMachine
from shardlab.runs.prediction import PredictedRange, Prediction, make_exact_range
from trainers import menu

A100 = gpu.must_find_gpu_model("a100-80gb")
MACHINE = PlannedMachine(
    True,
    "a100-80gb",
    A100,
    gpu.find_gpu_memory(A100, None),
    link.make_data_sheet_link(A100),
    link.find_link("infiniband-hdr", A100),
)


def ask(workload="llm-7b", gpus=8, **keys):
    """A question about a shipped workload on A100 GPUs with 80 GB."""
    return make_question(workload, keys.pop("machine", MACHINE), gpus, **keys)


@pytest.mark.parametrize(
    ("workload", "gpus", "keys", "batch"),
    [
        ("gpt2", 8, {}, 512),  # 0.5 M tokens in sequences of 1,024
        ("llm-1.3b", 4, {}, 512),  # 1 M tokens, sequences of 2,048
        ("llm-7b", 8, {}, 1024),  # 2 M tokens
        ("llm-7b", 8, {"seq_len": 8192}, 256),
        ("llm-7b", 6, {}, 6 * 256),  # the first power of two times six that is not below 1,024
        ("llm-7b", 2048, {}, 2048),  # at least one sequence per GPU
        ("llm-7b", 8, {"options": {"n_layer": 80, "n_embd": 8192, "n_head": 64}}, 2048),  # a model of 65 B: 4 M tokens
        ("gpt2", 8, {"seq_len": 600_000}, 8),  # one sequence is longer than the usual batch
        ("resnet50", 1, {}, 256),
        ("resnet50", 8, {}, 2048),
        ("resnet50", 64, {}, 8192),
    ],
)
def test_the_default_global_batch_follows_the_size_of_the_model(workload, gpus, keys, batch):
    assert ask(workload, gpus, **keys).global_batch == batch


@pytest.mark.parametrize("workload", ["llm-7b", "gpt2-large", "resnet50"])
@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (6, 1), (16, 2)])
def test_all_strategies_train_the_same_global_batch(workload, gpus, nodes):
    question = ask(workload, gpus, nodes=nodes)
    ranked = advise.rank_strategies(question).ranked
    timed = [entry for entry in ranked if entry.items_per_s is not None]
    assert timed or (workload, gpus) == ("llm-7b", 1)
    for entry in timed:
        one, step = entry.cell, entry.predicted.step_s.likely
        assert one.micro_batch_size * one.gradient_accumulation_steps * one.dp == one.global_batch_size == question.global_batch
        assert entry.fits
        assert menu.refuse(one) is None
        assert entry.items_per_s == pytest.approx(question.global_batch / step)
    assert len({(entry.cell.strategy, entry.cell.tp, entry.cell.pp) for entry in ranked}) == len(ranked)


def test_strategies_that_cannot_divide_the_global_batch_are_listed():
    """A batch of 12 on 8 ranks: data-parallel ranks cannot divide it, and pipelines of 2 and of 4 stages on fewer ranks can."""
    ranked = advise.rank_strategies(ask("gpt2", 8, global_batch=12)).ranked
    refused = {entry.cell.strategy for entry in ranked if entry.reasons == ("cannot divide a global batch of 12",)}
    assert {"ddp", "fsdp2", "zero3"} <= refused
    timed = {(entry.cell.strategy, entry.cell.dp) for entry in ranked if entry.group is not None}
    assert ("pp-fsdp2", 2) in timed
    assert ("pp-1f1b", 1) in timed
    assert all(12 % dp == 0 for _, dp in timed)


def made(strategy, items_per_s, fits="yes", step_s=1.0, parts=None, **keys):
    """Advice with this throughput; None: it does not fit."""
    predicted = Prediction(
        fits=fits, step_s=make_exact_range(step_s), step_parts_s=parts or {}, memory_bytes=make_exact_range(1e9)
    )
    return Advice(msgspec.structs.replace(cell("llm-7b", strategy, 8), **keys), predicted, items_per_s)


def test_a_group_of_ties_begins_with_the_strategy_that_torch_develops():
    ranked = advise._rank_candidates(
        [
            made("pp-1f1b", 100.0, dp=1, pp=8), made("fsdp1-full-shard", 99.0), made("zero3", 98.0), made("fsdp2", 95.0),
            made("ddp", 94.9), made("fsdp2-zero2", 94.0), made("tp", None, fits="no"), made("tp-fsdp2", 90.0, tp=2),
            made("tp-fsdp2", 92.0, tp=4), made("zero1", 90.1),
        ]
    )  # fmt: skip
    assert [(entry.group, entry.cell.strategy, entry.cell.tp) for entry in ranked] == [
        (1, "fsdp2", 1), (1, "zero3", 1), (1, "fsdp1-full-shard", 1), (1, "pp-1f1b", 1),  # 95 is 95 % of 100
        (2, "ddp", 1), (2, "fsdp2-zero2", 1), (2, "tp-fsdp2", 4),  # 90.1 is below 95 % of 94.9
        (3, "zero1", 1), (3, "tp-fsdp2", 2),
        (None, "tp", 1),
    ]  # fmt: skip


def test_the_better_activation_checkpointing_of_each_strategy_is_ranked():
    for full, better in ((91.0, "full"), (90.8, "none"), (None, "none")):  # 1 % is no difference
        ranked = advise._rank_candidates([made("fsdp2", 90.0), made("fsdp2", full, activation_checkpointing="full")])
        assert [entry.cell.activation_checkpointing for entry in ranked] == [better]
    ranked = advise._rank_candidates([made("fsdp2", None), made("fsdp2", 1.0, activation_checkpointing="full")])
    assert [entry.cell.activation_checkpointing for entry in ranked] == ["full"]


def test_reasons_are_the_parts_of_the_step_in_percent_of_the_recommended_step():
    best = made("fsdp2", 100.0, step_s=10.0, parts={"compute": 9.0, "communication": 0.85, "optimizer": 0.15})
    slower = made(
        "tp-pp-fsdp2", 70.0, step_s=14.0, parts={"compute": 9.5, "communication": 3.0, "bubble": 1.5}, dp=2, tp=2, pp=2
    )
    full = made("zero3", 60.0, step_s=15.0, parts={"compute": 12.0, "communication": 2.0}, activation_checkpointing="full")
    assert [entry.reasons for entry in advise._rank_candidates([best, slower, full])] == [
        ("compute 90 %", "communication 8 %"),  # the optimizer takes less than 2 %
        ("communication +22 %", "bubble +15 %", "undivided head +5 %"),
        ("recomputing +30 %", "communication +12 %"),
    ]


def test_of_the_fastest_micro_batches_the_largest_that_surely_fits_is_chosen(monkeypatch):
    """Four micro-batches: the largest is unlikely to fit, the next is only likely to fit, and the smallest is slow."""
    cells = [cell("gpt2", "ddp", 8, micro=micro, passes=16 // micro, precision="bf16") for micro in (1, 2, 4, 8)]
    needed = {1: (10, 10, 10), 2: (20, 20, 20), 4: (70, 75, 90), 8: (70, 85, 99)}
    seconds = {1: 2.0, 2: 1.0, 4: 0.995, 8: 0.5}

    def memory_of(one, **_):
        span = PredictedRange(*(float(size << 30) for size in needed[one.micro_batch_size]))
        return advise.memory.StepMemoryTerms({"parameter": span}, is_complete=True)

    def choose(limits):
        monkeypatch.setattr(advise.memory, "predict_memory", memory_of)
        time = advise.step_time.PredictedStepTime
        times = {micro: time({"compute": make_exact_range(limits[micro])}, make_exact_range(0.0), ()) for micro in limits}
        monkeypatch.setattr(advise.step_time, "predict_step_time", lambda one, _: times[one.micro_batch_size])
        monkeypatch.setattr(advise, "_advise_on_cell", lambda one, _: one.micro_batch_size)
        return advise._advise_on_variants(cells, ask("gpt2", 8, global_batch=128))

    assert choose(seconds) == 2
    assert choose(seconds | {4: 0.9}) == 4  # clearly faster, and likely to fit
    assert choose(seconds | {1: 1.005}) == 2
    assert choose(seconds | {1: 0.9}) == 1


def test_the_advice_names_what_would_change_it():
    question = ask("gpt2-large", 2)
    report = advise.rank_strategies(question, advise.list_alternatives(question))
    best, changes = report.ranked[0], report.changes
    assert changes.keys() == {
        "activation_checkpointing=full",
        "--global-batch 2048, with more passes",
        "--option pad_vocabulary=64",
    }
    recomputed = changes["activation_checkpointing=full"]
    assert (recomputed.cell.strategy, recomputed.cell.global_batch_size) == (best.cell.strategy, best.cell.global_batch_size)
    assert 0.7 < recomputed.items_per_s / best.items_per_s < 0.9
    padded = changes["--option pad_vocabulary=64"]
    assert padded.cell.options["pad_vocabulary"] == 64
    assert padded.items_per_s > 1.1 * best.items_per_s
    assert changes["--global-batch 2048, with more passes"].cell.global_batch_size == 2048
    assert "--option pad_vocabulary=64" not in advise.list_alternatives(ask("gpt2-large", 2, options={"pad_vocabulary": 64}))
    assert "--option pad_vocabulary=64" not in advise.list_alternatives(ask("llm-7b", 8))  # 32,000 rows are aligned
    options = {name: value for name, value in question.options.items() if name != "pad_vocabulary"}
    without = msgspec.structs.replace(question, options=options)
    assert "--option pad_vocabulary=64" not in advise.list_alternatives(without)


def test_memory_or_a_time_that_is_not_known_gives_no_place():
    unknown_gpu = msgspec.structs.replace(MACHINE, gpu_model=None, gpu_memory_bytes=None)
    assert {entry.reasons for entry in advise.rank_strategies(ask(machine=unknown_gpu)).ranked} == {
        ("the memory of the GPU is not known",)
    }
    no_time = advise.rank_strategies(
        ask(machine=msgspec.structs.replace(unknown_gpu, gpu_memory_bytes=make_exact_range(80 << 30)))
    ).ranked
    reasons = {entry.reasons[0].partition(" (")[0] for entry in no_time}
    assert reasons == {"its time is not known", "does not fit"}
    assert predict.predict_run(no_time[0].cell, NO_GPU_MACHINE).step_s is None


def advised(capsys, *words):
    """The standard output of `jobs advise` for 8 A100 with 80 GB, unless the words name other GPUs."""
    gpus = [] if "--gpus" in words else ["--gpus", "8", "--gpu", "a100-80gb"]
    assert main(["advise", *gpus, *map(str, words)]) == 0
    return capsys.readouterr().out


SITUATIONS = (
    ("--workload", "llm-7b"),
    ("--workload", "gpt2-large", "--gpus", "2", "--gpu", "rtx-3090"),
    ("--workload", "resnet50", "--precision", "fp16-autocast", "--gpus", "8", "--gpu", "v100-sxm2-16gb"),
    ("--workload", "llm-7b", "--gpus", "64", "--nodes", "8", "--gpu", "h100", "--between-nodes", "infiniband-ndr"),
    ("--workload", "llm-7b", "--gpus", "2", "--gpu", "a100-40gb"),
    ("--workload", "gpt2", "--global-batch", "12"),
)


@pytest.mark.parametrize("words", SITUATIONS)
def test_the_text_of_an_advice_is_at_most_100_columns_wide(words, capsys):
    text = advised(capsys, *words)
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(r"\de[+-]\d", text) is None
    assert "All strategies do the same work: " in text


def test_an_advice_begins_with_the_recommendation_and_its_reason(capsys):
    ddp = advised(capsys, *SITUATIONS[1])
    assert ddp.startswith("Use ddp dp=2 micro_batch_size=")
    assert "each GPU holds the whole model" in ddp
    assert "With --option pad_vocabulary=64: " in ddp
    assert "it is the only strategy with fp16-autocast that fits" in " ".join(advised(capsys, *SITUATIONS[2]).split())
    assert advised(capsys, *SITUATIONS[4]).startswith("No strategy can be recommended")
    fsdp2 = " ".join(advised(capsys, *SITUATIONS[0]).split())
    assert re.match(r"Use fsdp2 dp=8 .*: \d+ strategies are within 5 % of the fastest.*PyTorch develops it first\.", fsdp2)
    assert "1,024 sequences of 2,048 tokens (2,097,152 tokens) a step (the default; --global-batch N)" in fsdp2
    assert "Cannot divide a global batch of 12: " in advised(capsys, *SITUATIONS[5])


def test_options_of_the_command_reach_the_cells(capsys):
    words = ("--option", "n_layer=40", "--option", "n_embd=5120", "--option", "n_head=40", "--seq-len", "4096")
    network = ("--gpus", "16", "--nodes", "2", "--gpu", "a100-80gb", "--between-nodes", "ethernet-25", "--link", "pcie-4")
    document = json.loads(advised(capsys, "--workload", "llm-7b", *words, *network, "--global-batch", "64", "--json"))
    cells = [entry["cell"] for entry in document["strategies"] if entry["group"] is not None]
    assert {(one["gpus"], one["nnodes"], one["seq_len"], one["global_batch_size"]) for one in cells} == {(16, 2, 4096, 64)}
    assert {one["options"]["n_embd"] for one in cells} == {5120}
    assert document["strategies"][0]["group"] == 1
    text = advised(capsys, "--workload", "llm-7b", *words, *network, "--cards-per-node", "2")
    # two tables of 32,000 rows, and 40 blocks with an MLP of the width 13,760
    parameters = 2 * 32_000 * 5120 + 5120 + 40 * (4 * 5120**2 + 3 * 5120 * 13_760 + 2 * 5120)
    assert f"({parameters:,} parameters) in bf16 on 16 x NVIDIA A100-SXM4-80GB" in " ".join(text.split())
    assert "PCIe" not in text
    assert "pcie-4 and ethernet-25" in " ".join(text.split())


def test_more_network_cards_make_the_advice_for_several_nodes_faster(capsys):
    words = ("--workload", "llm-7b", "--gpus", "16", "--nodes", "2", "--gpu", "a100-80gb", "--between-nodes", "ethernet-25")
    document = json.loads(advised(capsys, *words, "--json"))
    more = document["changes"]["--cards-per-node 8"]
    assert more["items_per_s"] > document["strategies"][0]["items_per_s"]
    eight = json.loads(advised(capsys, *words, "--cards-per-node", "8", "--json"))
    assert "--cards-per-node 8" not in eight["changes"]
    assert eight["strategies"][0]["items_per_s"] == pytest.approx(more["items_per_s"])


CLUSTER = """\
schema: 1
name: site
provider: slurm
gpus: {type: a100, per_node: 4, memory_gib: 80}
network: {between_nodes: infiniband-hdr, cards_per_node: 4}
storage: {shared: /scratch/a}
slurm: {}
"""


def test_the_cluster_file_gives_the_gpus_and_the_network(tmp_path, capsys):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    words = ("--workload", "llm-7b", "--gpus", "8", "--workspace", tmp_path)
    text = " ".join(advised(capsys, *words).split())
    assert "8 x NVIDIA A100-SXM4-80GB (80.0 GiB), 2 node(s), NVLink 3 and infiniband-hdr;" in text
    assert "--cards-per-node" not in text
    assert "8 x NVIDIA A100-SXM4-80GB (80.0 GiB), 1 node(s), NVLink 3;" in " ".join(
        advised(capsys, *words, "--nodes", "1").split()
    )


REFUSALS = (
    ("--workload lm-7b", "unknown workload 'lm-7b'. Did you mean 'llm-7b'?"),
    ("--workload missing.json", "missing.json: cannot be read"),
    ("--gpu abacus", "unknown GPU 'abacus'"),
    ("--link nvlnk", "--link: unknown link 'nvlnk'. Did you mean 'nvlink'?"),
    ("--between-nodes carrier-pigeon", "--between-nodes: unknown link 'carrier-pigeon'"),
    ("--precision bf8", "--precision: unknown precision 'bf8'"),
    ("--gpus 0", "--gpus: found 0. Allowed: 1 to 1000000."),
    ("--seq-len 0", "--seq-len: found 0. Allowed: 1 to 1000000."),
    ("--global-batch -1", "--global-batch: found -1. Allowed: 1 to 1000000."),
    ("--cards-per-node 0", "--cards-per-node: found 0. Allowed: 1 to 1000000."),
    ("--nodes 3", "--gpus 8 --nodes 3: allowed is a number of nodes that divides the GPUs."),
    ("--nodes 2", "--between-nodes: needed with several nodes, such as infiniband-hdr."),
    ("--option n_layr=3", "--option: unknown option of gpt2 'n_layr'. Did you mean 'n_layer'?"),
    ("--option n_layer=many", "--option n_layer: found many. Allowed: a whole number from 1."),
    ("--option n_layer=[", "--option n_layer: found [. Allowed: a whole number from 1."),
    ("--option n_head=7", "--workload gpt2: n_head: 7 does not divide the width of 768 (n_embd)."),
    ("--workload resnet50 --seq-len 64", "--seq-len: resnet50 has no sequences."),
)


@pytest.mark.parametrize(("words", "sentence"), REFUSALS)
def test_a_question_that_has_no_answer_is_refused_in_one_sentence(words, sentence, capsys):
    defaults = ["advise", "--workload", "gpt2", "--gpus", "8", "--gpu", "a100"]
    assert main([*defaults, *words.split()]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.out == ""


def test_a_machine_without_gpus_needs_the_option_gpu(tmp_path, capsys):
    assert main(["advise", "--workload", "gpt2", "--gpus", "8", "--workspace", str(tmp_path)]) == 2
    assert "--gpu: needed, because the cluster local has no GPUs." in capsys.readouterr().err


MODEL = """\
"A model of the workspace."
import torch
from torch import nn
ITEMS = 64
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), *[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)], nn.Linear(64, 2))
def batch(items):
    return torch.ones(len(items), 8), items % 2
"""


def test_advice_for_a_configuration_and_for_a_workload_of_the_workspace(tmp_path, capsys):
    workspace = make_own(tmp_path / "w").path
    (workspace / "workloads").mkdir()
    (workspace / "workloads" / "net.py").write_text(MODEL)
    (tmp_path / "my-llama").mkdir()
    file = tmp_path / "my-llama" / support_configured.write(tmp_path / "my-llama", "llama", vocab_size=320)
    file = file.rename(Path(tmp_path, "my-llama", "config.json"))
    words = ("--workspace", workspace, "--json", "--global-batch", "64")
    by_configuration = json.loads(advised(capsys, "--workload", file, "--seq-len", "64", *words))
    by_code = json.loads(advised(capsys, "--workload", "net", *words))
    for document, name, seq_len in ((by_configuration, "my-llama", 64), (by_code, "net", None)):
        cells = [entry["cell"] for entry in document["strategies"]]
        assert {one["workload"] for one in cells} == {name}
        assert {one["seq_len"] for one in cells} == {seq_len}
        assert {"ddp", "fsdp2", "zero3"} <= {one["strategy"] for one in cells}
        assert all(one["workload_code"] for one in cells)
    assert main(["advise", "--workload", str(file), "--gpus", "8", "--gpu", "a100", "--workspace", str(workspace)]) == 2
    assert "A language model needs the option --seq-len." in capsys.readouterr().err
