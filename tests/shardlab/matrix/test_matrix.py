"""Matrix files: their expansion into cells, as in a GitHub Actions matrix, and errors that name the wrong value in the file."""

import re
from pathlib import Path

import pytest

from jobs.planning import plan
from jobs.planning.resolve import Capacity, find_misfits, resolve_cells
from shardlab.cluster.cluster import THIS_MACHINE
from shardlab.errors import InputError, UnknownName
from shardlab.matrix import matrix, overrides
from shardlab.matrix.matrix import Matrix
from shardlab.workspace.workspace import Workspace
from trainers import menu

HEAD = "schema: 1\nname: m\n"
BASE = "defaults: {workload: gpt2-tiny, strategy: ddp, global_batch_size: 8, steps: 3}\n"
CPU = Capacity(most_nodes=1, gpus_per_node=None)


def load(folder: Path, text: str) -> Matrix:
    path = folder / "m.yaml"
    path.write_text(HEAD + text)
    return matrix.load_matrix(path)


def keys(found: Matrix, *names: str) -> list[tuple[object, ...]]:
    return [tuple(point.keys.get(name) for name in names) for point in found.points]


def test_axes_are_crossed_in_their_order(tmp_path):
    found = load(tmp_path, BASE + "axes: {strategy: [ddp, fsdp2], gpus: [1, 2]}\n")
    assert keys(found, "strategy", "gpus") == [("ddp", 1), ("ddp", 2), ("fsdp2", 1), ("fsdp2", 2)]


def test_zipped_lists_move_together(tmp_path):
    found = load(tmp_path, BASE + "axes: {seed: [1, 2]}\nzip: [{gpus: [1, 2], global_batch_size: [8, 16]}]\n")
    assert keys(found, "seed", "gpus", "global_batch_size") == [(1, 1, 8), (1, 2, 16), (2, 1, 8), (2, 2, 16)]


def test_exclusions_carry_their_reason(tmp_path):
    text = BASE + (
        "axes: {strategy: [single, ddp], gpus: [1, 2, 4]}\nexclude:\n  - {strategy: single, gpus: 2, why: one "
        "process}\n  - {when: \"strategy == 'single' and gpus > 2\", why: still one}\n"
    )
    found = load(tmp_path, text)
    assert keys(found, "strategy", "gpus") == [("single", 1), ("ddp", 1), ("ddp", 2), ("ddp", 4)]
    assert [(one.cell["gpus"], one.why) for one in found.excluded] == [(2, "one process"), (4, "still one")]


def test_inclusions_add_keys_or_cells_as_github_does(tmp_path):
    text = BASE + (
        "axes: {strategy: [single, ddp]}\ninclude:\n  - {seed: 7}\n  - {strategy: ddp, seed: 8, precision: bf16}\n  - "
        "{strategy: fsdp2}\n  - {strategy: fsdp2, seed: 9}\n"
    )
    found = load(tmp_path, text)
    assert keys(found, "strategy", "seed", "precision") == [
        ("single", 7, None),
        ("ddp", 8, "bf16"),
        ("fsdp2", None, None),
        ("fsdp2", 9, None),
    ]


def test_a_condition_reaches_cells_that_include_adds_and_keeps_what_they_give(tmp_path):
    """The entry with `when` may stand before or after the entry that defines the cell; `gpus` has a default."""
    text = BASE + (
        "axes: {strategy: [single, ddp]}\ninclude:\n"
        "  - {when: \"gpus == 1 and strategy != 'single'\", seed: 7, options: {bucket_cap_mb: 5}}\n"
        "  - {strategy: fsdp2}\n"
        "  - {strategy: fsdp2, seed: 9, options: {prefetch: 1}}\n"
        "  - {when: \"strategy == 'fsdp2' and options.prefetch == 1\", gpu_batch_size: 4, "
        "options.prefetch: 2, options.sync: x}\n"
    )
    found = load(tmp_path, text)
    assert keys(found, "strategy", "seed", "gpu_batch_size", "options", "options.prefetch", "options.sync") == [
        ("single", None, None, None, None, None),
        ("ddp", 7, None, {"bucket_cap_mb": 5}, None, None),
        ("fsdp2", 7, None, {"bucket_cap_mb": 5}, None, None),
        ("fsdp2", 9, 4, {"prefetch": 1}, None, "x"),
    ]


def test_a_condition_that_is_true_for_no_cell_is_refused(tmp_path):
    with pytest.raises(InputError, match=re.escape("include[0].when: is true for no combination")):
        load(tmp_path, BASE + "axes: {strategy: [ddp]}\ninclude: [{when: \"strategy == 'fsdp2'\", seed: 7}]\n")


def test_a_batch_of_one_kind_replaces_the_other(tmp_path):
    """An `include` entry with gpu_batch_size removes the default global_batch_size."""
    found = load(tmp_path, BASE + "axes: {gpus: [2]}\ninclude: [{gpu_batch_size: 3}]\n")
    assert keys(found, "global_batch_size", "gpu_batch_size") == [(None, 3)]


def test_dotted_keys_refine_mappings(tmp_path):
    text = (
        "defaults: {workload: gpt2-tiny, strategy: ddp, global_batch_size: 8, steps: 3, optimizer: {name: sgd, lr: "
        "3e-1}}\naxes: {optimizer.lr: [0.1, 1e-2], options.bucket_cap_mb: [1]}\n"
    )
    drafts = [point.make_draft() for point in load(tmp_path, text).points]
    assert [draft.optimizer.lr for draft in drafts] == [0.1, 0.01]
    assert drafts[0].options == {"bucket_cap_mb": 1}


def table(more):
    """The key `tables` with a table of one column."""
    return f"tables: [{{where: a, title: b, columns: [c], {more}}}]"


def claim(test):
    return f'claims: [{{id: a, says: b, where: c, test: "{test}"}}]'


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("axes: {gpu: [1]}", "3:8: axes.gpu", "Did you mean 'gpus'?"),
        ("axes: {gpus: []}", "3:14: axes.gpus", "found an empty list"),
        ("axes: {gpus: 2}", "3:14: axes.gpus", "found the number 2"),
        ("axes: {gpus: [0]}", "3:15: axes.gpus[0]", ">= 1"),
        ("axes: {gpus: ['2']}", "3:15: axes.gpus[0]", "found the text '2'"),
        (
            "axes: {precision: [fp8]}",
            "3:20: axes.precision[0]",
            "Allowed: fp32, tf32, bf16, bf16-autocast, fp16, fp16-autocast, bf16-pure.",
        ),
        ("axes: {gpus: [1]}\nzip: [{gpus: [1]}]", "4:14: zip[0].gpus", "already has a list at axes.gpus"),
        ("zip: [{gpus: [1, 2], seed: [1]}]", "3:7: zip[0]", "gpus: 2, seed: 1"),
        ("exclude: [{gpus: 2}]", "3:11: exclude[0]", "the key 'why' is missing"),
        ("exclude: [{why: because}]", "3:11: exclude[0]", "without any cell key"),
        ("exclude: [{when: 'nodes > 1', why: x}]", "3:18: exclude[0].when", "unknown name 'nodes'"),
        ("exclude: [{when: 'import os', why: x}]", "3:18: exclude[0].when", "is not an expression"),
        ("defaults: {optimizer: {name: sgd, lr: fast}}", "3:39: defaults.optimizer.lr", "found the text 'fast'"),
        ("defaults: {optimizer: {lr: 0.1}}", "3:23: defaults.optimizer", "the key 'name' is missing"),
        ("defaults: {options: {a: [1]}}", "3:25: defaults.options.a", "found a list"),
        ("defaults: {steps: true}", "3:19: defaults.steps", "found the truth value true"),
        ("claims: [{id: a, says: b, where: c, test: 'x = 1'}]", "3:43: claims[0].test", "is not an expression"),
        ("claims: [{id: a, says: b, where: c, test: 'final_loss(gpu=1) > 1'}]", "3:43: claims[0].test", "Did you mean 'gpus'?"),
        ("reported: [{where: a, metric: final_loss, printed: '1', cell: {gpu: 1}}]", "3:64: reported[0].cell.gpu", "'gpus'?"),
        ("reported: [{where: a, metric: final_loss, printed: '1', kind: said}]", "3:63: reported[0].kind", "measured"),
        (claim("throughput_per_sec(strategy='ddp') > 1"), "3:43: claims[0].test", "Did you mean 'throughput_per_s'?"),
        (claim("throughput_per_s > 1"), "3:43: claims[0].test", "is not a number"),
        (claim("1 > 0"), "3:43: claims[0].test", "names no metric"),
        (claim("time_to_accuracy_s(strategy='ddp') < 9"), "3:43: claims[0].test", "needs accuracy_pct"),
        (claim("final_loss(of='x') < 9"), "3:43: claims[0].test", "final_loss has no argument 'of'"),
        ("reported: [{where: a, metric: final_los, printed: '1'}]", "3:31: reported[0].metric", "Did you mean 'final_loss'?"),
        ("assumed: [{key: epoch, value: 1, why: x}]", "3:17: assumed[0].key", "Did you mean 'epochs'?"),
        ("assumed: [{key: epochs, value: many, why: x}]", "3:32: assumed[0].value", "found the text 'many'"),
        (table("rows: [{texts: [x, z]}]"), "3:60: tables[0].rows[0].texts", "found 2 texts. Allowed: 1"),
        (table("rows: [{texts: [x], cell: {gpu: 1}}]"), "3:72: tables[0].rows[0].cell.gpu", "Did you mean 'gpus'?"),
        (table("rows: [], measured: [final_los]"), "3:66: tables[0].measured[0]", "Did you mean 'final_loss'?"),
        (table("rows: [], measured: [operator_ms]"), "3:66: tables[0].measured[0]", "metric without an argument"),
        ("repeats: 0", "3:10: repeats", ">= 1"),
        ("name: again", "3:1: name", "found this key twice"),
        ("axes: {a: [1]}\nb: 2", "4:1: b", "Allowed here"),
    ],
)
def test_a_wrong_matrix_is_refused_with_its_place(tmp_path, text, place, words):
    with pytest.raises(InputError) as caught:
        load(tmp_path, text + "\n")
    message = str(caught.value)
    assert any(line.startswith(f"{tmp_path}/m.yaml:{place}: ") and words in line for line in message.splitlines()), message


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("axes: {strategy: [ddp, dpp]}", "4:24: axes.strategy[1]", "Did you mean 'ddp'?"),
        ("axes: {workload: [gpt3]}", "4:19: axes.workload[0]", "Did you mean 'gpt2'? Allowed: convnext-large, "),
        ("axes: {launcher: [qsub]}", "4:19: axes.launcher[0]", "unknown launcher 'qsub'. Allowed: deepspeed, fork, "),
        ("axes: {gpus: [3]}", "3:67: defaults.global_batch_size", "8 cannot be divided among 3 data-parallel ranks"),
        (
            "axes: {gpus: [2], micro_batch_size: [3]}",
            "4:38: axes.micro_batch_size[0]",
            "3 does not divide a rank's batch: 4 items, the global batch of 8 divided among 2 data-parallel ranks",
        ),
        ("axes: {strategy: [single], gpus: [2]}", "4:19: axes.strategy[0]", "one"),
        (
            "axes: {strategy: [ddp, fsdp2], options.bucket_cap_mb: [50]}",
            "4:56: axes.options.bucket_cap_mb[0]",
            "to give it only to cells of ddp, write include: [{when: \"strategy == 'ddp'\", options: {bucket_cap_mb: ...}}].",
        ),
        ("axes: {options.colour: [red]}", "4:25: axes.options.colour[0]", "unknown option of ddp or gpt2-tiny 'colour'"),
        (
            "axes: {options.bucket_cap_mb: [big]}",
            "4:32: axes.options.bucket_cap_mb[0]",
            "found big. Allowed: a whole number from 1 to",
        ),
        ("axes: {options.bucket_cap_mb: [null]}", "4:32: axes.options.bucket_cap_mb[0]", "found null. Allowed: a whole number"),
        ("axes: {options.n_head: [4, 5]}", "4:28: axes.options.n_head[1]", "n_head: 5 does not divide the width of 64"),
        ("axes: {options: [{n_embd: 62}]}", "4:27: axes.options[0].n_embd", "n_head: 4 does not divide the width of 62"),
        (
            "axes: {workload: [resnet50-tiny]}\ninclude: [{options: {image_size: 16}}]",
            "5:34: include[0].options.image_size",
            "found 16. Allowed: a whole number from 32.",
        ),
        ("axes: {gpus: [1, 2]}\n" + claim("final_loss(strategy='dpp') < 9"), "5:43: claims[0].test", "Did you mean ddp?"),
        (
            f"axes: {{gpus: [1, 2]}}\n{claim('final_loss(gpus=4) < final_loss(gpus=2)')}",
            "5:43: claims[0].test",
            "final_loss: no cell of this matrix has gpus 4. Its cells have: 1, 2.",
        ),
        (
            f"zip: [{{gpus: [1, 2], seed: [1, 2]}}]\n{claim('final_loss(gpus=1, seed=2) < 9')}",
            "5:43: claims[0].test",
            "no cell of this matrix has all of these values: gpus 1, seed 2.",
        ),
        ("axes: {workload: [vit-tiny], seq_len: [8]}", "4:40: axes.seq_len[0]", "has no sequences"),
        (
            "axes: {strategy: [ddp-powersgd], precision: [fp16]}",
            "4:46: axes.precision[0]",
            "cannot honour fp16: the compression error",
        ),
        ("axes: {time_limit: ['5 minutes']}", "4:21: axes.time_limit[0]", '"HH:MM:SS"'),
        (
            "axes: {instruments.profile: [{first_step: 9}]}",
            "4:30: axes.instruments.profile[0]",
            "found steps 9 to 10, but the last timed step is",
        ),
        (
            "axes: {instruments.profile: [{ranks: [1]}]}",
            "4:30: axes.instruments.profile[0]",
            "found [1]. Allowed: one or more of 0",
        ),
        ("axes: {launcher: [fork], instruments.memory: [snapshot]}", "4:47: axes.instruments.memory[0]", "CPU have none"),
        ("axes: {seed: [1, 1]}", "4:18: axes.seed[1]", "cells 1 and 2 are the same run"),
    ],
)
def test_a_cell_that_its_strategy_refuses_is_refused_with_its_place(tmp_path, text, place, words):
    """Cells that cannot be trained are refused; the error has the line, the column and the key in the file."""
    found = load(tmp_path, BASE + text + "\n")
    with pytest.raises(InputError) as caught:
        resolve_cells(found)
    message = str(caught.value)
    assert any(line.startswith(f"{tmp_path}/m.yaml:{place}: ") and words in line for line in message.splitlines()), message


def test_more_ranks_than_gpus_are_refused_where_there_are_gpus(tmp_path):
    found = load(tmp_path, BASE + "axes: {gpus: [4]}\n")
    cells = resolve_cells(found)
    assert find_misfits(found, cells, CPU, cells) == []
    (misfit,) = find_misfits(found, cells, Capacity(most_nodes=1, gpus_per_node=2), cells)
    assert misfit.why == "needs 4 GPUs, the cluster has 2 per node."


def test_more_nodes_than_the_cluster_has_are_a_misfit(tmp_path):
    found = load(tmp_path, BASE + "axes: {nnodes: [2], gpus: [2]}\n")
    cells = resolve_cells(found)
    assert find_misfits(found, cells, Capacity(most_nodes=2, gpus_per_node=2), cells) == []
    (misfit,) = find_misfits(found, cells, CPU, cells)
    assert misfit.why == "needs 2 nodes, the cluster has 1."


def test_defaults_of_workload_and_options_are_written_out(tmp_path):
    (cell,) = resolve_cells(load(tmp_path, BASE + "axes: {gpus: [2]}\n"))
    assert cell.optimizer.lr > 0
    assert cell.seq_len == 64
    assert cell.options["bucket_cap_mb"] == 25
    assert cell.micro_batch_size == 4


def test_a_matrix_of_more_than_100000_combinations_is_refused(tmp_path):
    """A matrix with more than 100,000 combinations is refused."""
    many = "[" + ", ".join(str(n) for n in range(1001)) + "]"
    with pytest.raises(InputError, match="Allowed: 100000 or fewer"):
        load(tmp_path, BASE + f"axes: {{seed: {many}, options.a: {many.replace('1000', '1')}}}\n")


def test_a_matrix_without_cells_is_refused(tmp_path):
    """A matrix is refused if `exclude` removes all of its cells."""
    with pytest.raises(InputError, match="no cell is left"):
        load(tmp_path, BASE + "axes: {gpus: [1]}\nexclude: [{gpus: 1, why: x}]\n")


@pytest.mark.parametrize(
    ("name", "meant"), [("FSDP", "fsdp2"), ("ZeRO-3", "zero3"), ("zero-3", "zero3"), ("Zero3", "zero3"), ("DDP", "ddp")]
)
def test_a_strategy_in_the_spelling_of_a_paper_gets_the_name_of_a_matrix(name, meant):
    with pytest.raises(UnknownName, match=f"Did you mean {meant!r}"):
        menu.find_strategy(name)


def test_an_unknown_matrix_prints_the_menu():
    with pytest.raises(UnknownName, match="Did you mean 'quickstart'"):
        matrix.find_matrix_file("quickstrat")


def test_every_shipped_matrix_resolves():
    for path in matrix.find_shipped_matrices().values():
        assert resolve_cells(matrix.load_matrix(path))


def test_a_claim_on_an_excluded_or_unselected_cell_is_accepted(tmp_path):
    excluded = "axes: {gpus: [1, 2, 4]}\nexclude: [{gpus: 4, why: there are two}]\n"
    found = load(tmp_path, BASE + excluded + claim("final_loss(gpus=4) < final_loss(gpus=2)") + "\n")
    assert [cell.gpus for cell in resolve_cells(found)] == [1, 2]
    chosen = plan.plan_matrix(Workspace(tmp_path), f"{tmp_path}/m.yaml", THIS_MACHINE, where="gpus == 1", repeats=None)
    assert [cell.gpus for cell in chosen.cells] == [1]


def test_a_twin_that_cannot_be_trained_is_refused_when_the_file_is_read(tmp_path):
    """The full model has 12 attention heads, which can be split over 3 ranks. The tiny twin (the small model that replaces it
    at --scale tiny) has 4 heads, which cannot be split over 3 ranks."""
    base = BASE.replace("gpt2-tiny", "gpt2").replace("strategy: ddp", "strategy: tp, tp: 3, gpus: 3")
    load(tmp_path, base)

    def planned(scale):
        file = f"{tmp_path}/m.yaml"
        return plan.plan_matrix(Workspace(tmp_path), file, THIS_MACHINE, where=None, repeats=None, scale=scale)

    assert len(planned("full").cells) == 1
    with pytest.raises(InputError, match=r"--scale tiny: the twin of tp-gpt2-.* cannot be trained: .*Allowed tp: 1, 2, 4\."):
        planned("tiny")


@pytest.mark.parametrize(
    "settings", [["steps=5"], ["nnodes=null"], ["epochs=2"], ['optimizer={"name": "sgd", "lr": 0.5}', "env={A: '1=2'}"]]
)
def test_the_values_of_set_are_found_again_in_the_deviations(tmp_path, settings):
    (tmp_path / "m.yaml").write_text(HEAD + BASE.replace("steps: 3", "steps: 3, optimizer.lr: 0.1"))
    first = matrix.load_matrix(tmp_path / "m.yaml", settings)
    again = matrix.load_matrix(tmp_path / "m.yaml", overrides.list_settings(first.file.deviations))
    assert again.points == first.points
    assert first.points != matrix.load_matrix(tmp_path / "m.yaml").points
