"""``python -m trainers rehearse``: reads a request to rehearse a cell, and writes the result. torch is imported only if the
cache does not have the result."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import msgspec

from shardlab.errors import InputError
from shardlab.files import files
from shardlab.plugins.plugin_kind import WORKLOADS
from shardlab.runs import rehearsed
from shardlab.runs.rehearsed import RehearsalAnswer, RehearsalRequest, Rehearsed
from trainers import menu
from trainers.plugins import own_strategy

NICENESS = 10  # the niceness of a rehearsal: it uses all processors, and other processes of this machine must go first


def run_rehearsal(request_file: Path | None, cache_folder: Path | None, *, full_depth: bool) -> int:
    """Write the result of a rehearsal as JSON to standard output; all other output goes to standard error.

    request_file: the file with the request; None: standard input. cache_folder: a folder with earlier results, which is made
    if it
    does not
    exist. Raises InputError if the request is not valid.
    """
    request = _read_request(request_file)
    answer_descriptor = _reserve_standard_output()
    cached_path = None if cache_folder is None else cache_folder / f"{request.compute_cache_key(full_depth=full_depth)}.json"
    answer = None if cached_path is None else rehearsed.read_answer(cached_path)
    if answer is None:
        answer = _rehearse_request(request, Path() if request_file is None else request_file.parent, full_depth=full_depth)
        if cached_path is not None and isinstance(answer, Rehearsed):
            files.make_folder(cached_path.parent)
            files.write_json(cached_path, answer)
    with os.fdopen(answer_descriptor, "wb") as answer_file:
        answer_file.write(msgspec.json.encode(answer) + b"\n")
    return 0


def _read_request(request_file: Path | None) -> RehearsalRequest:
    try:
        content = sys.stdin.buffer.read() if request_file is None else files.read(request_file, follow_links=True)
        return msgspec.json.decode(content, type=RehearsalRequest)
    except OSError as error:
        raise InputError(f"{request_file}: cannot be read: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        location, allowed = request_file or "standard input", "JSON with a resolved `cell`, such as a run's run.json"
        raise InputError(f"{location}: no request: {error}. Allowed: {allowed}.") from error


def _reserve_standard_output() -> int:
    """Make a copy of standard output for the result. Standard output itself is redirected to standard error, because libraries
    may print text."""
    sys.stdout.flush()
    answer_descriptor = os.dup(1)
    os.dup2(2, 1)
    return answer_descriptor


def _rehearse_request(request: RehearsalRequest, request_folder: Path, *, full_depth: bool) -> RehearsalAnswer:
    """Rehearse the cell of a request. request_folder: the folder of the request, such as the folder of a run."""
    os.nice(NICENESS)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the result must not depend on the GPUs of this machine
    sys.dont_write_bytecode = True  # so that Python writes no __pycache__ beside the user's files
    if (workload := request.own_workload) is not None:
        workload_file = request_folder / WORKLOADS.folder / Path(workload.file).name
        menu.add_own_workload(workload, workload_file if workload.is_data else Path(workload.file))
    if (strategy := request.own_strategy) is not None:
        own_strategy.add_strategies(Path(strategy.file), request.cell.strategy_code)
    from trainers.tasks import vision_library

    vision_library.import_torchvision()  # needed before any model of transformers is imported
    from trainers.rehearsal import rehearse

    with tempfile.TemporaryDirectory(prefix="shardlab-rehearsal-") as data_path:
        return rehearse.rehearse_cell(request.cell, Path(data_path), full_depth=full_depth)
