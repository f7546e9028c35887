"""A stand-in of the CloudLab portal that answers over TLS, in the forms of the portal's OpenAPI document.

A test can inject a fault into each kind of request.
"""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from support_cloudlab import lan, manifest, node

TOKEN = "eyJhbGciOiJSUzI1NiJ9.canary-4711.signature"
UUID = "e0174522-6bdc-11f0-bc80-e4434b2381fc"
URN = "urn:publicid:IDN+wisc.cloudlab.us+authority+cm"
BORN = "2031-05-01T12:00:00+00:00"
END = "2031-05-02T04:00:00+00:00"
DATE = "Thu, 01 May 2031 12:00:00 GMT"
NO_SUCH = {"code": 404, "error": "No such experiment"}

Fault = Callable[["Handler"], None]


def certificate(folder: Path, name: str = "127.0.0.1") -> tuple[Path, Path]:
    """Make a self-signed certificate for a server with this IP address; returns the files (key, certificate)."""
    key, made = folder / "key.pem", folder / "certificate.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    of_this = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{name}", "-keyout", key, "-out", made]
    subprocess.run([*words, *of_this], check=True, capture_output=True)
    return key, made


class TestPortal:
    """The state of the stand-in portal.

    faults: what the portal does with the next requests, by HTTP method and end of the path. Each fault is used once.
    polls: how many times a new experiment can be read before its nodes are ready.
    date: the Date header of every answer. grants: a function that gets the hours for which an extension asks and returns the
    hours that the portal grants.
    """

    __test__ = False

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.url = ""
        self.experiments: dict[str, dict[str, Any]] = {}
        self.faults: dict[tuple[str, str], list[Fault]] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.polls = 1
        self.date = DATE
        self.grants: Callable[[int], int] = lambda hours: hours
        self.gone_after = 1  # how many times an experiment can still be read after its deletion was requested
        self.manifests = {URN: two_nodes()}
        self.changed = threading.Condition()

    def asked(self, method: str) -> list[tuple[str, str, Any]]:
        """The recorded requests with this HTTP method."""
        return [request for request in self.requests if request[0] == method]

    def fail(self, method: str, end: str, *faults: Fault) -> None:
        """Inject faults into the next requests with this HTTP method whose path ends with `end`."""
        self.faults.setdefault((method, end), []).extend(faults)

    def next_fault(self, method: str, path: str) -> Fault | None:
        for (of_method, end), faults in self.faults.items():
            if of_method == method and path.endswith(end) and faults:
                return faults.pop(0)
        return None

    def add(self, name: str = "bench", project: str = "myproj", **more: Any) -> dict[str, Any]:
        """Add an experiment, as a POST request does."""
        made = {
            "id": UUID,
            "name": name,
            "project": project,
            "creator": "alice",
            "profile_name": "small-lan",
            "profile_project": "PortalProfiles",
            "created_at": BORN,
            "started_at": None,
            "expires_at": END,
            "status": "provisioning",
            "url": f"https://www.cloudlab.us/status.php?uuid={UUID}",
            "aggregates": {},
            **more,
        }
        self.experiments[made["id"]] = made
        return made

    def found(self, which: str) -> dict[str, Any] | None:
        for made in self.experiments.values():
            if which in (made["id"], f"{made['project']},{made['name']}"):
                return made
        return None

    def step(self, made: dict[str, Any]) -> None:
        """Advance the state of an experiment. Called once for each time that the experiment is read."""
        if made["status"] == "terminating":
            self.gone_after -= 1
            if self.gone_after < 0:
                del self.experiments[made["id"]]
        elif made["status"] == "provisioning":
            self.polls -= 1
            ready = self.polls < 0
            made["status"] = "ready" if ready else "provisioning"
            made["aggregates"] = {URN: {"urn": URN, "name": None, "status": made["status"], "nodes": nodes(ready)}}


def two_nodes(site: str = "wisc.cloudlab.us") -> str:
    """A manifest of two nodes. Their logins are at a closed port of this machine, so no test contacts another machine."""
    made = [node(name, number, site=site, host="127.0.0.1") for number, name in enumerate(("node0", "node1"), start=1)]
    return manifest(*made, lan(["node0", "node1"])).replace('port="22"', 'port="1"')


def nodes(ready: bool, **more: Any) -> list[dict[str, Any]]:
    """The part of the portal's answer about an experiment that describes its two nodes.

    ready: whether both nodes have booted; False: the second node is still booting.
    """
    up = {"status": "ready", "state": "started", "rawstate": "ISUP", "startup_status": None, "urn": URN}
    boots = {**up, "status": "booting", "state": "started", "rawstate": "BOOTING"}
    return [{"client_id": "node0", **up}, {"client_id": "node1", **(up if ready else boots), **more}]


class Server(ThreadingHTTPServer):
    """The HTTP server of the stand-in portal. A connection that a client breaks off is not reported as an error."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers one request to the stand-in portal. The state of the portal is in the server's attribute `portal`."""

    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: Any) -> None:
        pass

    def date_time_string(self, timestamp: Any = None) -> str:
        date: str = self.server.portal.date
        return date

    def handle_one(self) -> None:
        portal: TestPortal = self.server.portal
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        path = unquote(self.path)
        with portal.changed:
            portal.requests.append((self.command, path, body))
            portal.changed.notify_all()
            fault = portal.next_fault(self.command, path)
        if fault is not None:
            fault(self)
            return
        if not path.startswith(f"{portal.prefix}/"):
            self.send(404, b"<html>no such page</html>")
            return
        path = path.removeprefix(portal.prefix)
        if path == "/version":
            self.answer(200, {"major": 1, "minor": 0, "patch": 0, "version": "1.0.0"})
        elif self.headers.get("X-Api-Token") != TOKEN:
            self.answer(401, {"code": 401, "error": "Unauthenticated request"})
        else:
            self.api(portal, path, body)

    do_GET = do_POST = do_PUT = do_DELETE = handle_one  # noqa: N815

    def api(self, portal: TestPortal, path: str, body: Any) -> None:
        if path == "/tokens/this":
            self.answer(200, {"id": UUID, "user": "alice", "role": "user", "scope": "global"})
        elif path == "/experiments" and self.command == "POST":
            if not all(isinstance(value, str) for value in body["bindings"].values()) or not isinstance(body["duration"], int):
                self.answer(400, {"code": 400, "error": "Malformed request", "errors": ["bindings are strings"]})
            elif portal.found(f"{body['project']},{body['name']}"):
                self.answer(400, {"code": 400, "error": "Experiment name is already in use"})
            else:
                wanted = {key: body[key] for key in ("name", "project", "profile_name", "profile_project", "bindings")}
                self.answer(201, portal.add(**wanted))
        else:
            which, _, rest = path.removeprefix("/experiments/").partition("/")
            made = portal.found(which)
            if made is None:
                self.answer(404, NO_SUCH)
            elif rest == "manifests":
                self.answer(200, portal.manifests)
            else:
                self.experiment(portal, made, body)

    def experiment(self, portal: TestPortal, made: dict[str, Any], body: Any) -> None:
        if self.command == "DELETE":
            made["status"] = "terminating"
            self.send(204, b"")
        elif self.command == "PUT":
            import datetime

            end = datetime.datetime.fromisoformat(made["expires_at"])
            made["expires_at"] = (end + datetime.timedelta(hours=portal.grants(body["extend_by"]))).isoformat()
            self.answer(200, made)
        else:
            portal.step(made)
            still = made["id"] in portal.experiments
            self.answer(200 if still else 404, made if still else NO_SUCH)

    def answer(self, status: int, document: Any) -> None:
        self.send(status, json.dumps(document).encode())

    def send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def status(code: int, error: str = "", **headers: str) -> Fault:
    """A fault: answer with this HTTP status and error text."""
    return lambda handler: handler.send(code, json.dumps({"code": code, "error": error}).encode(), **headers)


def truncated(handler: Handler) -> None:
    """A fault: announce more bytes than are sent."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"id": "e017')
    handler.close_connection = True


def half_document(handler: Handler) -> None:
    """A fault: send a complete answer whose content is half a JSON document."""
    handler.send(200, b'{"id": "e0174522-6bdc-11f0-bc80-e44')


def carried_out_then(fault: Fault) -> Fault:
    """A fault: carry out the request, then answer with another fault."""

    def carry_out(handler: Handler) -> None:
        portal: TestPortal = handler.server.portal
        _method, path, body = portal.requests[-1]
        send = handler.send
        handler.send = lambda *_content, **_headers: None  # type: ignore[method-assign]
        handler.api(portal, path.removeprefix(portal.prefix), body)
        handler.send = send  # type: ignore[method-assign]
        fault(handler)

    return carry_out


@contextmanager
def serve(folder: Path) -> Iterator[TestPortal]:
    """Yield a stand-in portal that answers requests at its `url` during the block.

    folder: gets the private key and the certificate of the server.
    """
    key, made = certificate(folder)
    portal = TestPortal()
    server = Server(("127.0.0.1", 0), Handler)
    server.portal = portal  # type: ignore[attr-defined]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    portal.url = f"https://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield portal
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def hung_up(handler: Handler) -> None:
    """A fault: close the connection without an answer."""
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def silent(handler: Handler) -> None:
    """A fault: never answer. The connection stays open until the client closes it."""
    handler.connection.recv(1)
    handler.close_connection = True
