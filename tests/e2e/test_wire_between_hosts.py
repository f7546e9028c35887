"""Two ranks on two hosts make an all-reduce of known size, and the samplers of both hosts see its bytes on the wire.

Each host is a network namespace with one end of a veth pair, its own sampler and its own gloo rank. The samplers read the
kernel's counters, which share no code with the factors of `trainers.communication`. The tolerance is 3 % if packets are large.
It is 6 % for packets of at most 1514 bytes, of which the headers of Ethernet, IP and TCP take 66 bytes. Of these packets, those
that were sent again or only acknowledge others are allowed in addition, because their number depends on the kernel and on how
busy the machine is: they took from less than 1 % to 4 % of the bytes.
"""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from support_aside import why_not
from support_e2e import HANG_S, until

from shardlab.runs.record import Sample, read_records
from trainers.communication import CountedCall

WHY = why_not() or (None if shutil.which("ip") else "there is no `ip` (Debian: iproute2)")
pytestmark = pytest.mark.skipif(WHY is not None, reason=WHY or "")
PAYLOAD = 24_000_000  # bytes of the tensor that is all-reduced
TIMES = 3
HOSTS = ("10.97.0.1", "10.97.0.2")
OF_A_CARD = "packets of a network card"
HEADERS = {"large packets": 0.03, OF_A_CARD: 0.06}  # maps the kind of packets to the tolerance
HEADER, SEGMENT = 66, 1448  # bytes of headers and of data in a packet of a network card

# A shell script that runs in a new network namespace (the first host). It makes a second network namespace (the second host),
# in which a process stays until the test writes a line, and connects the two.
# $1: `on` if the kernel may hand packets of 64 KiB to the interface, as it does between virtual interfaces; `off` if each
# packet may have at most 1500 bytes, as on a cable.
MADE = f"""
set -e
unshare --net sleep 3600 & other=$!
trap "kill $other" EXIT
while test "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/$$/ns/net)"; do sleep 0.01; done
ip link add wire0 type veth peer name wire0 netns $other
for end in "" "nsenter --target $other --net"; do
  $end ip link set wire0 up
  $end ip link set lo up
  if test "$1" = off; then $end ip link set wire0 gso_max_segs 1; fi
done
ip address add {HOSTS[0]}/24 dev wire0
nsenter --target $other --net ip address add {HOSTS[1]}/24 dev wire0
echo $$ $other
read -r _ || :
"""
RANK = f"""
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://{HOSTS[0]}:29500", rank=int(sys.argv[1]), world_size={len(HOSTS)})
tensor = torch.ones({PAYLOAD // 4})
for _ in range({TIMES}):
    dist.all_reduce(tensor)
assert tensor[0] == {len(HOSTS)} ** {TIMES}
dist.barrier()
os._exit(0)
"""


@pytest.fixture(params=HEADERS)
def hosts(request):
    """Yields (one prefix for each of the two hosts, the tolerance). A command is run on a host if the prefix of the host is put
    before the words of the command."""
    words = ["unshare", "--net", "sh", "-c", MADE, "sh", "on" if request.param == "large packets" else "off"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        pids = made.stdout.readline().split()
        assert len(pids) == len(HOSTS)
        # /sys shows the network interfaces of the namespace in which it was mounted, so each host mounts its own /sys.
        inside = 'mount -t sysfs none /sys && exec "$@"'
        at = [["nsenter", "--target", pid, "--net", "unshare", "--mount", "sh", "-c", inside, "sh"] for pid in pids]
        yield at, HEADERS[request.param]
        made.communicate("\n")


def seen(path):
    """Returns the samples that the sampler has written to a file so far."""
    return read_records(path, Sample).records if path.exists() else []


def sent_besides(words, data):
    """The bytes that a host sent besides `data` bytes in packets of a network card: in packets that were sent again, or that
    only acknowledge others. words: the prefix of the host."""
    files = "/sys/class/net/wire0/statistics/tx_packets", "/proc/net/snmp"
    packets, *lines = subprocess.run([*words, "cat", *files], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp: "))
    again = int(values[names.index("RetransSegs")])
    return again * (SEGMENT + HEADER) + max(0, int(packets) - again - data / SEGMENT) * HEADER


def sent(samples):
    (counts,) = zip(*([nic.tx_bytes for nic in one.nics if nic.name == "wire0"] for one in samples), strict=True)
    return counts[-1] - counts[0]


def test_an_all_reduce_is_seen_on_the_wire(hosts, tmp_path):
    at, tolerance = hosts
    files = [tmp_path / f"host{number}.jsonl" for number in range(len(at))]
    samplers = [
        subprocess.Popen([*words, sys.executable, "-P", "-m", "collect", "sample", "--out", str(file), "--hz", "10"])
        for words, file in zip(at, files, strict=True)
    ]
    try:
        until(lambda: all(seen(file) for file in files), "a first sample of each host")
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "wire0"}
        ranks = [
            subprocess.Popen([*words, sys.executable, "-c", RANK, str(rank)], env=environment) for rank, words in enumerate(at)
        ]
        assert [rank.wait(HANG_S) for rank in ranks] == [0, 0]
        # The sample that a sampler is taking now may be older than the end of the ranks, so the test waits for later samples.
        counts = [len(seen(file)) for file in files]
        until(lambda: all(len(seen(file)) > count + 1 for file, count in zip(files, counts, strict=True)), "later samples")
    finally:
        for sampler in samplers:
            sampler.send_signal(signal.SIGTERM)
            sampler.wait()
    expected = TIMES * CountedCall("all_reduce", PAYLOAD, len(HOSTS)).wire_bytes("gloo")
    for words, file in zip(at, files, strict=True):
        besides = sent_besides(words, expected) if tolerance == HEADERS[OF_A_CARD] else 0
        assert expected <= sent(seen(file)) <= (1 + tolerance) * expected + besides
