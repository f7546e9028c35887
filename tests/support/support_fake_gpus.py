"""Runs on fake GPUs: a server process with fake GPUs forks the ranks, and tests read the files that the ranks wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from fake_cuda import build
from support_e2e import HANG_S

from shardlab.runs.rundir import RunDir

SUPPORT = Path(__file__).parent
if TYPE_CHECKING:
    from support_trainers import Bench


class FakeGpus:
    """The server process, which has eight fake GPUs."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        environment = {
            **bench.environment,
            "PYTHONPATH": f"{SUPPORT}:{SUPPORT.parents[1] / 'benchmarks' / 'gpu'}",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "ignore",
        }
        self._log = (bench.folder / "fake-gpus.log").open("wb")
        command = [sys.executable, "-m", "fake_cuda.ranks", str(build.library())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment, text=True
        )
        assert self._answer() == {"ready": True}

    def run(self, ranks: int = 1, *, small_gpu: int | None = None, **keys: Any) -> tuple[RunDir, list[int]]:
        """Run a cell; returns the run and the exit codes of its ranks.

        keys: keys of the cell. small_gpu: the number of the rank whose GPU has almost no memory.
        """
        run_dir = self.bench.run_dir(**{"steps": 3, "launcher": "torchrun", **keys})
        return run_dir, self.again(run_dir, ranks, small_gpu=small_gpu)

    def again(self, run_dir: RunDir, ranks: int, *, small_gpu: int | None = None) -> list[int]:
        """Run the ranks of an existing run folder; returns their exit codes."""
        codes: list[int] = self._ask({"run": str(run_dir.path), "ranks": ranks, "small_gpu": small_gpu})["codes"]
        return codes

    def complete(self, **keys: Any) -> RunDir:
        """Run a cell, and check that every rank exits with code 0."""
        cell = self.bench.run_dir(**keys).read_run().cell
        run_dir, codes = self.run(cell.world_size, **keys)
        logs = "".join(log.read_text() for log in run_dir.log.glob("*"))
        assert codes == [0] * cell.world_size, logs
        return run_dir

    def check(self, name: str, *, cell: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        """The result of a function of `fake_cuda.checks`, called with this cell."""
        asked = msgspec.to_builtins(self.bench.run_dir(**{"launcher": "torchrun", **cell}).read_run().cell)
        found: dict[str, Any] = self._found(name, "checks", {"cell": asked, "data": str(self.bench.data), **arguments})
        return found

    def ask(self, name: str, **arguments: Any) -> Any:
        """The result of a function of `fake_cuda.itself`."""
        return self._found(name, "itself", arguments)

    def said(self) -> str:
        return Path(self._log.name).read_text()[-5000:]

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(HANG_S)
        self._process.stdout.close()
        self._log.close()

    def _found(self, name: str, module: str, arguments: dict[str, Any]) -> Any:
        answer = self._ask({"check": name, "module": module, "arguments": arguments})
        assert answer["code"] == 0, answer["log"]
        return answer["found"]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.said()
        answer: dict[str, Any] = json.loads(line)
        return answer


@pytest.fixture(scope="session")
def gpus(bench: Bench) -> Iterator[FakeGpus]:
    made = FakeGpus(bench)
    yield made
    made.end()
