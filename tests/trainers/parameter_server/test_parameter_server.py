"""Parameter servers: the synchronous parameter server does the work of one process. Asynchronous parameter servers keep their
bounds on staleness, and continue if a worker is lost."""

import contextlib
import json
import signal
import time
from pathlib import Path

import psutil
import pytest
from support_e2e import HANG_S, until
from support_long import only_in_long_form, only_long

from jobs.planning.resolve import resolve_cells
from shardlab.errors import InputError
from shardlab.matrix import matrix
from shardlab.matrix.cell import Optimizer
from trainers.parameter_server.ledger import Ledger, ServerMode
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import choose_device

pytest_plugins = ["support_trainers"]
# How much losses may differ because sums are computed in a different order. The largest difference seen was 1e-6.
ROUNDING = 1e-4
# The learning rate is small, because each gradient is applied as an update of its own and is not averaged with others.
CALM = Optimizer(name="sgd", lr=0.02, momentum=0.9)
FOREVER = 1_000_000
MANY = 400  # number of steps that takes long enough, even on a fast machine, to stop or kill a worker in the middle
TORCHRUN = (
    "torch.distributed.run", "--nnodes=1", "--nproc-per-node=3", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
    "--local-addr=127.0.0.1", "-m", "trainers", "run",
)  # fmt: skip


def of_workers(run_dir):
    """Returns the loss of each timed step of a run, as the mean over its workers."""
    columns = [[r.loss for r in run_dir.steps(rank).records] for rank in range(run_dir.read_run().cell.gpus)]
    return [sum(row) / len(row) for row in zip(*columns, strict=True)]


def effective(run_dir):
    return run_dir.read_result().knobs["effective"]


def process(run_dir, rank):
    """Returns the process of a rank, whose standard output is the log of the rank. The log exists a moment before the process,
    so the function waits for the process."""

    def find():
        for output in Path("/proc").glob("[0-9]*/fd/1"):
            with contextlib.suppress(OSError):
                if output.readlink() == run_dir.rank_log(rank):
                    return psutil.Process(int(output.parts[2]))
        return None

    return until(find, f"there is a process of rank {rank}")


def nothing_moves(processes):
    """Returns whether all these processes wait for other processes: during ten checks, each process sleeps and uses no CPU
    time. On a busy machine, a process that waits for a processor is not asleep, so it does not count."""
    before = [one.cpu_times()[:2] for one in processes]
    for _ in range(10):
        if any(one.status() != psutil.STATUS_SLEEPING for one in processes):
            return False
        time.sleep(0.05)
    return before == [one.cpu_times()[:2] for one in processes]


@pytest.fixture(scope="module")
def reference(bench):
    """Maps each of two workloads to the losses of a run in one process."""
    return {workload: of_workers(bench.complete(workload=workload)) for workload in ("gpt2-tiny", "vit-tiny")}


@pytest.fixture
def started(bench):
    """Returns a function that starts a run and waits until all its workers make steps. The clients of all started runs are
    killed after the test."""
    clients = []

    def start(*, at_steps=True, **keys):
        run_dir = bench.run_dir(**{"gpus": 2, "servers": 1, "optimizer": CALM, **keys})
        client = bench.start(run_dir)
        clients.append(client)
        until(
            lambda: not at_steps or min(len(run_dir.steps(rank).records) for rank in range(keys.get("gpus", 2))) > 3,
            "all make steps",
        )
        return run_dir, client

    yield start
    for client in clients:
        client.kill()
        client.communicate()


@pytest.mark.parametrize(("servers", "accumulation"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("workload", ["gpt2-tiny", "vit-tiny"])
def test_synchronous_servers_do_the_work_of_one_process(bench, reference, workload, servers, accumulation):
    run = bench.complete(strategy="ps-sync", workload=workload, gpus=2, servers=servers, accumulation=accumulation)
    ours = of_workers(run)
    assert len(ours) == 10
    assert max(abs(a - b) for a, b in zip(ours, reference[workload], strict=True)) < ROUNDING
    found = effective(run)
    assert sum(found["server_elements"]) == run.read_result().parameters
    assert max(found["server_elements"]) - min(found["server_elements"]) <= 1
    assert (found["updates"], found["staleness_counts"], found["largest_lead_steps"]) == (10, {"0": 20}, 0)
    assert (found["optimizer"], found["momentum"], found["last_lr"]) == ("SGD", 0.9, 0.1)
    assert not run.steps_file(2).exists()  # rank 2 is the server, which records no steps
    assert run.count_timed_steps(2) == 10


def test_the_comparison_can_fail_and_bf16_rounds_and_does_no_other_work(bench, reference):
    """The comparison of losses can fail: an asynchronous server gives other losses. A run in bf16 differs only by rounding;
    test_same_work.py explains the bound: two roundings change the largest loss (5.4) by at most 2**-8 of it."""
    rounded = of_workers(bench.complete(strategy="ps-sync", gpus=2, servers=1, precision="bf16"))
    assert 1e-5 < max(abs(a - b) for a, b in zip(rounded, reference["gpt2-tiny"], strict=True)) < 0.022
    alone = of_workers(bench.complete(strategy="ps-async", gpus=2, servers=1))
    assert max(abs(a - b) for a, b in zip(alone, reference["gpt2-tiny"], strict=True)) > 0.1


def test_asynchronous_servers_with_one_worker_do_the_work_of_one_process(bench, reference):
    """If there is only one worker, its gradients are never stale. So asynchronous servers also do the work of one process
    then."""
    for strategy in ("ps-async", "ps-ssp"):
        run = bench.complete(strategy=strategy, gpus=1, servers=2, activation_checkpointing="every-2")
        assert max(abs(a - b) for a, b in zip(of_workers(run), reference["gpt2-tiny"], strict=True)) < ROUNDING
        assert (effective(run)["staleness_counts"], effective(run)["checkpointed_blocks"]) == ({"0": 10}, 2)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("ps-async", {}), ("ps-ssp", {}), ("ps-ssp", {"staleness_bound": 0, "pull_interval": 3, "staleness_weighted": False})],
)
def test_asynchronous_servers_learn_and_count_every_push(bench, strategy, options, servers):
    run = bench.complete(strategy=strategy, gpus=2, servers=servers, steps=30, warmup_steps=3, optimizer=CALM, options=options)
    losses, found = of_workers(run), effective(run)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5
    assert found["pushes_by_worker"] == [33, 33]
    assert sum(found["staleness_counts"].values()) == found["updates"] == 66
    assert max(map(int, found["staleness_counts"])) <= found["largest_staleness"]
    assert found["pulls"] == 2 * (33 // options.get("pull_interval", 1))
    assert found["largest_lead_steps"] <= (found["staleness_bound"] if strategy == "ps-ssp" else 33)
    if options:  # between two pulls, a worker's own pushes make its next gradients stale, even if the other worker does nothing
        assert found["largest_staleness"] >= 2
    assert found["workers_lost"] == []
    assert run.read_result().state == "completed"


@pytest.mark.parametrize(("strategy", "bound"), [("ps-ssp", 4), *only_long(("ps-async", None), ("ps-ssp", 1))])
def test_a_stopped_worker_holds_the_others_up_at_the_bound_and_nowhere_else(started, strategy, bound):
    options = {} if bound is None else {"staleness_bound": bound}
    run_dir, client = started(strategy=strategy, options=options, steps=MANY)
    slow = process(run_dir, 1)
    slow.send_signal(signal.SIGSTOP)

    def ahead():
        return len(run_dir.steps(0).records) - len(run_dir.steps(1).records)

    if bound is None:
        until(lambda: ahead() > 20, "a worker is ahead")
    else:
        until(lambda: ahead() >= bound, "a worker is at the bound")
        until(lambda: nothing_moves([process(run_dir, rank) for rank in (0, 2)]), "the worker and the server wait")
        # The lead is one step larger if the stopped worker has pushed the gradients of a step and has not recorded the step
        # yet.
        assert bound <= ahead() <= bound + 1
    slow.send_signal(signal.SIGCONT)
    _, errors = client.communicate(timeout=HANG_S)
    assert client.returncode == 0, errors
    found = effective(run_dir)
    if bound is None:
        assert found["largest_lead_steps"] >= 20
        assert found["largest_staleness"] >= 20
    else:
        assert found["largest_lead_steps"] == bound
    assert sum(found["staleness_counts"].values()) == 2 * MANY
    assert run_dir.count_timed_steps(2) == MANY


@pytest.mark.parametrize(("strategy", "servers"), [("ps-async", 2), *only_long(("ps-async", 1), ("ps-ssp", 1))])
def test_a_killed_worker_ends_nothing_and_is_on_record(started, strategy, servers):
    run_dir, client = started(strategy=strategy, servers=servers, gpus=3, global_batch_size=12, steps=MANY)
    process(run_dir, 1).send_signal(signal.SIGKILL)
    _, errors = client.communicate(timeout=HANG_S)
    assert client.returncode == 0, errors
    met, event = run_dir.read_events()
    assert (met.event, event.event, event.data["rank"]) == ("met", "lost", 1)
    result, done = run_dir.read_result(), [len(run_dir.steps(rank).records) for rank in range(3)]
    assert done[0] == done[2] == result.steps == MANY
    assert done[1] < MANY
    found = result.knobs["effective"]
    assert found["workers_lost"] == [1]
    assert found["pushes_by_worker"][1] in (done[1], done[1] + 1)
    assert sum(found["staleness_counts"].values()) == sum(found["pushes_by_worker"])
    # Two of three workers finished. The units of both count in the throughput, but the run has failed, because it is not the
    # run that was requested.
    slowest = sum(max(pair) for pair in zip(*([r.step_ms for r in run_dir.steps(rank).records] for rank in (0, 2))))
    assert result.throughput_per_s == pytest.approx(MANY * 8 * 64 / (slowest / 1000))
    assert result.state == "failed"
    run_dir.write_event("jobs", "started")
    run_dir.write_event("job", "exited", code=0)
    assert run_dir.judge().state == "failed"
    assert f"{done[1]} steps are recorded of {MANY}" in run_dir.judge().why


def test_a_worker_that_is_lost_in_the_warm_up_does_not_hold_up_the_timed_steps(started):
    run_dir, client = started(strategy="ps-async", warmup_steps=MANY, steps=5)
    process(run_dir, 1).send_signal(signal.SIGKILL)
    _, errors = client.communicate(timeout=HANG_S)
    assert client.returncode == 0, errors
    assert (run_dir.read_result().steps, run_dir.count_timed_steps(1), run_dir.count_timed_steps(2)) == (5, 5, 0)


def test_a_worker_that_is_lost_before_it_has_set_up_ends_the_run(started):
    """The worker is killed while the other ranks wait for it during their own set-up."""
    run_dir, client = started(at_steps=False, strategy="ps-async", options={"n_layer": 48})
    until(run_dir.rank_log(1).exists, "rank 1 begins")
    worker = process(run_dir, 1)
    worker.send_signal(signal.SIGSTOP)
    assert not run_dir.steps_file(1).exists()
    worker.send_signal(signal.SIGKILL)
    client.communicate(timeout=HANG_S)
    assert client.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize(("strategy", "victim"), [("ps-async", 0), ("ps-async", 2), ("ps-sync", 1)])
def test_a_rank_that_is_needed_ends_the_run(started, strategy, victim):
    """These ranks cannot be lost: rank 0 writes the result, a server holds parameters, and a synchronous update needs every
    worker."""
    run_dir, client = started(strategy=strategy, steps=FOREVER)
    process(run_dir, victim).send_signal(signal.SIGKILL)
    client.communicate(timeout=HANG_S)
    events = {event.event for event in run_dir.read_events()}
    assert client.returncode == 128 + signal.SIGKILL or (client.returncode == 1 and "failed" in events)
    assert not run_dir.result.exists()
    assert "lost" not in events


def test_a_worker_that_fails_by_itself_is_not_excused(bench):
    """A worker that fails with an error of its own ends the run, unlike a worker that was killed."""
    run_dir = bench.run_dir(strategy="ps-async", gpus=2, servers=1, optimizer=Optimizer(name="sgd", lr=1e30))
    assert bench.finish(run_dir)[0] == 1
    assert "FloatingPointError" in "".join(event.data["why"] for event in run_dir.read_events() if event.event == "failed")
    assert not run_dir.result.exists()


@only_in_long_form
def test_torchrun_gives_what_forked_ranks_give(bench):
    keys = {"strategy": "ps-sync", "gpus": 2, "servers": 1, "warmup_steps": 2}
    forked, launched = bench.complete(**keys), bench.run_dir(**keys)
    code, errors = bench.finish(launched, *TORCHRUN)
    assert code == 0, errors
    assert of_workers(forked) == of_workers(launched)


@pytest.mark.parametrize(
    ("rank", "servers", "gpus", "expected"),
    [
        (0, 2, 4, ("cuda:0", "gloo")), (1, 2, 4, ("cuda:1", "gloo")), (2, 2, 4, ("cpu", "gloo")),
        (3, 2, 4, ("cpu", "gloo")), (3, 0, 4, ("cuda:3", "nccl")), (3, 1, 0, ("cpu", "gloo")), (0, 0, 1, ("cuda:0", "nccl")),
    ],
)  # fmt: skip
def test_servers_take_no_gpu_and_keep_nccl_from_the_world(rank, servers, gpus, expected):
    """Server ranks use the CPU. If a run has servers, all ranks use gloo."""
    assert choose_device(Rank(rank, rank, 4), servers, gpus=gpus) == expected


def test_a_slurm_task_that_sees_one_gpu_takes_it_and_other_ranks_need_one_each():
    launched = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}
    assert choose_device(Rank.from_environment(launched | {"SLURM_LOCALID": "3"}), 0, gpus=1) == ("cuda:0", "nccl")
    for place, gpus in (
        (Rank.from_environment(launched | {"SLURM_LOCALID": "0"}), 1),
        (Rank.from_environment(launched), 1),
        (Rank.from_environment(launched), 2),
    ):
        with pytest.raises(InputError, match=f"LOCAL_RANK=3, but the process sees {gpus} GPU"):
            choose_device(place, 0, gpus=gpus)


COUNTING = """
import json, os, sys, tempfile, torch
from pathlib import Path
from shardlab.runs import run
from trainers import menu
from trainers.communication import count_collectives
from trainers.data.order import TIMED, DataOrder
from trainers.instruments.timing import HostClock
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import Ranks
from trainers.tasks import vision_library
vision_library.import_torchvision()
import torch.distributed.algorithms, transformers.models.gpt2.modeling_gpt2  # once, before the ranks are forked

STEPS = 3
def work(rank, cell, data, store):
    ranks, strategy = Ranks(Rank(rank, rank, cell.world_size, store), cell.servers), menu.find_strategy(cell.strategy)
    task = menu.find_workload(cell.workload).build(cell, Path(data))
    torch.manual_seed(0)
    if rank >= cell.gpus:
        server = strategy.build_server(cell, task, ranks)
        with count_collectives() as calls:
            server.serve()
        theory, norm = server.theory(), None
    else:
        engine = strategy.build(cell, task, ranks)
        order, calls = DataOrder(task.source.items, cell.global_batch_size, 1), []
        for step in range(STEPS):
            parts = order.list_micro_batches(
                TIMED, step, slice_index=engine.data_rank, slice_count=engine.data_ranks,
                micro_batch_size=cell.micro_batch_size)
            clock = HostClock(); clock.start()
            with count_collectives() as more:
                engine.forward_backward([task.fetch(part, ranks.device) for part in parts], clock)
            calls += more
            norm = engine.gradient_norm()
            with count_collectives() as more:
                engine.update()
            calls += more
        theory = engine.theory()
        engine.close()
    line = json.dumps({"strategy": cell.strategy, "rank": rank, "counted": sum(c.sent_bytes for c in calls) / STEPS,
          "theory": sum(t.sent_bytes for t in theory), "ops": sorted({c.op for c in calls}), "norm": norm})
    os.write(1, (line + "\\n").encode())  # in one piece: the ranks share it
    ranks.leave_group()

for path in sys.argv[1:]:
    found = run.read_run(Path(path))
    store, children = tempfile.mkdtemp() + "/store", []
    for rank in range(found.cell.world_size):
        if not (pid := os.fork()):
            code = 1
            try:
                work(rank, found.cell, found.data_path, store)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert not any(os.waitpid(child, 0)[1] for child in children)
"""


def test_workers_and_servers_send_the_bytes_of_theory(bench):
    cells = [
        {"strategy": "ps-sync", "servers": 2}, {"strategy": "ps-async", "servers": 1},
        {"strategy": "ps-ssp", "servers": 2, "options": {"pull_interval": 3}}, {"strategy": "single", "gpus": 1},
    ]  # fmt: skip
    runs = [str(bench.run_dir(**{"gpus": 2, **cell}).run_json) for cell in cells]
    done = bench.scripts.run(COUNTING, *runs)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(line) for line in done.stdout.splitlines()]
    psi = 4 * 220_544
    for strategy, pulls in (("ps-sync", 1), ("ps-async", 1), ("ps-ssp", 1 / 3)):
        ours = [rank for rank in ranks if rank["strategy"] == strategy]
        for rank in ours:
            assert rank["ops"] == ["send"]
            assert rank["counted"] == pytest.approx(rank["theory"], rel=0.02)
        assert sum(rank["theory"] for rank in ours) == pytest.approx(2 * psi * (1 + pulls))
    (one,) = [rank["norm"] for rank in ranks if rank["strategy"] == "single"]
    for rank in ranks:
        if rank["strategy"] == "ps-sync" and rank["rank"] < 2:
            assert rank["norm"] == pytest.approx(one, rel=1e-4)


MATRIX = "schema: 1\nname: m\ndefaults: {workload: gpt2-tiny, global_batch_size: 8, steps: 1, gpus: 2, %s}\n"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ("strategy: ps-sync", r"parameter servers update with SGD \(and momentum\) only: found optimizer adamw. Allowed: sgd."),
        ("strategy: ps-ssp, optimizer: {name: adam, lr: 0.1}", "found optimizer adam. Allowed: sgd."),
        ("strategy: ddp, servers: 1", "ddp has no parameter servers"),
        ("strategy: ps-async, max_grad_norm: 1.0", "ps-async does not support max_grad_norm"),
        ("strategy: ps-ssp, options: {pull_interval: 0}", "options.pull_interval: found 0. Allowed: a whole number from 1."),
        (
            "strategy: ps-ssp, options: {staleness_bound: -1}",
            "options.staleness_bound: found -1. Allowed: a whole number from 0.",
        ),
        ("strategy: ps-async, options: {staleness_bound: 1}", "unknown option of ps-async or gpt2-tiny"),
        (
            "strategy: ps-ssp, instruments: {checkpoints: {every_steps: 1}}",
            "ps-ssp keeps no checkpoints: workers are at different steps",
        ),
        ("strategy: ps-sync, nnodes: 2", "found nnodes: 2. Allowed: nnodes: 1."),
    ],
)
def test_an_impossible_parameter_server_cell_is_refused_by_the_plan(tmp_path, keys, why):
    if "optimizer" not in keys and "adamw" not in why:
        keys += ", optimizer: {name: sgd, lr: 0.1}"
    path = tmp_path / "m.yaml"
    path.write_text(MATRIX % keys)
    with pytest.raises(InputError, match=r"(?s).*" + why.replace(".", r"\.")):
        resolve_cells(matrix.load_matrix(path))


def test_servers_are_additional_ranks_beside_the_workers(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(MATRIX % "strategy: ps-async, servers: 2, optimizer: {name: sgd, lr: 0.1}")
    (cell,) = resolve_cells(matrix.load_matrix(path))
    assert (cell.gpus, cell.servers, cell.world_size, cell.dp) == (2, 2, 4, 2)


def test_the_ledger_gives_age_lead_and_weight_of_a_push():
    """The ledger counts how stale each gradient is, how far a worker may be ahead, and the weight of each gradient."""
    ledger = Ledger(3, ServerMode(staleness_bound=1, staleness_weighted=True))
    for worker, version, weight in ((0, 0, 1.0), (1, 0, 1 / 2), (0, 1, 1 / 2), (1, 0, 1 / 4)):
        assert ledger.record_push(worker, version) == weight
        ledger.update_count += 1
    assert ledger.pushes_by_staleness == {0: 1, 1: 2, 3: 1}
    # Workers 0 and 1 must wait, because each is two steps ahead of worker 2.
    assert [ledger.may_begin(worker) for worker in range(3)] == [False, False, True]
    ledger.record_leave(2, is_lost=True)
    assert ledger.may_begin(0)
    assert ledger.may_begin(1)
    assert (ledger.lost_workers, ledger.present_workers) == ({2}, {0, 1})
