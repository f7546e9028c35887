"""However a run ends, its processes end at once, the run says why it ended, and no process is left behind."""

import signal
from pathlib import Path

import psutil
import pytest
from support_e2e import HANG_S, until

from trainers.ranks.out_of_memory import is_out_of_memory, read_memory_sizes

pytest_plugins = ["support_trainers"]
HUGE = 2**40  # an embedding of 256 x 2**40 weights has 2**50 bytes, more than this processor can address


def ranks_of(run_dir):
    """Returns the running ranks of a run: the processes whose output is a rank log of the run."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(f"/proc/{process.pid}/fd/1").readlink().is_relative_to(run_dir.log):
                found.append(process)
        except OSError:
            continue
    return found


def event(run_dir, name):
    """Returns the reason in the first event that has this name."""
    return next(e.data["why"] for e in run_dir.read_events() if e.event == name)


@pytest.fixture
def long_run(bench):
    """Yields (the folder of a run of two ranks that makes steps, the client process that started the run)."""
    run_dir = bench.run_dir(strategy="ddp", gpus=2, steps=1_000_000)
    client = bench.start(run_dir)
    until(lambda: len(run_dir.steps(1).records) > 3, "rank 1 makes steps")
    yield run_dir, client
    client.kill()
    client.communicate()


def test_out_of_memory_is_recorded_as_an_event_and_its_error_printed(bench):
    """Out of memory is recorded as the event `oom`; the error is still printed, with its traceback in the log."""
    run_dir = bench.run_dir(strategy="ddp", gpus=2, options={"n_embd": HUGE})
    code, errors = bench.finish(run_dir)
    assert code == 1
    assert {e.event for e in run_dir.read_events()} == {"met", "oom"}
    assert f"can't allocate memory: you tried to allocate {HUGE * 256 * 4} bytes" in event(run_dir, "oom")
    assert event(run_dir, "oom").endswith(" (while building)")
    (ended,) = {event.data["requested_bytes"] for event in run_dir.read_events() if event.event == "oom"}
    assert ended == HUGE * 256 * 4
    # Each of the two ranks prints one line with RuntimeError, unless the rank was ended before it printed anything.
    assert errors.count("RuntimeError") in (1, 2)
    assert "Traceback" in "".join(log.read_text() for log in run_dir.log.glob("*"))
    assert not run_dir.result.exists()


# Messages of torch 2.13, and of the libraries that it uses, for a GPU or a host that has no memory left.
OUT_OF_MEMORY = [
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
]
NOT_OUT_OF_MEMORY = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
    "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nCuda failure 1 'invalid argument'",
    "",
]


def test_only_errors_about_exhausted_memory_count_as_out_of_memory():
    import torch

    assert [said for said in OUT_OF_MEMORY + NOT_OUT_OF_MEMORY if is_out_of_memory(RuntimeError(said))] == OUT_OF_MEMORY
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(MemoryError())
    # The same text in a ValueError is no proof, because torch and its libraries raise RuntimeError.
    assert not is_out_of_memory(ValueError(OUT_OF_MEMORY[0]))


def test_the_sizes_in_an_out_of_memory_error_are_read():
    said = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is free. "
    said += "Process 7 has 77.85 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 512.00 MiB "
    said += "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting ..."
    allocated_bytes = 70 << 30
    assert read_memory_sizes(RuntimeError(said)) == {
        "requested_bytes": 5 << 29,
        "allocated_bytes": allocated_bytes,
        "reserved_bytes": allocated_bytes + (512 << 20),
    }
    assert [read_memory_sizes(RuntimeError(said)) for said in OUT_OF_MEMORY if "tried to allocate" not in said] == [
        {} for said in OUT_OF_MEMORY if "tried to allocate" not in said
    ]


def test_a_cublas_error_is_out_of_memory_only_if_the_gpu_is_almost_full(monkeypatch):
    import torch

    several = [
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "GET was unable to find an engine to execute this computation",
    ]
    assert not any(is_out_of_memory(RuntimeError(said)) for said in several)  # no GPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for free, is_full in ((0, True), (49, True), (50, False), (900, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 1000))
        assert [is_out_of_memory(RuntimeError(said)) for said in several] == [is_full, is_full]
        assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    assert not any(is_out_of_memory(RuntimeError(said)) for said in several)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"strategy": "single", "gpus": 2}, "single is one process: found gpus: 2. Allowed: gpus: 1."),
        (
            {"strategy": "zero0", "precision": "bf16-pure"},
            "zero0 cannot honour bf16-pure: without ZeRO, DeepSpeed keeps an fp32",
        ),
        ({"options": {"n_head": 3}}, "n_head: 3 does not divide the width of 64 (n_embd)."),
        ({"seq_len": 2**22, "options": {"n_embd": 4}}, "global_batch_size: found 8, but the data has 1 items"),
    ],
)
def test_a_cell_that_cannot_be_trained_is_refused_in_a_sentence(bench, keys, why):
    run_dir = bench.run_dir(**keys)
    code, errors = bench.finish(run_dir)
    assert code == 1
    assert event(run_dir, "failed").startswith(why)
    assert f"rank 0: {why}" in errors or f"rank 1: {why}" in errors


def test_a_loss_that_is_no_number_ends_the_run(bench):
    from shardlab.matrix.cell import Optimizer

    run_dir = bench.run_dir(optimizer=Optimizer(name="sgd", lr=1e30))
    assert bench.finish(run_dir)[0] == 1
    assert event(run_dir, "failed").startswith("FloatingPointError: the loss is nan at step")


def test_the_launcher_has_to_start_as_many_ranks_as_the_run_says(bench):
    run_dir = bench.run_dir(strategy="ddp", gpus=2)
    code, _ = bench.finish(run_dir, "trainers", "run")
    assert code == 1
    assert "started 1 ranks. Allowed: 2, as run.json says" in event(run_dir, "failed")


def test_a_rank_without_a_gpu_ends_before_python_ends_the_interpreter(bench, tmp_path):
    """When Python shuts down the interpreter of a process that has finished training, a waiting thread of gloo may abort the
    process. So a rank ends before the interpreter shuts down. In this test, an exit handler, which Python calls at the
    shutdown, would abort the process."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import atexit, os; atexit.register(lambda: os.abort())")
    code, errors = bench.finish(bench.run_dir(), "trainers", "run", PYTHONPATH=str(tmp_path / "site"))
    assert (code, errors) == (0, "")


def test_an_incomplete_environment_or_a_missing_run_is_refused_first(bench, tmp_path):
    run_dir = bench.run_dir()
    code, errors = bench.finish(run_dir, "trainers", "run", RANK="0")
    assert code == 2
    assert "has RANK but not LOCAL_RANK, WORLD_SIZE" in errors
    run_dir.run_json.unlink()
    for verb in ("run", "fork"):
        code, errors = bench.finish(run_dir, "trainers", verb)
        assert (code, errors.count("no such run")) == (2, 1)
    assert not list(run_dir.path.iterdir())


def test_the_reason_of_a_failed_run_is_that_of_the_rank_that_failed_first(bench):
    run_dir = bench.run_dir(strategy="ddp", gpus=2)
    for writer, event_name, data in (
        ("jobs", "started", {}),
        ("rank-00001", "failed", {"why": "ValueError: the cause"}),
        ("rank-00000", "failed", {"why": "RuntimeError: Connection closed by peer"}),
        ("job", "exited", {"code": 1}),
    ):
        run_dir.write_event(writer, event_name, **data)
    assert run_dir.judge().why == "ValueError: the cause"


def test_a_second_attempt_does_not_write_into_the_first(bench):
    run_dir = bench.complete()
    before = run_dir.result.read_bytes(), run_dir.steps_file(0).read_bytes()
    assert bench.finish(run_dir)[0] == 1
    assert "has records already" in event(run_dir, "failed")
    assert before == (run_dir.result.read_bytes(), run_dir.steps_file(0).read_bytes())


def test_a_killed_rank_ends_the_others(long_run):
    run_dir, client = long_run
    ranks = ranks_of(run_dir)
    assert len(ranks) == 2
    # A stopped rank cannot notice that the other rank is gone.
    ranks[0].send_signal(signal.SIGSTOP)
    ranks[1].send_signal(signal.SIGKILL)
    _, errors = client.communicate(timeout=HANG_S)
    assert client.returncode == 128 + signal.SIGKILL, errors
    until(lambda: not ranks_of(run_dir), "the ranks have ended")
    assert not run_dir.result.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_outlives_its_client(long_run, number):
    run_dir, client = long_run
    client.send_signal(number)
    client.communicate(timeout=HANG_S)
    assert client.returncode != 0
    until(lambda: not ranks_of(run_dir), "the ranks have ended")


def test_no_rank_outlives_the_parent_of_the_run(long_run):
    run_dir, client = long_run
    ranks_of(run_dir)[0].parent().send_signal(signal.SIGKILL)
    _, errors = client.communicate(timeout=HANG_S)
    assert client.returncode == 1
    assert "the parent process of its ranks was killed" in errors
    until(lambda: not ranks_of(run_dir), "the ranks have ended")


def test_the_step_that_was_last_written_is_whole_after_a_kill(long_run):
    run_dir, client = long_run
    client.kill()
    until(lambda: not ranks_of(run_dir), "the ranks have ended")
    for rank in (0, 1):
        steps = run_dir.steps(rank)
        assert [r.step for r in steps.records] == list(range(1, len(steps.records) + 1))
        assert steps.corrupt == 0
