"""Threads read the same kind of file for the first time, at the same moment.

A msgspec decoder that several threads build at once crashes the interpreter.
"""

import subprocess
import sys

import support_collect as support

from shardlab.workspace import Workspace

# The interpreter switches threads as often as possible, and no thread begins before all threads are ready.
AT_ONCE = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from collect.loading.records import RunRecords
from shardlab.rundir import RunDir
sys.setswitchinterval(1e-6)
gate = threading.Barrier(4)
def read(_):
    gate.wait()
    RunRecords.read(RunDir(Path(sys.argv[1])))
with ThreadPoolExecutor(4) as pool:
    list(pool.map(read, range(4)))
"""
TIMES = 8  # if each thread builds its own decoder, about two of three attempts crash


def test_threads_that_read_runs_at_the_same_time_do_not_crash(tmp_path):
    workspace = Workspace(tmp_path)
    support.completed(workspace, support.cell())
    command = [sys.executable, "-P", "-c", AT_ONCE, str(workspace.all_runs()[0].path)]
    assert [subprocess.run(command, capture_output=True).returncode for _ in range(TIMES)] == [0] * TIMES
