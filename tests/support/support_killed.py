"""Runs `provision` and kills it after a change that it made. Usage: support_killed.py SEEN CLUSTER.yaml ...

SEEN is a file that lists, one per line, the changes after which `provision` was already killed.

`provision` is killed only once for each change. Some changes, such as an update of the package lists, leave nothing that a
later run could see, so a later run makes them again. If `provision` were killed each time, no run would get past such a
change.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from provision import plan
from provision.cli import main

_make, _lock, _file = plan._make_changes, threading.Lock(), Path(sys.argv[1])
_seen = set(_file.read_text().splitlines()) if _file.exists() else set()


def make(node, changes, made):
    for change in changes:
        _make(node, [change], made)
        # the text in brackets describes the previous state, which differs between runs
        what = f"{node.name}: {change.description.split(' (')[0]}"
        with _lock:
            if what not in _seen:
                with _file.open("a") as handle:
                    handle.write(f"{what}\n")
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    plan._make_changes = make
    sys.exit(main(sys.argv[2:]))
