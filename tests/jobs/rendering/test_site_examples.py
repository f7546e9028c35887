"""The cluster files in examples/sites of two real centres: their rendered scripts, and the centres' published rules."""

from pathlib import Path

import msgspec
import pytest
import yaml
from support_golden import run_of, same_as_golden

from jobs.rendering import render
from jobs.rendering.preview import UNKNOWN_FOLDER, Preview
from shardlab.cluster.cluster import load_cluster
from shardlab.runs.run import World

SITES = Path(__file__).parents[3] / "examples" / "sites"
SIZES = {"perlmutter": (2, 4), "perlmutter-shared": (1, 1), "jean-zay": (2, 8)}  # (nodes, ranks on each node)
RULES = [rule for file in sorted((SITES / "rules").glob("*.yaml")) for rule in yaml.safe_load(file.read_text())]


def script(name: str) -> str:
    """The script of a run at a site, as `jobs submit --dry-run -v` prints it before `provision`."""
    cluster, (nodes, ranks) = load_cluster(SITES / f"{name}.yaml"), SIZES[name]
    run, gpus = run_of("torchrun"), nodes * ranks
    cell = msgspec.structs.replace(run.cell, gpus=gpus, dp=gpus, nnodes=nodes)
    run = msgspec.structs.replace(run, scheduler="slurm", cell=cell, world=World(nodes, ranks, gpus), limit_s=600, requeues=2)
    folder = Path(str(cluster.workspaces)) / "mine-01234567"
    unknown = (f"{UNKNOWN_FOLDER} stands for the folder of the Python environment, which `provision` makes",)
    preview = Preview(folder, f"{cluster.storage.shared}/{UNKNOWN_FOLDER}/bin/python", unknown)
    return render.render_script(run, folder / "runs" / run.run_id, cluster, None, preview)


@pytest.mark.parametrize("name", SIZES)
def test_the_script_of_a_run_at_a_real_centre_is_the_golden_text(name):
    same_as_golden(f"sites/{name}.sbatch", script(name))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule['script']}: {rule['rule'][:60]}")
def test_each_published_rule_of_a_centre_is_met_by_the_script(rule):
    text = script(rule["script"])
    assert rule["source"].startswith("http")
    assert rule["met"]
    assert rule.get("has") or rule.get("lacks")
    assert [part for part in rule.get("has", []) if part not in text] == []
    assert [part for part in rule.get("lacks", []) if part in text] == []


def test_each_centre_has_its_list_of_rules():
    assert {rule["script"] for rule in RULES} == SIZES.keys()
