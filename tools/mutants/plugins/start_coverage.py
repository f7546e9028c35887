"""Starts coverage in every Python process of a copy of the repository while tests are recorded, and follows forks.

The file `copy.pth` in the virtual environment of the copy imports this module whenever Python starts, so a process with a
cleaned environment is measured too. A file holds the context, that is, the test that runs now. A process reads the file when it
starts and after each fork: a server that forks the ranks of many tests does the work of another test in each fork.
"""

import contextlib
import os
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "recording"
SETTINGS, CONTEXT, DATA = FOLDER / "coveragerc", FOLDER / "context", FOLDER / "data"


def start():
    """Starts coverage in this process, if tests are being recorded."""
    if not SETTINGS.exists():
        return
    import coverage

    measuring = coverage.Coverage(config_file=str(SETTINGS), auto_data=True, check_preimported=False)
    measuring.start()
    _follow(measuring)
    # What the parent has measured is saved by the parent only, and not once more by each fork.
    os.register_at_fork(before=measuring._collector.flush_data, after_in_child=lambda: _follow(measuring))


def _follow(measuring):
    """Attributes the lines that this process runs from now on to the test that runs now."""
    measuring.switch_context(CONTEXT.read_text())


def enter(context):
    """Attributes the lines that this process and new processes run from now on to a context."""
    beside = CONTEXT.with_suffix(".part")
    beside.write_text(context)
    beside.replace(CONTEXT)
    import coverage

    coverage.Coverage.current().switch_context(context)


with contextlib.suppress(Exception):  # a process that cannot be measured runs nevertheless
    start()
