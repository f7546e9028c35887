"""`provision` that kills itself after a change, once for each change: support_killed.py SEEN CLUSTER.yaml ...

SEEN is a file of those changes, a line each. Not every change leaves what a later run can see that it was made, such as asking
an archive for its lists: if it were killed after such a change each time, no run would come further. With SHARDLAB_TESTS=long
it is killed after every change, else after about every third.
"""

import hashlib
import os
import signal
import sys
import threading
from pathlib import Path

from provision import plan
from provision.cli import main

_make, _lock, _file = plan._make, threading.Lock(), Path(sys.argv[1])
_every = os.environ.get("SHARDLAB_TESTS") == "long"  # -P keeps this script from importing support_long
_seen = set(_file.read_text().splitlines()) if _file.exists() else set()


def make(node, changes, made):
    for change in changes:
        _make(node, [change], made)
        what = f"{node.name}: {change.says.split(' (')[0]}"  # what stands in brackets is how it was, which differs
        with _lock:
            if what not in _seen and (_every or hashlib.sha256(what.encode()).digest()[0] % 3 == 0):
                with _file.open("a") as handle:
                    handle.write(f"{what}\n")
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    plan._make = make
    sys.exit(main(sys.argv[2:]))
