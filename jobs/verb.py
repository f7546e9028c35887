"""What a verb of `jobs` says about itself besides its name, help, options and action."""

from __future__ import annotations

from typing import ClassVar

from shardlab.verb import Invocation, Verb


class JobsVerb(Verb):
    """A verb of `jobs`: what it does with runs. This decides whether the user has to allow it, and on which machine it runs."""

    permission: ClassVar[str] = ""
    """What the verb does and the user of a workspace must be allowed to do; empty: the verb only reads and draws."""
    starts_runs: ClassVar[bool] = False
    """Whether a runner starts the waiting runs of the workspace after the verb."""
    makes_runs: ClassVar[bool] = False
    """Whether the verb makes runs. For a remote cluster, the cluster file is uploaded, and the verb runs on its controller."""
    reads_runs: ClassVar[bool] = False
    """Whether the verb shows the runs of the workspace, and therefore runs on the controller if the runs are there."""
    changes_runs: ClassVar[bool] = False
    """Whether the verb cancels or repeats runs of the workspace. It is refused in a copy of the workspace."""
    reads_lease: ClassVar[bool] = False
    """Whether the verb reports which runs end before the lease. The inventory is uploaded for it: the lease may have been
    extended since the runs were submitted."""

    def prepare(self, invocation: Invocation) -> None:
        """Write the files that the arguments ask for, and name them in the arguments, before it is decided on which machine
        the verb runs. Raises InputError."""
