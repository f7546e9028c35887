"""Every default, limit and time that a page of docs/ states in words is the number that the program uses.

Pages are written by hand. A row of SENTENCES builds the words around a number from the constant, and the page must have them.
The pages of docs/reference are written from the code.
"""

import ast
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from collect.fetching import gather
from collect.loading import sample_cache
from collect.sources import snapshot
from collect.timeline import straggler
from collect.tracking import command as tracking
from collect.watch import live_page
from jobs.node import node_processes
from jobs.planner import advise, rules
from jobs.planning import batch_searches, gpu_hours
from jobs.rendering import sbatch_options
from jobs.schedulers import slurm
from jobs.submission import backlog
from provision import clock, gpu_generations
from provision.checks import network
from provision.cloudlab import creation, portal
from provision.datasets import archive, formats
from provision.facts import mounts, quotas
from provision.operations import packages
from shardlab.cloudlab import cloudlab_manifest
from shardlab.cluster import lease
from shardlab.cluster.slurm_keys import Slurm
from shardlab.files import image_files
from shardlab.matrix import cell, retry
from shardlab.runs import lease_cutoff
from trainers import workload_options
from trainers.data import imagenet, synthetic_images, token_sets
from trainers.strategy import Strategy

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WORDS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 10: "ten"}
MIB, GIB = 2**20, 2**30


def default_of(kind, key):
    """The default of a field of a msgspec.Struct."""
    (field,) = [field for field in msgspec.structs.fields(kind) if field.name == key]
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


def written(file, name):
    """The value of a name of a module that imports torch, as the source writes it; a tuple if several names are assigned."""
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.Assign) and name in ast.unparse(node.targets[0]):
            return ast.unparse(node.value)
    raise KeyError(f"{file} has no {name}")


def in_yaml(value):
    return msgspec.json.encode(value).decode().replace(",", ", ").replace('"', "")


PROFILE = ", ".join(f"{key}: {in_yaml(default_of(cell.Profile, key))}" for key in cell.Profile.__struct_fields__)
(GPU_REQUEST,) = (field.type for field in msgspec.structs.fields(Slurm) if field.name == "gpu_request")
SENTENCES = [
    ("cloudlab.md", f"of more than {cloudlab_manifest.MOST_BYTES // MIB} MiB"),
    ("cloudlab.md", f"asks again up to {WORDS[len(portal.BACKOFF_S)]} times"),
    ("cloudlab.md", f"after {portal.BACKOFF_S[0]:g} s to {portal.BACKOFF_S[-1]:g} s"),
    ("cloudlab.md", f"at most {portal.MOST_RETRY_AFTER_S / 60:g} minutes each"),
    ("cloudlab.md", f"by more than {WORDS[portal.CLOCK_TOLERANCE.seconds // 60]} minutes"),
    ("cloudlab.md", {3600.0: "waits up to an hour until all nodes are ready"}[creation.MOST_WAIT_S]),
    (
        "data.md",
        f"{synthetic_images.ITEMS_BY_SPLIT['train']:,} (or `subset`) and {synthetic_images.ITEMS_BY_SPLIT['validation']}",
    ),
    ("data.md", f"any number; {synthetic_images.CLASS_COUNT} by default"),
    ("data.md", f"{token_sets.SEQUENCE_COUNT:,} sequences of tokens below {token_sets.DEFAULT_VOCABULARY_SIZE}"),
    ("data.md", {0.1: "nine times in ten, a fixed rule"}[token_sets.RANDOM_TOKEN_PROBABILITY]),
    ("data.md", f"imagenet-train-131072-seed-{workload_options.SUBSET_SEED}.list"),
    ("data.md", f"CIFAR-10 {formats.FORMATS['cifar10'].most_bytes // MIB} MiB"),
    ("data.md", f"MNIST {formats.FORMATS['mnist'].most_bytes // MIB} MiB"),
    ("data.md", f"ImageNet {formats.FORMATS['imagenet'].most_bytes // GIB} GiB"),
    ("data.md", f"{formats.FORMATS['imagenet'].most_files:,} files"),
    ("data.md", f"headers of more than {archive.MOST_HEADER_BYTES // MIB} MiB"),
    ("data.md", f"not a multiple of {image_files.CIFAR10_RECORD_BYTES:,} bytes"),
    ("data.md", {2**27: "more than 2^27"}[imagenet.MOST_PIXELS]),
    ("data.md", {256 / 224: "size x 256 / 224"}[imagenet.MARGIN]),
    ("exports.md", f"reads the growing records every {tracking.READING_PERIOD_S:g} seconds"),
    ("exports.md", f"waits at most {node_processes.TRACKER_END_S:g} seconds"),
    ("how-to/retry-by-itself.md", f"`slurm.requeue` of the cluster file ({default_of(Slurm, 'requeue')})"),
    ("how-to/retry-by-itself.md", "the default is 0 for `oom`, `failed` and `hung`" * (
        {default_of(retry.Retry, key) for key in ("oom", "failed", "hung")} == {0})),
    ("how-to/search-a-batch-size.md", f"goes up to {batch_searches.BOUND_FACTOR} times the size"),
    ("how-to/search-a-batch-size.md", f"up to {batch_searches.LARGEST_TINY_BATCH} items a pass"),
    ("instruments.md", f"{default_of(cell.Instruments, 'memory')} (the default)"),
    ("instruments.md", f"memory_steps: {default_of(cell.Instruments, 'memory_steps')} "),
    ("instruments.md", f"profile: {{{PROFILE}}}"),
    ("instruments.md", f"telemetry_hz: {cell.TELEMETRY_HZ:g} "),
    ("instruments.md", f"per second and node, {cell.SLOWEST_HZ:g} to {cell.FASTEST_HZ:g}"),
    ("instruments.md", {"1000": "at most 1,000 moments"}[written("trainers/instruments/memory_timeline.py", "MOST_POINTS")]),
    ("instruments.md", f"a snapshot of more than {snapshot.MOST_JSON_BYTES // MIB} MiB of JSON"),
    ("lease.md", f"{WORDS[lease.STALE_AFTER.seconds // 3600].capitalize()} hours after `read`"),
    ("lease.md", f"more than {WORDS[lease.ALLOWED_AHEAD.seconds // 60]} minutes in the future"),
    ("lease.md", f"From {WORDS[lease.REMIND_BEFORE.seconds // 3600]} hours before the end"),
    ("lease.md", f"at most {WORDS[lease_cutoff.NEAR_LEASE_END.seconds // 60]} minutes older than the end"),
    ("lease.md", f"in the last {WORDS[lease_cutoff.NEAR_LEASE_END.seconds // 60]} minutes of the lease"),
    ("cloudlab-paper1.md", f"From {WORDS[lease.REMIND_BEFORE.seconds // 3600]} hours before the end"),
    ("model-by-configuration.md", {"Optimizer(name='adamw', lr=0.0003)": "AdamW with a learning rate of 3e-4"}[
        written("trainers/description/describe_model.py", "OPTIMIZER")]),
    ("model-by-configuration.md", {"(0.15, 15)": "15 % of the positions of each sequence are masked"}[
        written("trainers/tasks/configured.py", "MASKED_SHARE")]),
    ("own-models.md", {"Optimizer(name='adamw', lr=0.001)": 'dict(name="adamw", lr=1e-3)'}[
        written("trainers/plugins/own_model.py", "OPTIMIZER")]),
    ("own-strategies.md", f"Default: `{', '.join(default_of(Strategy, 'degrees'))}`"),
    ("planner.md", f"{advise.IMAGES_PER_GPU} images per GPU, at most {advise.MOST_BATCH_IMAGES:,}"),
    ("planner.md", "{} M tokens up to 1 B parameters, {} M up to 5 B, {} M up to 30 B, {} M above".format(
        *(f"{tokens / 2**20:g}" for _, tokens in advise.USUAL_BATCH_TOKENS))),
    ("planner.md", {1.25: f"a quarter more, in steps of {gpu_hours.LIMIT_ROUNDING_S // 60} minutes"}[gpu_hours.LIMIT_MARGIN]),
    ("planner.md", f"at least {100 * rules.AGREEMENT_SHARE:.0f} % of its highest throughput"),
    ("provision.md", f"waits up to {packages.LOCK_S // 60} minutes for the locks of apt"),
    ("provision.md", f"does not answer within {mounts.ANSWERS_S} s"),
    ("provision.md", {1.0: "differ by at most one second"}[clock.MOST_OFFSET_S]),
    ("provision.md", {0.1: "at most a tenth of the traffic"}[network.MOST_STRAY_SHARE]),
    ("provision.md", f"installs driver {gpu_generations.LONG_SUPPORT_BRANCH}"),
    ("sites.md", {5: "five seconds"}[quotas.ANSWER_S]),
    ("reference/cluster-file.md", f"null: {sbatch_options.CPUS_PER_GPU} for a rank with a GPU"),
    ("reference/matrix-file.md", f"null: {batch_searches.BOUND_FACTOR} times the largest value that the planner predicts"),
    ("reference/matrix-file.md", {"2": "observes, from timed step 2 on"}[
        written("trainers/instruments/observed_steps.py", "FIRST_MEMORY_STEP")]),
    ("slurm.md", f"from {slurm.SCHEDULER.POLL_S:g} seconds to {backlog.LONGEST_PAUSE_S / 60:g} minutes"),
    ("slurm.md", "| `gpu_request` | `{}` | or `{}` or `{}`:".format(*get_args(GPU_REQUEST))),
    ("slurm.md", {"00:30:00": "(default: half an hour)"}[default_of(cell.Draft, "hang_limit")]),
    ("ssh.md", f"up to {gather.MOST_NODES_AT_ONCE} nodes at once"),
    ("strategies.md", {"50000000": "at most 50 million elements"}[
        written("trainers/theory/zero.py", "BUCKET_ELEMENTS")]),
    ("telemetry.md", f"at {cell.TELEMETRY_HZ:g} samples per second"),
    ("telemetry.md", f"{cell.SLOWEST_HZ:g} to {cell.FASTEST_HZ:g} samples per second"),
    ("telemetry.md", f"at least {sample_cache.LEAST_CACHED_BYTES // MIB} MiB of lines"),
    ("telemetry.md", f"if they are {sample_cache.LEAST_ADDED_BYTES // 1024} KiB or more"),
    ("telemetry.md", f"at most {sample_cache.MOST_CACHE_BYTES // GIB} GiB"),
    ("telemetry.md", f"at most {WORDS[node_processes.MOST_SAMPLER_STARTS - 1]} times"),
    ("timeline.md", f"differ by less than {100 * straggler.LEAST_LATE_SHARE:g} % of a step"),
    ("timeline.md", f"too few steps (at least {straggler.LEAST_TIMED_STEPS} on 2 ranks)"),
    ("trace-answers.md", {(0,): "the default is rank 0 alone"}[tuple(default_of(cell.Profile, "ranks"))]),
    ("watch.md", f"at most {WORDS[live_page.MOST_DRAWN_RUNS]} runs"),
]  # fmt: skip
# The table of docs/slurm.md: what it says instead of the default of the key.
SLURM_KEYS = {"account": "none", "qos": "none", "constraint": "none", "partitions": "none", "extra": "none"}
SLURM_KEYS["cpus_per_rank"] = f"{sbatch_options.CPUS_PER_GPU} if the rank has a GPU, else 1"


@pytest.mark.parametrize("page", sorted({page for page, _ in SENTENCES}))
def test_a_number_of_a_page_is_the_number_of_the_program(page):
    text = " ".join((DOCS / page).read_text().split())
    missing = [words for name, words in SENTENCES if (name == page and " ".join(words.split()) not in text) or not words]
    assert not missing, f"docs/{page} does not say this, which the program does: {missing}"


def test_the_defaults_of_the_keys_of_slurm_are_those_of_the_page():
    rows = re.findall(
        r"^\| (`[^|]*`) \| ([^|]*) \|", (DOCS / "slurm.md").read_text().split("\n\n| key | default | |\n")[1], re.M
    )
    defaults = {}
    for keys, default in rows:
        for key in re.findall(r"`([^`]+)`", keys):
            if key not in defaults and key in Slurm.__struct_fields__:
                defaults[key] = default.strip("` ").replace('"', "")
    expected = {key: SLURM_KEYS.get(key, in_yaml(default_of(Slurm, key))) for key in defaults}
    assert defaults == expected
    assert len(defaults) == 11
