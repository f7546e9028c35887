"""A server process with fake GPUs that forks ranks: `python -m fake_cuda.ranks LIBRARY`. Each line of its input is a request.

A request is JSON: {"run": folder, "ranks": N, "small_gpu": the number of a rank whose GPU has hardly any
memory, or null}, answered by {"codes": [exit code of each rank]}; or
{"check": name, "module": `checks` or `itself`, "arguments": {...}}, a function of that module in a process of its own, answered
by {"found": what it gave, "code": the exit code of the process, "log": what it printed}.
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

LIMIT_S = 600.0  # time limit of a request; only a hanging request takes so long
DEVICES = 8
SMALL_BYTES = 2**18  # a GPU on which no model of the tests has room


def main() -> None:
    fake_cuda.install(Path(sys.argv[1]), devices=DEVICES)
    _imports()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _check(request) if "check" in request else _ranks(request)
        print(json.dumps(answer), flush=True)


def _imports() -> None:
    """What ranks use, once for all of them."""
    os.environ["DS_ACCELERATOR"] = "cuda"
    for name in ("trainers.loop", "trainers.engines.fsdp2", "trainers.engines.pipeline", "trainers.engines.tensor",
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
