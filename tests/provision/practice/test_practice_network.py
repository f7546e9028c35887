"""The network bridge of practice nodes. The tests create a real bridge in a separate network namespace."""

import subprocess
import sys

import pytest
from support_aside import why_not

WHY = why_not()
pytestmark = pytest.mark.skipif(WHY is not None, reason=WHY or "")

# Prints the MAC address of the bridge after each step: the bridge is created, a node is added, a second node is added, the
# first node is removed.
STEPS = """
import json
from provision.practice import network
from provision.practice.base import run_here

def tell():
    (link,) = json.loads(run_here(["ip", "-json", "link", "show", "sl-test"]))
    print(link["address"], flush=True)

network.make_bridge("sl-test", "10.99.0.0/24")
tell()
for number in (1, 2):
    run_here(["ip", "link", "add", f"node{number}", "type", "veth", "peer", "name", f"eth{number}"])
    run_here(["ip", "link", "set", f"node{number}", "address", f"02:00:00:00:00:0{number}", "master", "sl-test", "up"])
    tell()
run_here(["ip", "link", "delete", "node1"])
tell()
"""


def test_a_node_that_is_removed_does_not_change_the_address_of_this_machine():
    words = ["unshare", "--net", sys.executable, "-P", "-c", STEPS]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    addresses = done.stdout.split()
    assert len(addresses) == 4
    assert len(set(addresses)) == 1
