"""Several threads read files of the same type at the same moment, before any thread built the decoder of this type.

If several threads build the same msgspec decoder at once, the Python interpreter crashes.
"""

import subprocess
import sys

import support_collect as support

from shardlab.workspace.workspace import Workspace

# A Python script in which threads read run folders at once. The interpreter switches threads as often as possible, and no
# thread begins before all threads are ready.
AT_ONCE = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from collect.loading.records import RunRecords
from shardlab.runs.rundir import RunDir
sys.setswitchinterval(1e-6)
gate = threading.Barrier(4)
def read(_):
    gate.wait()
    RunRecords.read(RunDir(Path(sys.argv[1])))
with ThreadPoolExecutor(4) as pool:
    list(pool.map(read, range(4)))
"""
TIMES = 8  # repeated, because only about two of three attempts crash without the protection


def test_threads_that_read_runs_at_the_same_time_do_not_crash(tmp_path):
    workspace = Workspace(tmp_path)
    support.completed(workspace, support.cell())
    command = [sys.executable, "-P", "-c", AT_ONCE, str(workspace.list_run_dirs()[0].path)]
    assert [subprocess.run(command, capture_output=True).returncode for _ in range(TIMES)] == [0] * TIMES
