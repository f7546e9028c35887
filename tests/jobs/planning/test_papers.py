"""The matrix files of the five shipped studies contain every cell that the study ran, every number that it reports and every
claim about these cells."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support_e2e import HANG_S

from jobs.planner import memory
from jobs.planning import tiny_twin
from jobs.planning.resolve import resolve_cells
from shardlab.errors import InputError
from shardlab.matrix import matrix
from shardlab.matrix.cell_names import METRIC_ARGUMENTS, matches_cell
from shardlab.matrix.expression import Expression
from shardlab.workspace.workspace import Workspace
from trainers import menu

STUDIES = Path(__file__).parents[3] / "examples/studies"
# How many cells each study has, counted by hand from the papers:
# paper1: 7 strategies x (1 and 2 GPUs with one batch size, 4 and 8 GPUs with three) = 56, minus hybrid sharding on 1 and 2
# GPUs; plus 8 cells: one process, FSDP of single blocks, activation checkpointing, gradient accumulation, a pipeline, and 3 in
# bf16.
# paper2: (3 distributed strategies + the FSDP2 forms of 2 of them + the baseline) x (training, traces) = 12; 6 batch sizes of 2
# models; 2 measurements of memory; 2 strategies on 4 and 8 GPUs, whose speed the study predicts without running them; 4 forms
# of hybrid sharding, which it describes; NO_SHARD with and without no_sync.
# paper3: (2 strategies + 3 parameter servers) x 3 networks x 1, 2, 4 GPUs.
# paper4: ResNet-50: 4 cells; GPT-2: 4 with DDP, 1 with TP, 16 with pipelines, 1 with 1F1B; a model of 1.3 B parameters: 12; a
# model of 7 B parameters: 5; one of 65 B: 2.
# paper5: (the baseline on one GPU + 2 systems x 2 and 4 GPUs) x (run time, memory); memory of 2 more stages of ZeRO,
# and parameter averaging, on 2 and 4 GPUs.
CELLS = {
    "paper1": 56 - 2 + 8,
    "paper2": 12 + 6 * 2 + 2 + 4 + 4 + 2,
    "paper3": 5 * 3 * 3,
    "paper4": 4 + (4 + 1 + 16 + 1) + 12 + 5 + 2,
    "paper5": 5 * 2 + 4 + 2,
}


@pytest.fixture(scope="module", params=CELLS)
def study(request):
    found = matrix.load_matrix(matrix.find_matrix_file(request.param))
    return found, resolve_cells(found)


def plain(cells):
    return [msgspec.to_builtins(cell) for cell in cells]


def test_a_study_has_every_cell_that_it_ran(study):
    found, cells = study
    assert len(cells) == CELLS[found.name]
    assert len({cell.hash() for cell in cells}) == len(cells)
    assert len({cell.name() for cell in cells}) == len(cells)


def test_every_reported_number_belongs_to_one_cell_or_a_cell_marked_not_run(study):
    found, cells = study
    for one in found.file.reported:
        of = sum(matches_cell(cell, one.cell) for cell in plain(cells))
        of += sum(all(gone.cell.get(key) == value for key, value in one.cell.items()) for gone in found.excluded)
        assert of == 1, one
        assert not one.against or sum(matches_cell(cell, one.against) for cell in plain(cells)) == 1, one
        assert any(letter.isdigit() for letter in one.printed) or one.metric == "state", one


def test_every_row_of_a_table_of_text_selects_cells_of_the_study(study):
    found, cells = study
    for table in found.file.tables:
        for row in table.rows:
            of = sum(matches_cell(cell, row.cell) for cell in plain(cells)) if row.cell else 0
            assert of == 1 or (of and table.choice and not table.measured) or not row.cell, (table.where, row.texts)


def test_every_call_of_every_claim_is_of_one_cell(study):
    found, cells = study
    assert len({claim.id for claim in found.file.claims}) == len(found.file.claims)
    for claim in found.file.claims:
        for metric, given in Expression(claim.test).call_arguments:
            wanted = {key: value for key, value in given.items() if key not in METRIC_ARGUMENTS}
            assert sum(matches_cell(cell, wanted) for cell in plain(cells)) == 1, (claim.id, metric, wanted)


def test_every_claim_of_a_study_with_a_text_has_a_quote(study):
    found, _ = study
    assert not found.file.text_sha256 or [claim.id for claim in found.file.claims if not claim.quote] == []


def test_the_quotes_of_claims_stand_in_the_text_of_the_study(study):
    found, _ = study
    path = Path(os.environ.get("SHARDLAB_STUDY_TEXTS", "/nonexistent"), f"{found.name}.txt")
    if not path.exists() or not found.file.text_sha256:
        pytest.skip(f"SHARDLAB_STUDY_TEXTS: no text of {found.name}")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == found.file.text_sha256
    text = in_plain_words(path.read_text())
    for claim in found.file.claims:
        start = 0
        for part in claim.quote.split(" ... "):
            start = text.find(in_plain_words(part), start)
            assert start >= 0, (claim.id, part)


def in_plain_words(text):
    """A text without marks of Markdown and LaTeX, in one line."""
    return " ".join(re.sub(r"[*$\\]", "", text.replace(r"\times", "×")).split())


def test_every_claim_gives_a_truth_value(study):
    found, _ = study

    def one_for_all(**_wanted):
        return 1.0

    for claim in found.file.claims:
        calls = {name: one_for_all if name != "state" else lambda **_wanted: "oom" for name in Expression(claim.test).calls}
        assert Expression(claim.test).evaluate({}, calls) in (True, False), claim.id


def test_every_workload_of_a_study_has_a_twin(study):
    _, cells = study
    assert all(f"{cell.workload}-tiny" in menu.load_workloads() for cell in cells)


@pytest.mark.parametrize(
    ("name", "printed", "computed"),
    [
        ("paper2", "5,836 tokens/s", 20 * 32 * 1024 / 112.3),
        ("paper2", "650,000,000", 774_439_808 - 124_439_808),
        ("paper3", "35.6%", 100 * (1 - 351.62 / 545.61)),
        ("paper3", "18.7 points", 96.9 - 78.2),
        ("paper3", "82.6%", 100 * (250.84 / 137.34 - 1)),
        ("paper4", "15.8%", 100 * 3 / (16 + 3)),
        ("paper5", "0.7 GB", 44_549_160 * 16 / 1e9),
        ("paper5", "1.5 times", 1 / 4 + 1 + 1 / 4),
    ],
)
def test_notes_of_a_study_have_the_recomputed_numbers(name, printed, computed):
    """Numbers that the notes of a study contain equal our own computation."""
    notes = " ".join(note.says for note in matrix.load_matrix(matrix.find_matrix_file(name)).file.notes)
    assert printed in notes
    number = printed.split()[0].replace(",", "").rstrip("%")
    decimals = len(number.partition(".")[2])
    assert float(number) == round(computed, decimals)


@pytest.mark.parametrize(("where", "billions"), [("figure 4", 7.5), ("DeepSpeed background", 1.5)])
def test_memory_that_study_5_explains_is_its_formula_times_the_parameters(where, billions):
    tables = matrix.load_matrix(matrix.find_matrix_file("paper5")).file.tables
    rows = [row.texts for table in tables if table.where == where for row in table.rows]
    computed = [(texts[0], Expression(texts[1]).evaluate({}) * billions, float(texts[2])) for texts in rows if texts[1]]
    assert len(computed) >= 4
    assert all(round(size, 1) == printed for _, size, printed in computed), computed


# The tests below use --scale tiny.


def test_tiny_twins_have_distinct_hashes_and_record_the_cell_that_they_rehearse(study):
    """Each tiny twin has a hash and a name of its own and records the cell that it rehearses."""
    _, cells = study
    twins = tiny_twin.make_twins(cells, menu.load_workloads())
    assert [twin.rehearses for twin in twins] == cells
    assert len({twin.hash() for twin in twins} | {cell.hash() for cell in cells}) == 2 * len(cells)
    assert len({twin.name() for twin in twins}) == len(cells)


def test_twins_have_the_ranks_and_passes_of_their_cells_and_little_work(study):
    _, cells = study
    strategies = menu.load_strategies()
    for twin in tiny_twin.make_twins(cells, menu.load_workloads()):
        cell = twin.rehearses
        for key in (
            "strategy",
            "gpus",
            "dp",
            "tp",
            "pp",
            "servers",
            "gradient_accumulation_steps",
            "precision",
            "seed",
            "expect",
        ):
            assert getattr(twin, key) == getattr(cell, key)
        assert twin.workload == f"{cell.workload}-tiny"
        assert twin.options["data"] == "synthetic"
        assert twin.global_batch_size == twin.micro_batch_size * twin.gradient_accumulation_steps * twin.dp
        assert (twin.steps or 0) <= tiny_twin.MOST_STEPS
        assert (twin.epochs or 0) <= tiny_twin.MOST_EPOCHS
        assert twin.nnodes == 1
        assert strategies[twin.strategy].refuse(twin) is None


def test_one_twin_of_a_study_goes_through_torchrun(study):
    _, cells = study
    twins = tiny_twin.make_twins(cells, menu.load_workloads())
    launched = [twin for twin in twins if twin.launcher == "torchrun"]
    assert [twin.world_size for twin in launched] == [2]
    assert {twin.launcher for twin in twins} == {"fork", "torchrun"}


def test_all_twins_of_a_workload_scale_batches_by_the_same_factor(study):
    """All twins of a workload have batches that are smaller by the same factor."""
    _, cells = study
    by_workload = {}
    for twin in tiny_twin.make_twins(cells, menu.load_workloads()):
        ratio = twin.rehearses.global_batch_size / twin.global_batch_size
        assert by_workload.setdefault(twin.workload, ratio) == ratio
        assert twin.rehearses.micro_batch_size / twin.micro_batch_size == ratio


MATRIX = """\
schema: 1
name: m
defaults: {workload: vgg16, strategy: ddp, global_batch_size: 24, epochs: 9, warmup_steps: 7, optimizer: {name: sgd, lr: 0.1}}
"""


def twins_of(folder, text):
    path = folder / "m.yaml"
    path.write_text(MATRIX + text)
    cells = resolve_cells(matrix.load_matrix(path))
    return tiny_twin.make_twins(cells, menu.load_workloads()), tiny_twin.describe_dropped_settings(cells)


def test_cells_that_scaling_makes_equal_stay_two(tmp_path):
    """Two cells whose tiny twins have equal keys still have different hashes."""
    (one, other), _ = twins_of(tmp_path, "axes: {options.image_size: [64, 224]}\n")
    assert msgspec.structs.replace(one, rehearses=None) == msgspec.structs.replace(other, rehearses=None)
    assert one.hash() != other.hash()


def test_an_epoch_is_the_same_images_for_every_cell(tmp_path):
    twins, _ = twins_of(tmp_path, "axes: {global_batch_size: [24, 36]}\n")
    assert [(twin.global_batch_size, twin.micro_batch_size, twin.options["subset"]) for twin in twins] == [
        (2, 2, 12),
        (3, 3, 12),
    ]
    assert [(twin.epochs, twin.warmup_steps) for twin in twins] == [(2, 1), (2, 1)]


def test_buckets_of_a_twin_hold_the_same_share_of_its_model(tmp_path):
    """VGG-16 has 138,357,544 parameters, its tiny twin 163,054."""
    text = "axes: {strategy: [zero2], gpus: [2], options.reduce_bucket_size: [500000000, 13835754, 10]}\n"
    text += "include: [{options.allgather_bucket_size: 500000000}]\n"
    twins, _ = twins_of(tmp_path, text)
    sizes = [(twin.options["reduce_bucket_size"], twin.options["allgather_bucket_size"]) for twin in twins]
    whole = menu.find_workload("vgg16-tiny").parameters
    assert (menu.find_workload("vgg16").parameters, whole) == (138_357_544, 163_054)
    assert sizes == [(whole, whole), (16_304, whole), (2, whole)]
    assert [memory.predict_memory(twin, on_gpu=False).total_bytes.likely < 10e6 for twin in twins] == [True] * 3


def test_a_pipeline_has_blocks_for_its_stages(tmp_path):
    text = "axes: {workload: [gpt2], strategy: [pp-gpipe], gpus: [8], pp: [8], global_batch_size: [24], microbatches: [12]}\n"
    (twin,), _ = twins_of(tmp_path, text)
    assert (twin.options["n_layer"], twin.gradient_accumulation_steps, twin.micro_batch_size) == (8, 12, 2)
    assert (twin.steps, twin.epochs) == (6, None)


def test_keys_that_need_a_gpu_are_removed_from_twins_with_a_message(tmp_path):
    """At --scale tiny, keys that need a GPU are removed, and a message names each."""
    text = "axes: {compile: [true]}\ninclude: [{instruments: {memory: snapshot}, memory_limit_gib: 4, nnodes: 1}]\n"
    (twin,), said = twins_of(tmp_path, text)
    assert (twin.instruments.memory, twin.compile, twin.memory_limit_gib) == ("peak", False, None)
    assert [line.split(":")[0] for line in said] == [
        "scale tiny leaves out memory",
        "scale tiny leaves out compile of 1 cell(s)",
        "scale tiny leaves out memory_limit_gib of 1 cell(s)",
    ]


def test_windows_of_instruments_fit_into_the_steps(tmp_path):
    text = (
        "include: [{instruments: {memory: categories, profile: {first_step: 40, steps: 9}, validation: "
        "{every_epochs: 5}, checkpoints: {every_steps: 100}}}]\n"
    )
    (twin,), _ = twins_of(tmp_path, text)
    asked = twin.instruments
    assert (asked.profile.first_step, asked.profile.steps) == (3, 2)
    assert (asked.validation.every_epochs, asked.validation.items, asked.checkpoints.every_steps) == (1, 8, 2)


def test_a_validation_is_of_one_batch_of_every_cell_and_not_of_many(tmp_path):
    """All tiny twins of a matrix validate on the same few images, whose number is a multiple of the batch of each twin."""
    text = "axes: {{global_batch_size: {sizes}}}\ninclude: [{{instruments: {{validation: {{every_epochs: 1}}}}}}]\n"
    for sizes, images, items in (([26, 104], 32, 32), ([26, 26 * 16], 128, 64), ([26, 26 * 64], 512, 128)):
        for twin in twins_of(tmp_path, text.format(sizes=sizes))[0]:
            assert (twin.options["subset"], twin.instruments.validation.items) == (images, items)
            assert twin.instruments.validation.items % twin.global_batch_size == 0


def test_a_workload_without_a_twin_is_refused(tmp_path):
    (tmp_path / "m.yaml").write_text(MATRIX)
    cells = resolve_cells(matrix.load_matrix(tmp_path / "m.yaml"))
    with pytest.raises(InputError, match="vgg16 has no tiny twin"):
        tiny_twin.make_twins(cells, {})


def jobs(*words, code=0):
    done = subprocess.run([sys.executable, "-m", "jobs", *words], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_a_plan_prints_each_cell_and_the_cells_without_enough_nodes(study, tmp_path):
    found, cells = study
    planned = jobs("plan", "--matrix", found.name, "--workspace", str(tmp_path)).stdout
    assert all(cell.name() in planned for cell in cells)
    assert planned.count("\nexcluded: ") == len(found.excluded)
    many = sum(cell.nnodes > 1 for cell in cells)
    assert ("not on this cluster" in planned) == bool(many)
    assert not many or f"not on this cluster: {many} cell(s): needs 2 nodes, the cluster has 1." in planned


@pytest.mark.parametrize(
    ("cluster", "where"),
    [
        ("paper1", "gpus > 0"),
        ("paper2", "gpus <= 2"),
        ("paper4", "gpus > 0"),
        ("paper3-experiment1", "strategy in ['ddp', 'fsdp1-full-shard']"),
        ("paper3-experiment2", "strategy in ['ps-sync', 'ps-async', 'ps-ssp']"),
        ("paper5", "gpus > 0"),
    ],
)
def test_no_cell_of_a_study_is_left_out_on_the_hardware_of_the_study(cluster, where, tmp_path):
    options = ("--cluster", f"{STUDIES}/{cluster}.yaml", "--where", where, "--workspace", str(tmp_path), "--json")
    planned = json.loads(jobs("plan", "--matrix", cluster.partition("-")[0], *options).stdout)
    assert planned["cells"]
    assert not planned["misfits"]
    too_large = [cell for cell in planned["cells"] if (cell["predicted"] or {}).get("fits") in ("no", "unlikely")]
    assert [cell["id"] for cell in too_large] == [cell["id"] for cell in planned["cells"] if "oom" in cell["cell"]["expect"]]


def test_a_plan_marks_cells_that_this_machine_cannot_hold_and_submit_refuses_them(tmp_path):
    space = ("--workspace", str(tmp_path))
    planned = jobs("plan", "--matrix", "paper1", *space)
    assert "62 cell(s)" in planned.stdout
    assert "not on this cluster: 21 cell(s): needs 2 nodes, the cluster has 1." in planned.stdout
    assert "needs 2 nodes, the cluster has 1." in jobs("render", "--matrix", "paper1", *space, code=2).stderr
    assert not (tmp_path / "runs").exists()
    rendered = jobs("render", "--matrix", "paper1", "--where", "nnodes == 1 and strategy == 'zero1'", *space)
    assert "5 run(s) rendered" in rendered.stdout


def test_every_file_of_a_rehearsed_matrix_says_that_it_is_a_rehearsal(tmp_path):
    space = ("--workspace", str(tmp_path))
    rendered = jobs("render", "--matrix", "paper3", "--scale", "tiny", "--where", "workload == 'vgg16' and gpus == 2", *space)
    # The claims of the study name 5 of these cells, and each of the 5 cells runs twice.
    assert "10 run(s) rendered" in rendered.stdout
    workspace = Workspace(tmp_path)
    for folder in workspace.list_run_dirs():
        run = folder.read_run()
        assert (run.rehearsal, run.scale, run.cell.rehearses.workload) == (True, "tiny", "vgg16")
        assert "rehearsal" in (folder.path / "job.sh").read_text()
    kept = workspace.read_expansion("paper3-tiny")
    assert kept.scale == "tiny"
    assert "rehearsal" in kept.title
    assert len(kept.cells) == CELLS["paper3"]
    assert kept.reported[0].printed == "487.55"
    assert all(
        sum(matches_cell(msgspec.to_builtins(entry.cell), one.cell) for entry in kept.cells) == 1 for one in kept.reported
    )
    assert kept.claims
