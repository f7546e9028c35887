"""A server process with fake GPUs that forks ranks: `python -m fake_cuda.ranks LIBRARY`.

Each line of its input is a request in JSON, of one of two kinds:

- Run ranks: {"run": folder, "ranks": N, "small_gpu": a rank whose GPU has almost no memory, or null}. The answer is
  {"codes": [exit code of each rank]}.
- Run a function in a process of its own: {"check": name of the function, "module": `checks` or `itself`, "arguments": {...}}.
  The answer is {"found": the result of the function, "code": the exit code of the process, "log": the output of the process}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import forked

import fake_cuda

LIMIT_S = 600.0  # the time limit of a request; only a hanging request takes so long
DEVICES = 8
SMALL_BYTES = 2**18  # memory of a GPU that is too small for every model of the tests


def main() -> None:
    fake_cuda.install(Path(sys.argv[1]), devices=DEVICES)
    _imports()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _check(request) if "check" in request else _ranks(request)
        print(json.dumps(answer), flush=True)


def _imports() -> None:
    """Import the modules that ranks use, once for all ranks."""
    os.environ["DS_ACCELERATOR"] = "cuda"
    for name in ("trainers.run.loop", "trainers.engines.fsdp2", "trainers.engines.pipeline", "trainers.engines.tensor",
                 "trainers.tasks.gpt2", "trainers.tasks.vit"):  # fmt: skip
        importlib.import_module(name)


def _ranks(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    def prepare(number: int) -> None:
        if number == request.get("small_gpu"):
            torch.cuda.set_per_process_memory_fraction(SMALL_BYTES / torch.cuda.mem_get_info(number)[1], number)

    return {"codes": forked.ranks(Path(request["run"]), request["ranks"], LIMIT_S, prepare)}


def _check(request: dict[str, Any]) -> dict[str, Any]:
    module = importlib.import_module(f"fake_cuda.{request['module']}")
    check = getattr(module, request["check"])
    with tempfile.NamedTemporaryFile() as log:
        code, found = forked.answer(lambda: check(**request["arguments"]), LIMIT_S, Path(log.name))
        return {"code": code, "found": found, "log": Path(log.name).read_text()[-5000:]}


if __name__ == "__main__":
    main()
