"""The client of the portal: it uses only https, keeps the token secret, and has a clear message for each failure."""

import logging
import re
import socket
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from support_portal import (
    TOKEN,
    URN,
    UUID,
    certificate,
    half_document,
    hung_up,
    serve,
    silent,
    status,
    truncated,
)

from jobs import run_queue
from provision.cloudlab import portal as client
from provision.cloudlab import token
from provision.cloudlab.portal import NoConnection, OutcomeUnknown, Portal, PortalError
from provision.cloudlab.token import Token
from shardlab.errors import InputError
from shardlab.runs.rundir import RunDir

REQUEST = {
    "name": "bench",
    "project": "myproj",
    "profile_name": "small-lan",
    "profile_project": "PortalProfiles",
    "duration": 16,
    "bindings": {"nodeCount": "2"},
}


@pytest.fixture
def there(tmp_path, monkeypatch):
    folder = tmp_path / "portal"
    folder.mkdir()
    with serve(folder) as portal:
        monkeypatch.setenv("SSL_CERT_FILE", str(folder / "certificate.pem"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        yield portal


class Asked:
    """A client of the portal.

    said: the messages of the client. pauses: the seconds for which the client would have waited.
    """

    def __init__(self, url, secret=TOKEN):
        self.said, self.pauses = [], []
        self.portal = Portal(url, Token(secret, "CLOUDLAB_TOKEN"), self.said.append, self.pauses.append)

    def refused(self, kind=PortalError):
        with self.portal as portal, pytest.raises(kind) as caught:
            portal.find_experiment(UUID)
        return str(caught.value)


def test_an_experiment_is_created_read_extended_and_terminated(there):
    with Asked(there.url).portal as portal:
        assert portal.fetch_user_name() == "alice"
        assert portal.find_experiment("myproj,bench") is None
        made = portal.create_experiment(REQUEST)
        assert (made.id, made.name, made.status) == (UUID, "bench", "provisioning")
        assert [node.missing for node in portal.find_experiment(UUID).nodes] == ["", "status booting, rawstate BOOTING"]
        assert [node.missing for node in portal.find_experiment("myproj,bench").nodes] == ["", ""]
        assert list(portal.fetch_manifests(UUID)) == [URN]
        portal.request_extension(UUID, 5, "a deadline")
        assert portal.find_experiment(UUID).expires_at == "2031-05-02T09:00:00+00:00"
        portal.request_termination(UUID)
        assert portal.find_experiment(UUID).status == "terminating"
        assert portal.find_experiment(UUID) is None
    assert there.asked("PUT")[0][2] == {"extend_by": 5, "reason": "a deadline"}


@pytest.mark.parametrize("prefix", ["", "/portal/api"])
def test_the_prefix_of_the_paths_is_found_by_the_version(there, prefix):
    there.prefix = prefix
    asked = Asked(there.url)
    with asked.portal as portal:
        assert portal.fetch_user_name() == "alice"
        assert portal.fetch_user_name() == "alice"
    versions = [path for _, path, _ in there.requests if path.endswith("/version")]
    assert versions == ["/version", "/portal/api/version"][: 1 + bool(prefix)]


def test_a_path_in_the_portals_address_is_put_before_each_request(there):
    """If the portal's address has a path, the client puts this path before the path of each request."""
    there.prefix = "/elsewhere"
    with Asked(f"{there.url}/elsewhere/").portal as portal:
        assert portal.fetch_user_name() == "alice"
    assert [path for _, path, _ in there.requests] == ["/elsewhere/tokens/this"]


def test_a_server_that_is_no_portal_is_reported(there):
    there.prefix = "/elsewhere"
    assert "is no portal that we know: it has none of /version, /portal/api/version" in Asked(there.url).refused()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://127.0.0.1", "127.0.0.1", "https://"])
def test_the_token_goes_to_https_alone(url, there):
    with pytest.raises(InputError, match="Allowed: https://"):
        Asked(url)


@pytest.mark.parametrize("url", ["https://a..b", "https://.", f"https://{'a' * 70}.org", "https://127.0.0.1:99999"])
def test_an_invalid_portal_address_is_refused(url, there):
    with pytest.raises(InputError, match=r"cloudlab.portal_url: found https://.*Allowed: an address such as"):
        Asked(url)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (status(400, "no such profile"), "refuses the experiment (HTTP 400: no such profile)"),
        (status(401, "expired"), "does not accept the token of CLOUDLAB_TOKEN (HTTP 401: expired)"),
        (status(403, "not a member"), "may not do this: the experiment (HTTP 403: not a member)"),
        (status(302, Location="http://127.0.0.1:1/"), "redirects are not followed"),
        (status(418), "refuses the experiment (HTTP 418)"),
        (half_document, "is truncated or is not of the published shape"),
        (lambda handler: handler.send(200, b'{"id": "../../etc"}'), "is not of the published shape"),
        (lambda handler: handler.send(200, f'{{"id": "{UUID}\\n"}}'.encode()), "is not of the published shape"),
        (lambda handler: handler.send(200, b"[" * 100_000), "is not of the published shape"),
    ],
)
def test_a_permanent_error_is_reported_without_a_retry(there, fault, says):
    """If a repetition of the request cannot help, the client reports the failure without a pause."""
    there.fail("GET", UUID, fault)
    asked = Asked(there.url)
    assert says in asked.refused()
    assert asked.pauses == []


@pytest.mark.parametrize("fault", [status(429, "load"), status(500), status(502), truncated, hung_up])
def test_a_question_is_repeated_visibly_and_a_few_times(there, fault):
    there.add()
    there.fail("GET", UUID, fault, fault)
    asked = Asked(there.url)
    with asked.portal as portal:
        assert portal.find_experiment(UUID).id == UUID
    assert asked.pauses == [2.0, 4.0]
    assert all("Asking again for the experiment in" in line for line in asked.said)
    there.fail("GET", UUID, *[fault] * (len(client.BACKOFF_S) + 1))
    asked = Asked(there.url)
    asked.refused()
    assert asked.pauses == list(client.BACKOFF_S)


def test_the_client_waits_as_long_as_the_portal_says_up_to_a_limit(there):
    there.add()
    there.fail("GET", UUID, status(429, Retry_After="7"), status(429, Retry_After="999999"), status(429, Retry_After="soon"))
    asked = Asked(there.url)
    with asked.portal as portal:
        portal.find_experiment(UUID)
    assert asked.pauses == [7.0, client.MOST_RETRY_AFTER_S, 8.0]


def test_a_retry_waits_until_the_portals_date_and_at_least_our_own_pause(there):
    there.add()
    dates = ["Thu, 01 May 2031 12:00:45 GMT", "Thu, 01 May 2031 11:00:00 -0000", "Fri, 31 Dec 9999 23:59:59 -2359"]
    there.fail("GET", UUID, status(429, Retry_After="0"), *[status(429, Retry_After=date) for date in dates])
    asked = Asked(there.url)
    with asked.portal as portal:
        portal.find_experiment(UUID)
    assert asked.pauses == [2.0, 45.0, 8.0, 16.0]  # the portal's own clock says 12:00:00


@pytest.mark.parametrize(("minutes", "says"), [(4, ""), (-4, ""), (6, "behind"), (-181, "ahead of"), (None, "")])
def test_a_clock_that_differs_from_the_portals_clock_is_reported(there, minutes, says):
    there.date = "no date"
    if minutes is not None:
        there.date = format_datetime(datetime.now(UTC) + timedelta(minutes=minutes, seconds=30), usegmt=True)
    asked = Asked(there.url)
    with asked.portal as portal:
        portal.compare_clocks()
        assert asked.said == []  # no request was sent yet
        portal.fetch_user_name()
        portal.compare_clocks()
        portal.compare_clocks()
    if says:
        (said,) = asked.said
        assert re.search(rf"the clock of this machine is ([56]m|3h 0)\S* .*{says} that of the portal 127.0.0.1", said)
    else:
        assert asked.said == []


def test_a_creation_is_repeated_only_if_the_portal_did_nothing(there):
    """The client repeats a POST only after status 429. After other faults it does not know whether the experiment exists."""
    there.fail("POST", "/experiments", status(429, "Load average too high"))
    asked = Asked(there.url)
    with asked.portal as portal:
        assert portal.create_experiment(REQUEST).id == UUID
    assert asked.pauses == [2.0]
    there.experiments.clear()
    for fault in (status(500, "oops"), truncated, half_document):
        there.fail("POST", "/experiments", fault)
        asked = Asked(there.url)
        with asked.portal as portal, pytest.raises(OutcomeUnknown):
            portal.create_experiment(REQUEST)
        assert asked.pauses == []


def test_a_creation_to_which_the_portal_answers_404_is_no_missing_experiment(there):
    """A POST with the answer 404 means that the project does not exist, and not the experiment."""
    there.fail("POST", "/experiments", status(404, "No such project"))
    with Asked(there.url).portal as portal, pytest.raises(PortalError) as caught:
        portal.create_experiment(REQUEST)
    assert "refuses the creation of the experiment (HTTP 404: No such project)" in str(caught.value)


def test_a_portal_that_does_not_answer_is_reported(there, monkeypatch):
    monkeypatch.setattr(client, "TIMEOUT_S", 0.2)
    there.fail("POST", "/experiments", silent)
    with (
        Asked(there.url).portal as portal,
        pytest.raises(OutcomeUnknown, match=r"did not answer to the creation .* within 0.2 s"),
    ):
        portal.create_experiment(REQUEST)


def test_an_answer_without_an_end_is_cut(there, monkeypatch):
    """The client reads at most MOST_BYTES of an answer."""
    monkeypatch.setattr(client, "MOST_BYTES", 1000)
    there.fail("GET", "/manifests", *[lambda handler: handler.send(200, b" " * 5000)] * 7)
    with Asked(there.url).portal as portal, pytest.raises(OutcomeUnknown, match="goes on beyond"):
        portal.fetch_manifests(UUID)


def test_nothing_is_sent_to_a_server_that_is_not_trusted(there, tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate(tmp_path)[1]))
    says = Asked(there.url).refused()
    assert "its certificate is not trusted" in says
    assert "set SSL_CERT_FILE" in says
    assert there.requests == []
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "no-such-file"))
    with pytest.raises(InputError, match="SSL_CERT_FILE, SSL_CERT_DIR or a proxy of the environment cannot be used"):
        Asked(there.url)


def test_a_server_for_another_name_is_not_trusted(there):
    assert "its certificate is not trusted" in Asked(there.url.replace("127.0.0.1", "localhost")).refused()
    assert there.requests == []


def test_a_proxy_that_refuses_the_portal_is_reported_and_nothing_is_sent(there, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def refuse():
            connection, _ = proxy.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=refuse)
        thread.start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("NO_PROXY")
        monkeypatch.delenv("no_proxy", raising=False)
        asked = Asked(there.url)
        says = asked.refused(NoConnection)
        thread.join()
    assert "cannot be reached (403 Forbidden). Nothing was sent." in says
    assert asked.pauses == []


def test_an_unreachable_portal_is_reported_at_once(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    asked = Asked("https://127.0.0.1:1")
    assert "the portal 127.0.0.1:1: cannot be reached" in asked.refused(NoConnection)
    assert asked.pauses == []


def test_error_messages_do_not_contain_the_token(there, caplog):
    caplog.set_level(logging.DEBUG)
    echo = status(400, f"bad token {TOKEN}")
    for length in range(980, 1000):  # a long message is cut, and the token may be where it is cut
        there.fail("GET", UUID, status(400, "x" * length + TOKEN))
        assert TOKEN[:2] not in Asked(there.url).refused()
    there.fail("GET", UUID, status(401, f"{TOKEN} expired"), echo, lambda handler: handler.send(200, f'"{TOKEN}"'.encode()))
    texts = []
    for _ in range(3):
        asked = Asked(there.url)
        texts += [asked.refused(), *asked.said, repr(asked.portal), repr(asked.portal._client), repr(vars(asked.portal))]
    assert any("bad token [token]" in text for text in texts)
    assert TOKEN not in "".join(texts)
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(Token(TOKEN, "a file")) + str(Token(TOKEN, "a file"))
    assert all(TOKEN not in path for _, path, _ in there.requests)


def test_a_run_does_not_get_the_token(tmp_path, monkeypatch):
    """The script of a run gets its environment from the runner, and over SSH this environment is sent to the nodes."""
    monkeypatch.setenv("CLOUDLAB_TOKEN", TOKEN)
    monkeypatch.setenv("KEPT", "yes")
    (tmp_path / run_queue.SCRIPT_NAME).write_text("env\n")
    folder = RunDir(tmp_path)
    assert run_queue.start_script(folder).wait() == 0
    said = (folder.log / "script.log").read_text()
    assert "KEPT=yes\n" in said
    assert TOKEN not in said


def test_the_token_is_that_of_the_environment_else_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CLOUDLAB_TOKEN", raising=False)
    assert token.read_token() is None
    path = tmp_path / ".config/shardlab/cloudlab-token"
    path.parent.mkdir(parents=True)
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    assert (token.read_token().reveal(), token.read_token().source) == (TOKEN, str(path))
    monkeypatch.setenv("CLOUDLAB_TOKEN", "other")
    assert (token.read_token().reveal(), token.read_token().source) == ("other", "CLOUDLAB_TOKEN")


def test_a_token_goes_only_to_the_portal_that_it_was_stored_for(tmp_path, monkeypatch):
    path = _file(tmp_path, monkeypatch, TOKEN.encode())
    monkeypatch.setenv("CLOUDLAB_TOKEN", TOKEN)
    assert token.read_token("https://stranger.example:43794") is None
    assert token.read_token("https://boss.emulab.net.stranger.example:43794") is None
    assert token.read_token("https://boss.emulab.net:1") is None
    path.with_name(f"{path.name}.stranger.example:43794").write_text("theirs")
    path.with_name(f"{path.name}.stranger.example:43794").chmod(0o600)
    assert token.read_token("https://stranger.example:43794/portal").reveal() == "theirs"
    assert token.read_token("https://boss.emulab.net:43794/portal").reveal() == TOKEN


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602])
def test_a_token_that_others_can_read_is_refused(mode, tmp_path, monkeypatch):
    path = _file(tmp_path, monkeypatch, TOKEN.encode())
    path.chmod(mode)
    with pytest.raises(
        InputError, match=re.escape(f"has mode {mode:04o}, so others can use the token. Allowed: 0600. Run: chmod 600 {path}")
    ):
        token.read_token()


@pytest.mark.parametrize("content", [b"", b" \n", b"two\nlines", b"a b", b"caf\xc3\xa9", b"a\0b", b"x" * 20_000])
def test_an_invalid_token_is_refused_without_showing_its_text(content, tmp_path, monkeypatch):
    _file(tmp_path, monkeypatch, content)
    with pytest.raises(InputError) as caught:
        token.read_token()
    assert str(caught.value).startswith(
        f"{tmp_path / token.TOKEN_FILE}: holds no token. Allowed: one line of visible ASCII characters."
    )


def _file(home: Path, monkeypatch, content: bytes) -> Path:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("CLOUDLAB_TOKEN", raising=False)
    path = home / token.TOKEN_FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    path.chmod(0o600)
    return path
