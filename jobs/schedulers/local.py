"""The scheduler `local`: starts runs on this machine, one at a time, in the order of submission. So no run slows down
another."""

from __future__ import annotations

from jobs.run_queue import QueueScheduler


class LocalScheduler(QueueScheduler):
    """Starts runs on this machine, one at a time."""

    NAME = "local"
    TEMPLATE = "launch/local.sh.j2"
    TEMPLATES = (TEMPLATE,)


SCHEDULER = LocalScheduler()
if __name__ == "__main__":
    SCHEDULER.run_as_runner()
