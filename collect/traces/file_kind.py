"""Names the kind of a file that is not a trace, from its first bytes, and says what to do with it."""

from __future__ import annotations

import re
from pathlib import Path

from collect.traces.salvage import GZIP_MAGIC, TraceCutShort, read_blocks
from shardlab.files import files

_SEARCHED_BYTES = 1 << 16
_ALLOWED_FILES_TEXT = "Allowed: a Chrome trace of torch.profiler, .json or .json.gz"
_UNPACK_HELP = "unpack it first"
# (first bytes of a file, its kind, what helps)
_MAGIC_NUMBERS = (
    (b"PK\x03\x04", "a zip archive, such as torch.save writes", _UNPACK_HELP),
    (b"BZh", "compressed with bzip2", _UNPACK_HELP),
    (b"\xfd7zXZ\0", "compressed with xz", _UNPACK_HELP),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", _UNPACK_HELP),
    (b"SQLite format 3\0", "an SQLite database, such as Nsight Systems and rocprof write", "export it as a Chrome trace"),
    (b"PAR1", "a Parquet file", ""),
    (b"\x7fELF", "a program", ""),
    (b"%PDF", "a PDF document", ""),
    (b"version https://git-lfs", "a pointer of Git LFS and not the file itself", "`git lfs pull` fetches the file"),
)
_PICKLE_START = re.compile(rb"\x80[\x02-\x05][^\x00-\x08]?")
_PICKLE_OPCODES = re.compile(rb"\A(?:\((?:dp|lp)\d|c\w+[\w.]*\n\w+\n)")  # of protocol 0
_HTML_START = re.compile(rb"\A\s*(?:<!--.*?-->\s*)?<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL)
_MARKUP_START = re.compile(rb"\A\s*<")
_TAR_MAGIC_RANGE = slice(257, 262)
_JSON_LINES_START = re.compile(rb"\{[^\n]*\}[ \r]*\n\{")


def name_file_kind(path: Path) -> str:
    """A clause that says what a file without a list of events is; "" if it looks like JSON or like a damaged trace.

    Raises OSError if the file cannot be opened.
    """
    with files.open_regular(path) as file:
        first_bytes = file.read(_SEARCHED_BYTES)
    if not first_bytes:
        return f"the file is empty. {_ALLOWED_FILES_TEXT}"
    container_text = ""
    if first_bytes.startswith(GZIP_MAGIC):
        container_text = "compressed with gzip, and inside it is "
        try:
            first_bytes = next(read_blocks(path), b"")
        except TraceCutShort:
            return ""
        if not first_bytes:
            return f"the file is compressed with gzip and has nothing inside. {_ALLOWED_FILES_TEXT}"
    kind_text, help_text = _find_kind(first_bytes)
    if not kind_text:
        return ""
    return f"the file is {container_text}{kind_text}{f'; {help_text}' if help_text else ''}. {_ALLOWED_FILES_TEXT}"


def _find_kind(first_bytes: bytes) -> tuple[str, str]:
    """Returns (the kind of a file, what helps); two empty texts if it may be JSON. first_bytes: the first bytes of the file."""
    for magic_number, kind_text, help_text in _MAGIC_NUMBERS:
        if first_bytes.startswith(magic_number):
            return kind_text, help_text
    if _PICKLE_START.match(first_bytes) or _PICKLE_OPCODES.match(first_bytes):
        if b"device_traces" in first_bytes or b"segments" in first_bytes:
            return "a memory snapshot of PyTorch's allocator (a pickle)", "pytorch.org/memory_viz shows it"
        return "a Python pickle, which is not opened because it could execute code", ""
    if first_bytes[_TAR_MAGIC_RANGE] == b"ustar":
        return "a tar archive", _UNPACK_HELP
    if _HTML_START.match(first_bytes):
        return "an HTML page, such as a login or error page", "download the trace again"
    if _MARKUP_START.match(first_bytes):
        return "an XML file", ""
    stripped_start = first_bytes.lstrip(b"\xef\xbb\xbf \t\r\n")
    if _JSON_LINES_START.match(stripped_start):
        return "lines of JSON, such as a log of steps", ""
    if stripped_start[:1] in (b"{", b"[", b'"', b""):
        return ("only white space", "") if not stripped_start and len(first_bytes) < _SEARCHED_BYTES else ("", "")
    if b"\0" in first_bytes:
        return "a binary file of an unknown kind", ""
    lines = [line for line in stripped_start.splitlines() if line.strip()]
    for separator, separator_name in ((b",", "commas"), (b";", "semicolons"), (b"\t", "tabs")):
        separator_counts = {line.count(separator) for line in lines[: max(1, min(len(lines) - 1, 3))]}
        if len(separator_counts) == 1 and separator_counts != {0}:
            return f"a table with {separator_name} (CSV)", ""
    return "a text file", ""
