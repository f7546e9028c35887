"""Sets a run aside if the work on its records fails, also in a way that nobody expected: commands go on with the other runs.

The types of shardlab.record_types refuse every record that we know to make this work fail; this is the last resort.
"""

from collections.abc import Callable
from typing import TypeVar

from shardlab.errors import InputError, ShardlabError
from shardlab.terminal import printable

UNEXPECTED: tuple[type[Exception], ...] = (Exception,)  # empty in our tests, so that a defect keeps its traceback there
T = TypeVar("T")


def run_guarded(work_on_run: Callable[[], T]) -> T | ShardlabError:
    """The result of the work on one run, or the error for which the run is set aside."""
    try:
        return work_on_run()
    except ShardlabError as error:
        return error
    except UNEXPECTED as error:
        error_text = printable.clean_to_one_line(f"{type(error).__name__}: {error}")
        return InputError(f"shardlab cannot work with the records of this run ({error_text}); please report this defect.")
