"""Two machines with a link of a given rate between them, and ranks that measure collectives over the link.

The machines are two network namespaces. Their link has the token bucket that practice nodes have for `lan.mbps`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from support_e2e import HANG_S

SHAPE = "root tbf rate {mbps}mbit burst 256k latency 50ms"  # the token bucket of practice nodes
FIRST, SECOND, PREFIX = "10.89.78.1", "10.89.78.2", 24

# One rank. Arguments: rank, number of ranks, HOST:PORT of rank 0, and a JSON list of [command of each rank or nothing, sizes in
# bytes, iterations]. Before it measures the sizes of an entry, a rank runs its command, which changes the rate of its link.
# Rank 0 prints the fields of an AllReduceTime for each size of each entry.
RANK = """
import json, subprocess, sys
import torch, torch.distributed as dist
from provision.checks import _all_reduce_ranks
from provision.checks._all_reduce_ranks import _measure_times, _summarize_times
rank, ranks, endpoint, asked = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
dist.init_process_group("gloo", init_method="tcp://" + endpoint, rank=rank, world_size=ranks)
wrong, found = torch.zeros(1, dtype=torch.int64), []
for commands, sizes, iterations in asked:
    if commands:
        subprocess.run(commands[rank], check=True)
    _all_reduce_ranks.TIMED_ITERATIONS = iterations
    dist.barrier()
    times = torch.stack([_measure_times(size // 4, rank, ranks, torch.device("cpu"), wrong) for size in sizes])
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    found.append([_summarize_times(size, ranks, row) for size, row in zip(sizes, times.tolist(), strict=True)])
assert not wrong
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""

_MACHINES = f"""\
ip link set lo up
unshare --net sleep 600 &
other=$!
until test "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)"; do sleep 0.01; done
ip link add link0 type veth peer name link1
ip link set link1 netns $other
ip address add {FIRST}/{PREFIX} dev link0 && ip link set link0 up
nsenter --net --target=$other sh -euc 'ip link set lo up; ip address add {SECOND}/{PREFIX} dev link1; ip link set link1 up'
echo $other
cat  # until the test closes this input
kill $other
"""


def why_not() -> str | None:
    """Why this machine cannot make a link with a given rate, in one line; None if it can."""
    tried = ["unshare", "--net", "sh", "-euc", f"ip link set lo up; tc qdisc add dev lo {SHAPE.format(mbps=100)}"]
    done = subprocess.run(tried, capture_output=True, check=False)
    return None if done.returncode == 0 else "a link of a given rate needs root and tc"


class TwoMachines:
    """The two namespaces, by the process that keeps each open."""

    def __init__(self, first: int, second: int) -> None:
        self._ends = (("link0", first), ("link1", second))

    def times(self, rates: dict[int, int], sizes: Sequence[int]) -> list[list[dict[str, float]]]:
        """The figures of all-reduces between both machines, for each rate of the link and each size in bytes.

        rates: maps each rate in Mbit/s to the number of iterations.
        """
        asked = []
        for mbps, iterations in rates.items():
            commands = [["tc", "qdisc", "replace", "dev", end, *SHAPE.format(mbps=mbps).split()] for end, _ in self._ends]
            asked.append((commands, sizes, iterations))
        words = [sys.executable, "-c", RANK]
        started = [
            subprocess.Popen(
                ["nsenter", "--net", f"--target={process}", "env", f"GLOO_SOCKET_IFNAME={interface}", "OMP_NUM_THREADS=1",
                 *words, str(rank), "2", f"{FIRST}:29611", json.dumps(asked)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
            )
            for rank, (interface, process) in enumerate(self._ends)
        ]  # fmt: skip
        said = [one.communicate(timeout=HANG_S) for one in started]
        assert [one.returncode for one in started] == [0, 0], said[0][1] + said[1][1]
        found: list[list[dict[str, float]]] = json.loads(said[0][0].splitlines()[-1])
        return found


@contextlib.contextmanager
def two_machines() -> Iterator[TwoMachines]:
    """The two machines, which exist only while the context is open."""
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-euc", _MACHINES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        second = process.stdout.readline()
        assert second.strip(), "the namespaces could not be made"
        yield TwoMachines(process.pid, int(second))
    finally:
        process.communicate(timeout=HANG_S)
