"""Makes a folder of a test a workspace of the user who runs the test."""

import tempfile
from pathlib import Path

from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace


def make_own(folder):
    """Make a folder an own workspace although it has files, as if its user had written them after the first command.

    Returns the workspace.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if workspace_trust.is_own(Workspace(folder)):
        return Workspace(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        for entry in list(folder.iterdir()):
            entry.rename(Path(aside, entry.name))
        workspace_trust.begin_workspace(Workspace(folder))
        for entry in Path(aside).iterdir():
            if entry.name == ".shardlab":
                for below in entry.iterdir():
                    below.rename(folder / ".shardlab" / below.name)
            else:
                entry.rename(folder / entry.name)
    assert workspace_trust.is_own(Workspace(folder))
    return Workspace(folder)
