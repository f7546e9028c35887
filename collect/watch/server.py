"""The HTTP server of the live page, on 127.0.0.1. It only reads files, and only answers requests that contain a secret token.

Other users of this machine can connect to the port, and any page in the browser of the user can send requests to it. So every
path must begin with a random token. The header `Host` must name this machine, so that a foreign domain name that resolves to
127.0.0.1 (DNS rebinding) is rejected. A content security policy tells the browser to load nothing from other servers.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from socketserver import TCPServer
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from collect import write_report
from collect.reading.load import load_matrix
from collect.report.page import read_plotly_script
from collect.summary import summarize
from collect.watch.live_page import LivePage
from collect.write_report import PAGE
from shardlab.errors import InputError, ShardlabError
from shardlab.files import gc_pause
from shardlab.terminal import printable
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace
from templates import render_page

SERVER_ADDRESS = "127.0.0.1"
# The names that the header `Host` may contain. Any port is allowed, because `ssh -L 9000:127.0.0.1:PORT` shows the page under
# another port. A page from another server cannot have one of these names.
ALLOWED_HOSTS = ("127.0.0.1", "localhost")
SILENT_CLIENT_S = 30.0  # seconds until the connection of a client that neither sends nor reads is closed
_COMMON_POLICY = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
LIVE_PAGE_POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; {_COMMON_POLICY}"
)
REPORT_POLICY = (
    f"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; {_COMMON_POLICY}"
)
RUN_FILES_POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; sandbox; {_COMMON_POLICY}"  # for files of runs: their scripts must not run
)
HTML_TYPE, SCRIPT_TYPE, JSON_TYPE, TEXT_TYPE = "text/html", "text/javascript", "application/json", "text/plain"
TYPE_BY_SUFFIX = {
    ".html": HTML_TYPE,
    ".json": JSON_TYPE,
    ".jsonl": TEXT_TYPE,
    ".csv": TEXT_TYPE,
    ".md": TEXT_TYPE,
    ".tex": TEXT_TYPE,
    ".log": TEXT_TYPE,
    ".sh": TEXT_TYPE,
}
TYPE_BY_SUFFIX |= {".sbatch": TEXT_TYPE, ".yaml": TEXT_TYPE, ".py": TEXT_TYPE}
BINARY_TYPE = "application/octet-stream"
MOST_ENTRIES = 1000  # the most entries of a folder that are listed


class ReportOnRequest:
    """The report of the last matrix of a workspace, as `collect summarize` writes it. It is written when a browser requests it.

    folder: the folder in which the folder `report` is created.
    """

    def __init__(self, workspace: Workspace, folder: Path) -> None:
        self.folder = folder / "report"
        self._workspace = workspace
        self._lock = threading.Lock()

    def rewrite_report(self) -> None:
        """Write the report again. Raises ShardlabError, such as InputError if no matrix was submitted in this workspace."""
        with self._lock, gc_pause.pause_collector():
            loaded = load_matrix(self._workspace, None)
            summary = summarize(loaded, loaded.expansion.baseline)
            write_report.write_report(self.folder, self._workspace, loaded, summary, opened_in=self._workspace.report)


class WatchServer(ThreadingHTTPServer):
    """Serves the live page, the report, and the files of runs.

    runs: the folder with the run folders. print_line: a function that gets one line for each failed request. Raises InputError
    if the port cannot be used."""

    daemon_threads = True  # so that the process can end while a page is open

    def __init__(
        self, port: int, live_page: LivePage, report: ReportOnRequest, runs_dir: Path, print_line: Callable[[str], None]
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self.live_page, self.report, self.runs_dir, self.print_line = live_page, report, runs_dir, print_line
        self.script_by_name = {
            "script.js": render_page("watch/script.js.j2", printable.clean_text).encode(),
            "plotly.js": read_plotly_script().encode(),
        }
        try:
            super().__init__((SERVER_ADDRESS, port), RequestHandler)
        except OSError as error:
            raise InputError(
                f"--port {port}: {SERVER_ADDRESS} cannot be used: {error.strerror}. Allowed: a free port, or 0 for any."
            ) from None

    def server_bind(self) -> None:
        """Bind the socket. Unlike the base class, it does not look up a name for the address, which may wait for a name
        server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = SERVER_ADDRESS, self.server_address[1]

    @property
    def url(self) -> str:
        """The address of the live page, with the secret token."""
        return f"http://{SERVER_ADDRESS}:{self.server_port}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Report a failed request. It is not a failure if the browser closed the connection."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            self.print_line(f"a request failed: {type(error).__name__}: {error}")


class RequestHandler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: WatchServer
    protocol_version = "HTTP/1.1"
    timeout = SILENT_CLIENT_S

    def version_string(self) -> str:
        """The value of the header `Server`, which the base class sends with each answer."""
        return "shardlab"

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - its name in the base class
        """Write no log of requests, because their paths contain the secret token."""

    def do_GET(self) -> None:
        """Answer a request: check the header `Host` and the token, then send the page, the data, the report or a file."""
        host = self.headers.get("Host", "").lower()
        host_name, _, port = host.partition(":")
        if (
            len(self.headers.get_all("Host") or ()) != 1
            or host_name not in ALLOWED_HOSTS
            or not (port.isdecimal() or host == host_name)
        ):
            self._send_problem(HTTPStatus.MISDIRECTED_REQUEST, "This server answers to 127.0.0.1 and localhost alone.")
            return
        path_parts = urlsplit(self.path).path.split("/")[1:]
        if not secrets.compare_digest(path_parts[0].encode("utf-8", "replace"), self.server.token.encode()):
            self._send_problem(
                HTTPStatus.NOT_FOUND, "Nothing is here. The address is in the terminal in which `collect watch` runs."
            )
            return
        try:
            self._send_path([os.fsdecode(unquote_to_bytes(path_part)) for path_part in path_parts[1:]])
        except ShardlabError as error:
            self._send_problem(HTTPStatus.CONFLICT, str(error))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            self._send_problem(HTTPStatus.NOT_FOUND, "There is no such file.")
        except ConnectionError:
            raise
        except OSError as error:
            self._send_problem(HTTPStatus.FORBIDDEN, f"The file cannot be read: {error.strerror}.")

    do_HEAD = do_GET  # noqa: N815 - its name in the base class

    def _refuse_method(self) -> None:
        self.close_connection = True  # the body of the request is not read, so the connection cannot be used again
        self._send_problem(HTTPStatus.METHOD_NOT_ALLOWED, "This server only reads.", Allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method  # noqa: N815

    def _send_path(self, path_parts: Sequence[str]) -> None:
        """Send the page, the data or the file that a path means. path_parts: the parts of the path after the token."""
        match path_parts:
            case [""]:
                self._send_body(self.server.live_page.render_html(), HTML_TYPE, LIVE_PAGE_POLICY)
            case [("script.js" | "plotly.js") as script_name]:
                self._send_body(self.server.script_by_name[script_name], SCRIPT_TYPE, LIVE_PAGE_POLICY)
            case ["data"]:
                self._send_data()
            case ["report", file_name, *inner_parts]:
                if not inner_parts and file_name in ("", PAGE):
                    self.server.report.rewrite_report()
                self._send_file(self.server.report.folder, [file_name or PAGE, *inner_parts], REPORT_POLICY)
            case ["runs", *parts_below_runs]:
                self._send_file(self.server.runs_dir, parts_below_runs, RUN_FILES_POLICY)
            case _:
                raise FileNotFoundError

    def _send_data(self) -> None:
        """Send the present data of the live page, or "not modified" if the browser already has this data."""
        page_json, page_tag = self.server.live_page.refresh_document()
        if self.headers.get("If-None-Match") == page_tag:
            self._send_head(HTTPStatus.NOT_MODIFIED, 0, JSON_TYPE, LIVE_PAGE_POLICY, ETag=page_tag)
        else:
            self._send_body(page_json, JSON_TYPE, LIVE_PAGE_POLICY, ETag=page_tag)

    def _send_file(self, root_folder: Path, path_parts: list[str], content_policy: str) -> None:
        """Send a file below a folder. If the path ends in a slash, send a list of the names in the folder that it means.

        path_parts: the parts of the path below `root_folder`. content_policy: the content security policy.
        """
        file_or_names = open_below(root_folder, path_parts[:-1] if path_parts[-1:] == [""] else path_parts)
        if isinstance(file_or_names, list):
            if path_parts[-1:] != [""]:
                raise FileNotFoundError  # without the slash at the end, relative links would lead to the parent folder
            listing_html = render_page(
                "watch/folder.html.j2", printable.clean_text, names=file_or_names, path="/".join(path_parts)
            )
            self._send_body(listing_html.encode(), HTML_TYPE, RUN_FILES_POLICY)
            return
        with file_or_names:
            file_bytes = os.fstat(file_or_names.fileno()).st_size
            content_type = TYPE_BY_SUFFIX.get(PurePosixPath(path_parts[-1]).suffix, BINARY_TYPE)
            self._send_head(
                HTTPStatus.OK,
                file_bytes,
                TEXT_TYPE if content_type == HTML_TYPE and content_policy == RUN_FILES_POLICY else content_type,
                content_policy,
            )
            if self.command != "HEAD":
                shutil.copyfileobj(_FilePrefix(file_or_names, file_bytes), self.wfile)

    def _send_problem(self, status: HTTPStatus, sentence: str, **headers: str) -> None:
        problem_html = render_page("watch/problem.html.j2", printable.clean_text, sentence=sentence)
        self._send_body(problem_html.encode(), HTML_TYPE, RUN_FILES_POLICY, status, **headers)

    def _send_body(
        self, body: bytes, content_type: str, content_policy: str, status: HTTPStatus = HTTPStatus.OK, **headers: str
    ) -> None:
        self._send_head(status, len(body), content_type, content_policy, **headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_head(self, status: HTTPStatus, body_bytes: int, content_type: str, content_policy: str, **headers: str) -> None:
        self.send_response(status)
        common_headers = {
            "Content-Type": content_type if content_type == BINARY_TYPE else f"{content_type}; charset=utf-8",
            "Content-Length": str(body_bytes),
            "Content-Security-Policy": content_policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",  # the address contains the secret token
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for header_name, header_value in (common_headers | headers).items():
            self.send_header(header_name, header_value)
        self.end_headers()


class _FilePrefix(io.RawIOBase):
    """The first `prefix_bytes` bytes of a file that may grow while it is sent."""

    def __init__(self, file: io.BufferedReader, prefix_bytes: int) -> None:
        self._file, self._remaining_bytes = file, prefix_bytes

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(min(size, self._remaining_bytes) if size >= 0 else self._remaining_bytes)
        self._remaining_bytes -= len(content)
        return content


def open_below(root_folder: Path, path_parts: Sequence[str]) -> io.BufferedReader | list[str]:
    """Open a file below the folder `root_folder` for reading. If the path is a folder, return the sorted names of its entries
    instead.

    Neither a name from the browser nor a link in a run folder can lead out of `root_folder`. The names of folders end in a
    slash. path_parts: the parts of the path below `root_folder`. Raises OSError if the path does not exist, is neither a
    regular file nor a folder, or contains a link.
    """
    descriptor = os.open(root_folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path_part in path_parts:
            if path_part in ("", ".", "..") or "/" in path_part or "\0" in path_part:
                raise FileNotFoundError(path_part)
            inner_descriptor = os.open(path_part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner_descriptor
        file_mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(file_mode):
            opened_file = os.fdopen(descriptor, "rb")
            descriptor = -1
            return opened_file
        if not stat.S_ISDIR(file_mode):
            raise FileNotFoundError(path_parts[-1] if path_parts else str(root_folder))
        with os.scandir(descriptor) as folder_entries:
            entry_names = sorted(
                f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name for entry in folder_entries
            )
        return entry_names[:MOST_ENTRIES]
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def serve_live_page(workspace: Workspace, port: int, output: Output) -> int:
    """Serve the live page until Ctrl-C or SIGTERM, then return exit code 0. port: the port of the server; 0: any free port.

    Raises InputError if the folder of the workspace does not exist or the port cannot be used.
    """
    if not workspace.path.is_dir():
        raise InputError(f"{workspace.path}: there is no such folder. Allowed: the folder of a workspace.")
    try:
        with tempfile.TemporaryDirectory(prefix="shardlab-watch-") as report_folder:
            report = ReportOnRequest(workspace, Path(report_folder))
            with WatchServer(port, LivePage(workspace), report, workspace.runs, output.print_detail) as server:
                output.print_line(f"watch {workspace.path}: {server.url}")
                output.print_remark("The address holds a secret and works on this machine alone. Ctrl-C ends the server.")
                output.print_document({"workspace": str(workspace.path), "url": server.url})
                server.serve_forever()
    except KeyboardInterrupt:
        pass
    return 0
