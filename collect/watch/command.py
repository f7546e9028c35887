"""`collect watch`: serves the live page of a workspace until Ctrl-C."""

from __future__ import annotations

import tempfile
from pathlib import Path

from collect.watch.live_page import LivePage
from collect.watch.report_on_request import ReportOnRequest
from collect.watch.server import WatchServer
from shardlab.console import Output
from shardlab.errors import InputError
from shardlab.workspace import Workspace


def serve(workspace: Workspace, port: int, output: Output) -> int:
    """Serve the live page until Ctrl-C or SIGTERM, then return exit code 0. port: the port of the server; 0: any free port.

    Raises InputError if the folder of the workspace does not exist or the port cannot be used.
    """
    if not workspace.path.is_dir():
        raise InputError(f"{workspace.path}: there is no such folder. Allowed: the folder of a workspace.")
    try:
        with tempfile.TemporaryDirectory(prefix="shardlab-watch-") as folder:
            report = ReportOnRequest(workspace, Path(folder))
            with WatchServer(port, LivePage(workspace), report, workspace.runs, output.detail) as server:
                output.line(f"watch {workspace.path}: {server.url}")
                output.remark("The address holds a secret and works on this machine alone. Ctrl-C ends the server.")
                output.document({"workspace": str(workspace.path), "url": server.url})
                server.serve_forever()
    except KeyboardInterrupt:
        pass
    return 0
