"""The number of threads of a rank. On a node with GPUs, it is the rank's share of the processors of the node."""

import os

import pytest

from shardlab.errors import InputError
from shardlab.hardware.host import count_usable_processors
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import count_threads


@pytest.mark.parametrize(
    ("local_ranks", "usable", "environment", "expected"),
    [
        (8, 64, {}, 8),
        (8, 64, {"OMP_NUM_THREADS": "1"}, 8),
        (8, 64, {"SLURM_CPUS_ON_NODE": "64"}, 8),  # one task of Slurm starts all ranks and may use all processors
        (8, 8, {"SLURM_CPUS_ON_NODE": "64"}, 8),  # Slurm starts a task for each rank and binds each task to 8 processors
        (8, 1, {"SLURM_CPUS_ON_NODE": "64"}, 1),
        (8, 4, {}, 1),
    ],
)
def test_a_rank_with_a_gpu_has_its_share_of_the_processors_of_its_node(local_ranks, usable, environment, expected):
    place = Rank(world_size=local_ranks, local_world_size=local_ranks)
    assert count_threads(place, environment, usable, gpus=True) == expected


@pytest.mark.parametrize(("environment", "expected"), [({}, 1), ({"OMP_NUM_THREADS": "3"}, 3)])
def test_a_rank_on_a_cpu_has_one_thread_unless_told_otherwise(environment, expected):
    assert count_threads(Rank(), environment, 64, gpus=False) == expected


def test_no_threads_are_refused():
    with pytest.raises(InputError, match=r"OMP_NUM_THREADS: found 0\. Allowed: a number from 1\."):
        count_threads(Rank(), {"OMP_NUM_THREADS": "0"}, 64, gpus=False)


@pytest.mark.parametrize(("text", "expected"), [("max 100000\n", 2), ("100000 100000\n", 1), ("10000 100000\n", 1), (None, 2)])
def test_the_quota_of_a_container_limits_the_processors(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert count_usable_processors(tmp_path / "cpu.max") == expected
