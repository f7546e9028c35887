"""Ends a rank's process at once, without the steps that Python takes when the interpreter exits."""

import os
import sys
from typing import NoReturn


def exit_at_once(exit_code: int) -> NoReturn:
    """Flush standard output and standard error and end this process. Functions registered with `atexit` do not run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
