"""A client of the CloudLab portal's API, over https only. The client has one method per request; each failure is one sentence.

A request that changes nothing is repeated a few times while the portal is overloaded or does not answer, and each repetition
is reported. A request that changes something is repeated only if the portal did nothing: if it answers with status 429, or if
no connection was made. If the result is not known, `OutcomeUnknown` is raised, and the caller asks what the portal did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import msgspec

from provision.cloudlab.portal_answers import PortalExperiment, PortalFault, PortalVersion, TokenOwner
from provision.cloudlab.token import DEFAULT_URL, TOKEN_HELP, Token
from shardlab.errors import InputError, MissingExtra, ShardlabError
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.terminal import moments

PATH_PREFIXES = ("", "/portal/api")  # published clients use different prefixes for the paths
BACKOFF_S = (2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
MOST_RETRY_AFTER_S = 120.0
CONNECT_S = 30.0
TIMEOUT_S = 60.0  # the time limit for each part of an answer
MOST_ANSWER_S = 300.0  # the time limit for a whole answer
CLOCK_TOLERANCE = timedelta(minutes=5)  # allowed difference between the clocks of this machine and of the portal
MOST_ERROR_CHARACTERS = 1000  # the most characters of an error of the portal that are shown
MOST_BYTES = 64 << 20  # the largest allowed answer; an answer may contain the manifests of several sites

CREATION_REQUEST = "the creation of the experiment"
REFUSAL_STATUSES = (400, 401, 403, 404, 422)  # statuses of HTTP: the portal understood the request and will not carry it out

T = TypeVar("T")
PrintSentence = Callable[[str], None]


class PortalError(ShardlabError):
    """The portal refused a request, or cannot be used. status: the HTTP status; None: there is no answer."""

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


class NoExperiment(PortalError):
    """Raised if the portal does not have the experiment (HTTP 404)."""


class OutcomeUnknown(PortalError):
    """Raised if no usable answer came, so that it is not known whether the portal carried out the request."""


class NoConnection(PortalError):
    """Raised if the portal cannot be reached, so that nothing was sent."""


@contextmanager
def refusal_as_input_error() -> Iterator[None]:
    """In this block, a request that the portal refuses raises InputError, which means that nothing was changed."""
    try:
        yield
    except PortalError as error:
        if error.status in REFUSAL_STATUSES and not isinstance(error, NoExperiment):
            raise InputError(str(error)) from None
        raise


class PortalAnswer(msgspec.Struct, frozen=True):
    """An answer of the portal as it was received."""

    status: int
    body: bytes
    date: str | None
    """The portal's own time, from the header Date."""
    retry_after: str | None


class Portal:
    """A connection to the portal for one user. Use it as a context manager, which closes the connection."""

    def __init__(self, url: str | None, token: Token, say: PrintSentence, sleep: Callable[[float], None] = time.sleep) -> None:
        """Check the URL and prepare the connection; nothing is sent.

        url: the URL of the portal; None: the URL of CloudLab. If the URL has a path, all requests begin with this path.
        say: is called with a sentence for each repeated request. sleep: waits for a number of seconds.
        Raises InputError if the URL is not https, and MissingExtra if httpx is not installed.
        """
        try:
            import httpx
        except ModuleNotFoundError:
            raise MissingExtra("the CloudLab portal", "httpx") from None
        self.url = (url or DEFAULT_URL).rstrip("/")
        url_parts = urlsplit(self.url)
        if url_parts.scheme != "https" or not url_parts.hostname:
            raise InputError(f"cloudlab.portal_url: found {self.url}. Allowed: https://, because the token is sent there.")
        try:
            url_parts.hostname.encode("idna")
            _ = url_parts.port
        except ValueError as error:  # an invalid URL; UnicodeError is a ValueError, too
            raise InputError(
                f"cloudlab.portal_url: found {self.url}, which is no address ({error}). Allowed: an address such as "
                f"{DEFAULT_URL}."
            ) from None
        self._path_prefix = "" if url_parts.path else None  # the prefix of all paths; None: not known yet
        self._token, self._print_sentence, self._sleep = token, say, sleep
        self.last_date_header: str | None = None
        self._clocks_differ = False  # whether a difference of the clocks was already reported
        # SSL_CERT_FILE and SSL_CERT_DIR choose the trusted certificates. Redirects are not followed: they would get the token.
        try:
            self._client = httpx.Client(
                verify=httpx.create_ssl_context(), timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_S), follow_redirects=False
            )
        except (OSError, ValueError, ImportError) as error:
            raise InputError(f"SSL_CERT_FILE, SSL_CERT_DIR or a proxy of the environment cannot be used: {error}.") from None

    def __enter__(self) -> Portal:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._client.close()

    def pause(self, pause_s: float) -> None:
        """Wait `pause_s` seconds before the next request to the portal."""
        self._sleep(pause_s)

    def compare_clocks(self) -> None:
        """Warn once if the clocks of this machine and of the portal differ: then the remaining time of the lease is wrong."""
        portal_time, own_time = parse_http_date(self.last_date_header), datetime.now(UTC)
        if portal_time is not None and abs(own_time - portal_time) > CLOCK_TOLERANCE and not self._clocks_differ:
            self._clocks_differ = True
            direction = "behind" if own_time < portal_time else "ahead of"
            gap_text = moments.format_duration(abs(own_time - portal_time).total_seconds())
            self._print_sentence(
                f"warning: the clock of this machine is {gap_text} {direction} that of {self._host}, so the time until the "
                "end of the lease is wrong by as much. Set the clock."
            )

    def fetch_user_name(self) -> str | None:
        """The name of the user to whom the token belongs; None if the portal does not state the name."""
        try:
            return self._decode(TokenOwner, self._send("GET", "/tokens/this", "who the token belongs to")).user
        except NoExperiment:  # an older portal does not know this request and answers with HTTP 404
            return None

    def create_experiment(self, request_body: Mapping[str, Any]) -> PortalExperiment:
        """Create an experiment. Raises PortalError, and OutcomeUnknown if it may have been created."""
        portal_answer = self._send("POST", "/experiments", CREATION_REQUEST, request_body)
        return self._decode(PortalExperiment, portal_answer)

    def find_experiment(self, identifier: str) -> PortalExperiment | None:
        """The experiment with its nodes; None if the portal has no such experiment. identifier: the uuid of the experiment, or
        PROJECT,NAME. Raises PortalError."""
        try:
            return self._decode(PortalExperiment, self._send("GET", f"/experiments/{identifier}", "the experiment"))
        except NoExperiment:
            return None

    def fetch_manifests(self, uuid: str) -> dict[str, str]:
        """The manifests of an experiment, by URN of the aggregate. Raises PortalError."""
        return self._decode(dict[str, str], self._send("GET", f"/experiments/{uuid}/manifests", "the manifests"))

    def request_extension(self, uuid: str, hours: int, reason: str) -> None:
        """Ask for more hours for an experiment. Its field `expires_at` then shows the granted hours. Raises PortalError."""
        self._send("PUT", f"/experiments/{uuid}", "the extension", {"extend_by": hours, "reason": reason})

    def request_termination(self, uuid: str) -> None:
        """Ask the portal to terminate an experiment. It exists until the method `find_experiment` returns None.

        Raises PortalError, and NoExperiment.
        """
        self._send("DELETE", f"/experiments/{uuid}", "the termination")

    def _send(self, method: str, path: str, request_name: str, request_body: Mapping[str, Any] | None = None) -> PortalAnswer:
        """Send a request and return its successful answer. request_name: a phrase that names the request in errors.

        Raises PortalError.
        """
        if self._path_prefix is None:
            self._path_prefix = self._find_prefix()
        return self._send_with_retries(method, f"{self._path_prefix}{path}", request_name, request_body)

    def _find_prefix(self) -> str:
        for path_prefix in PATH_PREFIXES:
            try:
                version_answer = self._send_with_retries("GET", f"{path_prefix}/version", "its version", None)
                get_decoder(PortalVersion).decode(version_answer.body)
            except DECODE_FAULTS:  # the answer is a page of a web server, not of the portal's API
                continue
            except PortalError as error:
                if error.status is None or not (error.status < 400 or error.status == 404):
                    raise
                continue
            return path_prefix
        tried_paths = ", ".join(f"{path_prefix}/version" for path_prefix in PATH_PREFIXES)
        raise PortalError(
            f"{self.url}: is no portal that we know: it has none of {tried_paths}. Set cloudlab.portal_url with its path."
        )

    def _send_with_retries(self, method: str, path: str, request_name: str, payload: Mapping[str, Any] | None) -> PortalAnswer:
        """Send a request, and repeat it where the docstring of this file allows it. Returns the successful answer.

        Raises PortalError.
        """
        for pause_s in (*BACKOFF_S, None):
            try:
                answer = self._send_once(method, path, request_name, payload)
            except (NoConnection, OutcomeUnknown) as error:
                was_reached = self.last_date_header is not None
                may_repeat = was_reached if isinstance(error, NoConnection) else method == "GET"
                if not may_repeat or pause_s is None:
                    raise
                failure_reason = str(error)
            else:
                is_overloaded = answer.status == 429 or (answer.status >= 500 and method == "GET")
                if not is_overloaded or pause_s is None:
                    return answer if 200 <= answer.status < 300 else self._raise_refusal(answer, request_name)
                failure_reason = f"{self._host} is overloaded (HTTP {answer.status})."
                pause_s = _choose_pause_s(answer, pause_s)
            self._print_sentence(f"{failure_reason} Asking again for {request_name} in {pause_s:g} s.")
            self._sleep(pause_s)
        raise AssertionError("the last turn returns or raises")

    def _send_once(self, method: str, path: str, request_name: str, request_body: Mapping[str, Any] | None) -> PortalAnswer:
        """Send a request once and read the whole answer, whatever its status.

        Raises PortalError if nothing was sent, and OutcomeUnknown if the request was sent but no complete answer came.
        """
        import httpx

        headers = {"X-Api-Elaborate": "true", "Accept-Encoding": "identity"}
        if self._path_prefix is not None:  # else this request only asks whether a portal is there
            headers["X-Api-Token"] = self._token.reveal()
        deadline = time.monotonic() + MOST_ANSWER_S
        try:
            with self._client.stream(method, f"{self.url}{path}", json=request_body, headers=headers) as response:
                answer_body = bytearray()
                for body_part in response.iter_bytes():
                    answer_body += body_part
                    if len(answer_body) > MOST_BYTES or time.monotonic() > deadline:
                        limit_text = f"{MOST_BYTES >> 20} MiB" if len(answer_body) > MOST_BYTES else f"{MOST_ANSWER_S:g} s"
                        raise OutcomeUnknown(f"{self._host}: the answer to {request_name} goes on beyond {limit_text}.")
                self.last_date_header = response.headers.get("Date") or self.last_date_header
                retry_after = response.headers.get("Retry-After")
                return PortalAnswer(response.status_code, bytes(answer_body), self.last_date_header, retry_after)
        except httpx.ConnectTimeout:
            raise NoConnection(f"{self._host}: does not accept a connection within {CONNECT_S:g} s. {NOTHING_SENT}") from None
        except (httpx.ConnectError, httpx.ProxyError) as error:  # if a proxy opens no connection, the portal received nothing
            raise self._make_connection_error(str(error)) from None
        except httpx.TimeoutException:
            raise OutcomeUnknown(f"{self._host}: did not answer to {request_name} within {TIMEOUT_S:g} s.") from None
        except httpx.HTTPError as error:
            raise OutcomeUnknown(
                f"{self._host}: the answer to {request_name} is truncated ({self._token.hide(str(error))[:200]})."
            ) from None

    def _make_connection_error(self, error_text: str) -> PortalError:
        if "SSL" in error_text or "CERTIFICATE" in error_text:
            return PortalError(
                f"{self._host}: its certificate is not trusted, or it does not speak TLS ({error_text[:200]}). {NOTHING_SENT} "
                "If an authority of its own signed the certificate, set SSL_CERT_FILE to the certificate of this authority."
            )
        return NoConnection(f"{self._host}: cannot be reached ({error_text[:200]}). {NOTHING_SENT}")

    def _raise_refusal(self, portal_answer: PortalAnswer, request_name: str) -> NoReturn:
        """Raise PortalError for an answer whose status is not a success. request_name: names the request in the error."""
        error_text = self._extract_error_text(portal_answer.body)
        status = portal_answer.status
        if status == 401:
            raise PortalError(
                f"{self._host}: does not accept the token of {self._token.source} (HTTP 401{error_text}). A token is valid for "
                f"two months, and a new one revokes it. {TOKEN_HELP}",
                status,
            )
        if status == 403:
            raise PortalError(
                f"{self._host}: the user of the token may not do this: {request_name} (HTTP 403{error_text}). Allowed: a "
                "member of the project.",
                status,
            )
        if status == 404 and request_name != CREATION_REQUEST:
            raise NoExperiment(f"{self._host}: has no such experiment (HTTP 404{error_text}).", status)
        if status == 429:
            raise PortalError(
                f"{self._host}: is overloaded (HTTP 429{error_text}), also after {len(BACKOFF_S)} repetitions. Nothing was "
                "changed by this request; run the same command again later.",
                status,
            )
        if status >= 500:
            raise OutcomeUnknown(f"{self._host}: failed with {request_name} (HTTP {status}{error_text}).", status)
        if status < 400:
            raise PortalError(
                f"{self._host}: answers with HTTP {status}, which is no answer of the API, and redirects are not followed. Set "
                "cloudlab.portal_url to the address of the API.",
                status,
            )
        raise PortalError(f"{self._host}: refuses {request_name} (HTTP {status}{error_text}).", status)

    def _extract_error_text(self, answer_body: bytes) -> str:
        try:
            message = get_decoder(PortalFault).decode(answer_body).message
        except DECODE_FAULTS:
            return ""
        shown_text = self._token.hide(message)[:MOST_ERROR_CHARACTERS]  # first hides the token: half a token would not be found
        return f": {shown_text.rstrip('.')}" if shown_text else ""

    def _decode(self, result_type: type[T], portal_answer: PortalAnswer) -> T:
        try:
            return get_decoder(result_type).decode(portal_answer.body)
        except DECODE_FAULTS as error:
            raise OutcomeUnknown(
                f"{self._host}: its answer is truncated or is not of the published shape "
                f"({self._token.hide(str(error))[:200]})."
            ) from None

    @property
    def _host(self) -> str:
        return f"the portal {urlsplit(self.url).netloc}"


NOTHING_SENT = "Nothing was sent."


def _choose_pause_s(answer: PortalAnswer, min_pause_s: float) -> float:
    """The seconds to wait before the request is repeated, from the answer's header Retry-After.

    The header has a number or a date of the portal's clock. The result is at least `min_pause_s`, at most MOST_RETRY_AFTER_S.
    """
    retry_header = answer.retry_after or ""
    if retry_header.isascii() and retry_header.isdigit():
        requested_s = float(retry_header[:9])
    elif (retry_at := parse_http_date(retry_header)) is not None and (answered_at := parse_http_date(answer.date)) is not None:
        requested_s = (retry_at - answered_at).total_seconds()
    else:
        requested_s = 0.0
    return min(max(requested_s, min_pause_s), MOST_RETRY_AFTER_S)


def parse_http_date(date_header: str | None) -> datetime | None:
    """The time in a header such as Date; None if it cannot be read. A time without a zone is read as UTC."""
    try:
        http_time = parsedate_to_datetime(date_header or "")
        return http_time.replace(tzinfo=UTC) if http_time.tzinfo is None else http_time.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
