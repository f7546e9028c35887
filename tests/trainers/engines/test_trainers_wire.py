"""The bytes of collectives, as counted by the kernel. The gloo ranks of these tests run in a network namespace in which nothing
else sends.

The kernel's counters share no code with the factors of `trainers.communication`, so a wrong factor is detected here. Packets on
the loopback interface are large, so a tolerance of 3 % is enough for their headers if the payload has megabytes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support_e2e import HANG_S, Bench
from support_long import only_long
from support_network_namespace import apart

from trainers.communication import CountedCall

RANKS = 3
PAYLOAD = 12_000_000  # bytes; must be a multiple of RANKS and of four
TIMES = 3
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")

# A program that forks ranks, which communicate over the loopback interface. Each rank reads the counter of the interface
# between two barriers. For each collective, the program prints the bytes that all ranks together sent in one call.
PROGRAM = f"""
import json, os, re, sys, time
from pathlib import Path
import torch, torch.distributed as dist

RANKS, PAYLOAD, TIMES = {RANKS}, {PAYLOAD}, {TIMES}
rank = next((rank for rank in range(1, RANKS) if os.fork() == 0), 0)
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29500", rank=rank, world_size=RANKS)
whole = torch.ones(PAYLOAD // 4)
part = torch.ones(PAYLOAD // 4 // RANKS)
started = {{
    "all_reduce": lambda: dist.all_reduce(whole),
    "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
    "broadcast": lambda: dist.broadcast(whole, 0),
    "send": lambda: {{0: lambda: dist.send(whole, 1), 1: lambda: dist.recv(whole, 0)}}.get(rank, lambda: None)(),
}}

def sent():
    dist.barrier()
    (found,) = re.findall(r"^ *lo:(.*)$", Path("/proc/self/net/dev").read_text(), re.MULTILINE)
    dist.barrier()
    return int(found.split()[8])

for name in sys.argv[1:]:
    started[name]()
    before = sent()
    for _ in range(TIMES):
        started[name]()
    total = sent() - before
    if rank == 0:
        print("SENT", json.dumps([name, total / TIMES]), flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.fixture(scope="module")
def measured():
    """Maps the name of each collective to the bytes that all ranks together sent for one call of it."""
    argv = [*apart(), sys.executable, "-c", PROGRAM, *COLLECTIVES]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S, check=False)
    found = dict(json.loads(line.removeprefix("SENT ")) for line in done.stdout.splitlines() if line.startswith("SENT "))
    assert set(found) == set(COLLECTIVES), done.stderr[-3000:]
    return found


@pytest.mark.parametrize("op", COLLECTIVES)
def test_ranks_send_the_bytes_of_the_ring_factor_on_the_wire(measured, op):
    senders = 1 if op == "send" else RANKS
    assert measured[op] == pytest.approx(senders * CountedCall(op, PAYLOAD, RANKS).wire_bytes("gloo"), rel=0.03)


class Alone(Bench):
    """A workspace for tests whose commands each run in their own network namespace."""

    def command(self, *words):
        return [*apart(), *super().command(*words)]


def difference(bench, strategy):
    """Returns the metric wire_difference_pct of a run. The metric needs enough samples of the network counter, which are at
    least 25 ms apart. So the function repeats with more steps until the metric has a value; how many steps this takes depends
    on the machine."""
    for steps in (250, 1000, 4000):
        matrix = Path(bench.matrix(f"axes: {{strategy: [{strategy}], gpus: [2]}}", steps=steps))
        matrix.write_text(matrix.read_text().replace("defaults:", "defaults:\n  instruments: {telemetry_hz: 40}"))
        bench.json("jobs", "submit", "--matrix", str(matrix), "--wait")
        bench.run("collect", "fetch")
        (row,) = bench.json("collect", "summarize")["rows"]
        if found := row["metrics"].get("wire_difference_pct"):
            return found["value"]
    raise AssertionError(f"the samples leave too much open: {row['metrics']}")


@pytest.mark.e2e
@pytest.mark.parametrize("strategy", ["ddp", *only_long("fsdp2")])
def test_runs_send_the_bytes_of_their_collectives_on_the_wire(tmp_path, short, monkeypatch, strategy):
    """The metric wire_difference_pct compares the kernel's counters with the bytes of the collectives. A difference of up to 6
    % is normal."""
    # This test needs its own fork server, because those of other tests are in another network namespace.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    assert difference(Alone(tmp_path), strategy) == pytest.approx(0, abs=6)
