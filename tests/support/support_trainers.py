"""Real runs for the tests of `trainers`: makes run folders, starts the ranks from a fork server, and reads their results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support_e2e import HANG_S
from support_scripts import Scripts

from shardlab.files import files
from shardlab.matrix.cell import Cell, Optimizer
from shardlab.runs.run import Run, World
from shardlab.runs.rundir import RunDir
from trainers import menu

PYTHON = sys.executable
SGD = Optimizer(name="sgd", lr=0.1, momentum=0.9)  # adam would hide that a gradient has a wrong scale


class Bench:
    """Makes run folders and starts runs. Its runs use the fork server of the test session (tests/conftest.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
            "OMP_NUM_THREADS": "1",  # tests run in parallel: more threads per rank would be slower
        }
        self.scripts = Scripts({**self.environment, "GLOO_SOCKET_IFNAME": "lo"})
        self._made = 0
        self._references = {}

    def run_dir(self, *, workload="gpt2-tiny", strategy="single", gpus=1, accumulation=1, options=None, data=None, **keys):
        """Make a run folder with its run.json. The default is a global batch of 8 and 10 steps of SGD."""
        of_workload, of_strategy = menu.find_workload(workload), menu.find_strategy(strategy)
        batch = keys.pop("global_batch_size", 8)
        defaults = {option.name: option.default for option in (*of_workload.options, *of_strategy.options)}
        dp = gpus // keys.get("tp", 1) // keys.get("pp", 1)
        cell = Cell(**{
            "workload": workload, "strategy": strategy, "gpus": gpus, "launcher": "fork", "dp": dp, "prove": "off",
            "global_batch_size": batch, "micro_batch_size": batch // dp // accumulation,
            "gradient_accumulation_steps": accumulation, "seq_len": of_workload.seq_len, "steps": 10, "optimizer": SGD,
            "options": {**defaults, **(options or {})}, **keys,
        })  # fmt: skip
        self._made += 1
        run_dir = RunDir(self.folder / f"run-{self._made}")
        files.make_folder(run_dir.path)
        files.write_json(run_dir.run_json, Run(
            schema=1, run_id=run_dir.run_id, matrix="tests", cell=cell, cell_hash=cell.hash(), repeat=1, attempt=1,
            launcher="fork", rehearsal=False, world=World(1, cell.world_size, cell.world_size), cluster={},
            data_path=str(data or self.data),
            versions={}, git_commit=None, templates={}, created="2026-01-01T00:00:00Z",
        ))  # fmt: skip
        return run_dir

    def start(self, run_dir, *command, **more_environment):
        """Start a launcher in the run's folder. Its output goes to pipes."""
        return subprocess.Popen(
            [PYTHON, "-m", *(command or ("trainers", "fork")), "."],
            cwd=run_dir.path, env={**self.environment, **more_environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def finish(self, run_dir, *command, **more_environment):
        """Run a launcher to its end; returns (exit code, standard error)."""
        process = self.start(run_dir, *command, **more_environment)
        _, errors = process.communicate(timeout=HANG_S)
        return process.returncode, errors

    def complete(self, **keys):
        """Run a cell, and check that the run ends with exit code 0."""
        run_dir = self.run_dir(**keys)
        code, errors = self.finish(run_dir)
        assert code == 0, errors + "".join(log.read_text() for log in run_dir.log.glob("*"))
        return run_dir

    def losses(self, **keys):
        """Run a cell; returns the mean loss over the ranks at each timed step."""
        run_dir = self.complete(**keys)
        ranks = run_dir.read_run().world.world_size
        columns = [[r.loss for r in run_dir.steps(rank).records if not r.warmup] for rank in range(ranks)]
        return [sum(row) / ranks for row in zip(*columns, strict=True)]

    def reference(self, **keys):
        """The losses of a run on one rank, with which other runs are compared. A second call with equal keys trains nothing."""
        key = repr(sorted({"workload": "gpt2-tiny", **keys}.items()))
        if key not in self._references:
            self._references[key] = self.losses(**keys)
        return self._references[key]


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    """A Bench, shared by all tests of a worker."""
    bench = Bench(tmp_path_factory.mktemp("runs"))
    yield bench
    bench.scripts.end()
