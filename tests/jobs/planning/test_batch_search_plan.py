"""A search for a batch size in a matrix file: which other keys the file may have, and at which size each search starts."""

import json
from pathlib import Path

import msgspec
import pytest
from support_search import MATRIX

from jobs.planning import plan
from jobs.rendering import render, sbatch_options
from jobs.rendering.render import CLUSTER_FILE
from jobs.submission.lease_schedule import estimate_time_left
from shardlab.cluster import cluster
from shardlab.cluster.cluster import THIS_MACHINE, Cluster
from shardlab.errors import InputError
from shardlab.matrix import batch_search, matrix
from shardlab.workspace.workspace import Workspace

SWEEP = Path(__file__).parents[3] / "examples" / "batch-sweep.yaml"
SITE = """\
schema: 1
name: site
provider: virtual
nodes: [{name: head, roles: [controller]}, {name: work1}]
slurm: {time: "00:10:00", max_time: MAX}
"""
GPUS = """\
schema: 1
name: site
provider: ssh
nodes: [{name: gpu0, host: 127.0.0.1, roles: [controller, worker]}]
gpus: {type: TYPE, per_node: 2, memory_gib: GIB}
storage: {shared: /scratch/a}
slurm: {}
"""


def written(folder, text, name="m.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def planned(folder, text, where=THIS_MACHINE, **options):
    given = {"where": None, "repeats": None} | options
    return plan.plan_matrix(Workspace(folder), str(written(folder, text)), where, **given)


def searches(found):
    return [found.context.find_search(cell) for cell in found.cells]


BASE = MATRIX.replace("GOAL", "largest_that_fits")


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        (BASE + "axes: {gpu_batch_size: [1, 2]}\n", "5:8: axes.gpu_batch_size", "is searched (`search`)"),
        (BASE + "include: [{global_batch_size: 2}]\n", "include[0].global_batch_size", "follows from gpu_batch_size"),
        (BASE + "axes: {micro_batch_size: [1]}\n", "axes.micro_batch_size", "Allowed: microbatches"),
        (BASE + "zip: [{epochs: [1]}]\n", "zip[0].epochs", "Allowed: steps."),
        (BASE + "repeats: {claims: 3}\n", "repeats", "how often each search is run"),
        (BASE + "claims: [{id: a, says: b, where: c, test: 'final_loss(gpus=1) < 4'}]\n", "claims", "leave claims out"),
        (BASE.replace("at_most: 8", "atmost: 8"), "search.atmost", "Did you mean 'at_most'?"),
        (BASE.replace("at_most: 8", "at_most: 0"), "search.at_most", ">= 1"),
        (BASE.replace("largest_that_fits", "biggest"), "search.for", "Allowed: largest_that_fits, fastest."),
        (BASE.replace("key: gpu_batch_size", "key: seq_len"), "search.key", "Allowed: gpu_batch_size."),
    ],
)
def test_a_batch_search_refuses_keys_that_contradict_it(tmp_path, text, place, words):
    """A matrix that searches a batch size may not have keys that contradict the search. The error names the wrong key."""
    with pytest.raises(InputError) as caught:
        matrix.load_matrix(written(tmp_path, text))
    assert place in str(caught.value)
    assert words in str(caught.value)


def test_without_a_prediction_a_search_needs_a_bound(tmp_path):
    with pytest.raises(InputError, match=r"4:9: search: found no at_most, .* Allowed: at_most"):
        planned(tmp_path, BASE.replace(", at_most: 8", ""))


def test_a_bound_below_the_passes_of_a_step_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"search.at_most: found 8. Allowed for ddp with 16 pass\(es\): 16 or more."):
        planned(tmp_path, BASE.replace("steps: 1", "steps: 1, microbatches: 16"))


def test_every_size_has_the_same_number_of_passes(tmp_path):
    found = planned(tmp_path, BASE.replace("steps: 1", "steps: 1, microbatches: 2"))
    (search,), (cell,) = searches(found), found.cells
    assert (search.start, search.smallest, search.largest, search.unit) == (2, 2, 8, 2)
    assert (cell.gpu_batch_size, cell.gradient_accumulation_steps, cell.expect) == (2, 2, ["oom"])


@pytest.mark.parametrize(("gpu", "gib"), [("h100", 80), ("a100", 40)])
def test_the_planner_gives_the_start_and_the_bound(tmp_path, gpu, gib):
    where = cluster.load_cluster(written(tmp_path, GPUS.replace("TYPE", gpu).replace("GIB", str(gib)), "c.yaml"))
    found = planned(tmp_path, SWEEP.read_text(), where)
    (search,), (cell,) = searches(found), found.cells
    likely = found.predictions[cell.name()].largest_micro_batch
    assert likely is not None
    assert search.start <= likely < 2 * search.start
    assert search.start & (search.start - 1) == 0
    assert search.largest == 16 * likely
    assert cell.gpu_batch_size == search.start


def test_the_gpu_hours_of_a_search_are_those_of_its_most_tries(tmp_path):
    where = cluster.load_cluster(written(tmp_path, GPUS.replace("TYPE", "h100").replace("GIB", "80"), "c.yaml"))
    found = planned(
        tmp_path, SWEEP.read_text().replace("steps: 10", 'steps: 10, time_limit: "01:00:00"'.replace(", ", "\n  ")), where
    )
    (search,), (cell,) = searches(found), found.cells
    name = found.find_planned_name(batch_search.try_cell(cell, 5))
    assert name == cell.name()
    (hours,) = plan.estimate_hours(found, {name: 2})
    assert hours.total_gpu_hours == 2 * search.most_tries * 1.0 * 2  # 2 repeats x tries x 1 hour x 2 GPUs


def test_a_batch_that_the_workload_refuses_is_never_tried(tmp_path):
    small = "workload: vgg16, strategy: single, gpus: 1, steps: 1, options: {data: synthetic, image_size: 32}"
    text = f"schema: 1\nname: m\ndefaults: {{{small}}}\nsearch: {{key: gpu_batch_size, for: fastest, at_most: 8}}\n"
    densenet = planned(tmp_path, text.replace("vgg16", "densenet121"))
    assert searches(densenet)[0].smallest == 2
    assert searches(planned(tmp_path, text))[0].smallest == 1


def test_at_scale_tiny_a_search_stays_small(tmp_path):
    (search,) = searches(planned(tmp_path, SWEEP.read_text(), scale="tiny"))
    assert (search.start, search.largest) == (1, 8)


def test_a_search_that_was_submitted_keeps_its_start(tmp_path):
    found = planned(tmp_path, BASE)
    (search,), (cell,) = searches(found), found.cells
    earlier = msgspec.structs.replace(search, start=4)
    source = msgspec.structs.replace(found.context, search_by_family={batch_search.compute_search_hash(cell): earlier})
    first = [batch_search.try_cell(cell, 4)]
    render.store_expansion(Workspace(tmp_path), source, found.matrix, first, {first[0].name(): 1})
    assert searches(planned(tmp_path, BASE)) == [earlier]
    assert searches(planned(tmp_path, BASE.replace("at_most: 8", "at_most: 2")))[0].start == 1


@pytest.mark.parametrize(("longest", "minutes"), [("1-00:00:00", 78), ("00:30:00", 30)])
def test_the_job_of_a_search_has_time_for_all_its_tries(tmp_path, longest, minutes):
    where = cluster.load_cluster(written(tmp_path, SITE.replace("MAX", f'"{longest}"'), "c.yaml"))
    found = planned(tmp_path, BASE, where)
    run = render.make_run(found.cells[0], 1, 1, found.context)
    assert f"--time={minutes}" in sbatch_options.list_sbatch_options(run, where)
    predicted = found.predictions[found.cells[0].name()]
    assert predicted.time_s is None or predicted.time_s.high < 600
    assert estimate_time_left(run, {run.cell.name(): 1.0}, predicted) == (6 * 600, " (by time limits)")


def test_the_run_of_a_try_stores_the_input_of_the_next_try(tmp_path):
    where = cluster.load_cluster(written(tmp_path, SITE.replace("MAX", '"1-00:00:00"'), "c.yaml"))
    found = planned(tmp_path, BASE, where)
    run = render.make_run(found.cells[0], 1, 1, found.context)
    folder = render.write_run_folder(run, Workspace(tmp_path).runs, found.context)
    assert msgspec.json.decode((folder.path / CLUSTER_FILE).read_bytes(), type=Cluster) == where
    assert json.loads(folder.run_json.read_bytes())["search"]["start"] == 1
