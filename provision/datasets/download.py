"""Downloads an archive; a broken download resumes where it stopped, and an archive is used only after it was verified."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

from shardlab.errors import InputError, ShardlabError
from shardlab.url import remove_secrets

CHUNK_BYTES = 2**20
MOST_ATTEMPTS = 5  # attempts in one command; the next command resumes the download
PAUSE_S = 1.0  # seconds before the second attempt; the pause doubles for each further attempt
STALL_S = 60.0  # an attempt fails if no byte arrives for this many seconds


def fetch_file(url: str, partial_path: Path, sha256: str, most_bytes: int) -> Path:
    """Download the rest of the archive into `partial_path`, and return it if its SHA-256 is `sha256`.

    most_bytes: the largest allowed size of the archive. Raises InputError if the archive has another SHA-256 (the partial file
    is then deleted), and ShardlabError if the download could not be completed (the partial file is then kept).
    """
    failure_text, shown_url = "", remove_secrets(url)
    for attempt in range(MOST_ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_S * 2 ** (attempt - 1))
        try:
            if _download_rest(url, partial_path, most_bytes):
                break
            failure_text = "the connection ended early"
        except urllib.error.HTTPError as error:
            error.close()  # the answer of the server, which nobody reads
            if error.code < 500 and error.code not in (408, 416, 429):
                raise InputError(f"{shown_url}: the server says {error.code} {remove_secrets(str(error.reason))}.") from None
            if error.code == 416:  # the server has no more bytes: the partial file is complete, or fails the checksum below
                break
            failure_text = f"the server says {error.code} {remove_secrets(str(error.reason))}"
        except (OSError, http.client.HTTPException) as error:
            failure_text = remove_secrets(str(getattr(error, "reason", error))) or type(error).__name__
    else:
        partial_bytes = partial_path.stat().st_size if partial_path.exists() else 0
        raise ShardlabError(
            f"{shown_url}: {failure_text}, after {partial_bytes} bytes; run the same command again to resume the download."
        )
    actual_sha256 = compute_file_sha256(partial_path)
    if actual_sha256 != sha256:
        delete_partial(partial_path)
        raise InputError(
            f"{shown_url}: its SHA-256 is {actual_sha256}. Allowed: {sha256}, as cluster.yaml says. The download was deleted."
        )
    return partial_path


def delete_partial(partial_path: Path) -> None:
    """Delete a partial file and the note beside it."""
    partial_path.unlink(missing_ok=True)
    _note_path(partial_path).unlink(missing_ok=True)


def compute_file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as hashed_file:
        return hashlib.file_digest(hashed_file, "sha256").hexdigest()


def _download_rest(url: str, partial: Path, most_bytes: int) -> bool:
    """Make one attempt to download the missing bytes. Returns whether the partial file is complete now."""
    request = urllib.request.Request(url)  # noqa: S310  # the scheme of the URL was checked when cluster.yaml was read
    received_bytes, shown_url = partial.stat().st_size if partial.exists() else 0, remove_secrets(url)
    partial_note, url_digest = _read_note(partial), hashlib.sha256(url.encode()).hexdigest()
    if received_bytes and partial_note.get("url_sha256") == url_digest:
        request.add_header("Range", f"bytes={received_bytes}-")
        if range_validator := partial_note.get("validator"):
            request.add_header("If-Range", range_validator)  # if the file at the URL changed, the server sends the whole file
    with urllib.request.urlopen(request, timeout=STALL_S) as answer:  # noqa: S310
        offset, total_bytes = _parse_byte_range(answer.status, answer.headers)
        if offset not in (0, received_bytes):
            raise InputError(f"{shown_url}: asked for the bytes from {received_bytes}, the server sent those from {offset}.")
        if total_bytes is not None and total_bytes > most_bytes:
            raise InputError(f"{shown_url}: has {total_bytes} bytes. Allowed: at most {most_bytes} for this set.")
        if not offset:
            _note_path(partial).write_text(json.dumps({"url_sha256": url_digest, "validator": _find_validator(answer.headers)}))
        with partial.open("ab" if offset else "wb") as partial_file:
            while chunk := answer.read(CHUNK_BYTES):
                if partial_file.tell() + len(chunk) > most_bytes:
                    raise InputError(f"{shown_url}: sends more than {most_bytes} bytes, the most for this set.")
                partial_file.write(chunk)
            return total_bytes is None or partial_file.tell() == total_bytes


def _parse_byte_range(http_status: int, headers: Message) -> tuple[int, int | None]:
    """Returns (the position of the first byte that the server sends, the size of the whole file or None if it is not known)."""
    if http_status == 206 and (range_match := re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))):
        return int(range_match[1]), None if range_match[2] == "*" else int(range_match[2])
    length_text = headers.get("Content-Length")
    return 0, None if length_text is None else int(length_text)


def _find_validator(headers: Message) -> str | None:
    """The value for the header If-Range: a strong ETag, otherwise the date of the last change."""
    etag = headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")


def _read_note(partial_path: Path) -> dict[str, str | None]:
    """The note about a partial file: the SHA-256 of the URL from which it comes, and the validator of the file there.

    Empty if the note does not exist or is damaged; the download then starts again.
    """
    try:
        partial_note = json.loads(_note_path(partial_path).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return partial_note if isinstance(partial_note, dict) else {}


def _note_path(partial_path: Path) -> Path:
    return partial_path.with_name(partial_path.name + ".json")
