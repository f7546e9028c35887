"""Names the kind of a file that is not a trace, from its first bytes, and says what to do with it."""

from __future__ import annotations

import re
from pathlib import Path

from collect.traces.salvage import GZIP_MAGIC, CutShort, read_blocks
from shardlab.files import files

_SEARCHED_BYTES = 1 << 16
_ALLOWED = "Allowed: a Chrome trace of torch.profiler, .json or .json.gz"
_UNPACK = "unpack it first"
# (first bytes of a file, its kind, what helps)
_MAGIC_NUMBERS = (
    (b"PK\x03\x04", "a zip archive, such as torch.save writes", _UNPACK),
    (b"BZh", "compressed with bzip2", _UNPACK),
    (b"\xfd7zXZ\0", "compressed with xz", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", _UNPACK),
    (b"SQLite format 3\0", "an SQLite database, such as Nsight Systems and rocprof write", "export it as a Chrome trace"),
    (b"PAR1", "a Parquet file", ""),
    (b"\x7fELF", "a program", ""),
    (b"%PDF", "a PDF document", ""),
    (b"version https://git-lfs", "a pointer of Git LFS and not the file itself", "`git lfs pull` fetches the file"),
)
_PICKLE = re.compile(rb"\x80[\x02-\x05][^\x00-\x08]?")
_PICKLE_OPCODES = re.compile(rb"\A(?:\((?:dp|lp)\d|c\w+[\w.]*\n\w+\n)")  # of protocol 0
_HTML = re.compile(rb"\A\s*(?:<!--.*?-->\s*)?<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL)
_MARKUP = re.compile(rb"\A\s*<")
_TAR_MAGIC = slice(257, 262)
_JSON_LINES = re.compile(rb"\{[^\n]*\}[ \r]*\n\{")


def name_file_kind(path: Path) -> str:
    """A clause that says what a file without a list of events is; "" if it looks like JSON or like a damaged trace.

    Raises OSError if the file cannot be opened.
    """
    with files.open_regular(path) as file:
        start = file.read(_SEARCHED_BYTES)
    if not start:
        return f"the file is empty. {_ALLOWED}"
    inside = ""
    if start.startswith(GZIP_MAGIC):
        inside = "compressed with gzip, and inside it is "
        try:
            start = next(read_blocks(path), b"")
        except CutShort:
            return ""
        if not start:
            return f"the file is compressed with gzip and has nothing inside. {_ALLOWED}"
    kind, help_text = _find_kind(start)
    if not kind:
        return ""
    return f"the file is {inside}{kind}{f'; {help_text}' if help_text else ''}. {_ALLOWED}"


def _find_kind(start: bytes) -> tuple[str, str]:
    """Returns (the kind of a file, what helps); two empty texts if it may be JSON. start: the first bytes of the file."""
    for magic, kind, help_text in _MAGIC_NUMBERS:
        if start.startswith(magic):
            return kind, help_text
    if _PICKLE.match(start) or _PICKLE_OPCODES.match(start):
        if b"device_traces" in start or b"segments" in start:
            return "a memory snapshot of PyTorch's allocator (a pickle)", "pytorch.org/memory_viz shows it"
        return "a Python pickle, which is not opened because it could execute code", ""
    if start[_TAR_MAGIC] == b"ustar":
        return "a tar archive", _UNPACK
    if _HTML.match(start):
        return "an HTML page, such as a login or error page", "download the trace again"
    if _MARKUP.match(start):
        return "an XML file", ""
    stripped = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if _JSON_LINES.match(stripped):
        return "lines of JSON, such as a log of steps", ""
    if stripped[:1] in (b"{", b"[", b'"', b""):
        return ("only white space", "") if not stripped and len(start) < _SEARCHED_BYTES else ("", "")
    if b"\0" in start:
        return "a binary file of an unknown kind", ""
    lines = [line for line in stripped.splitlines() if line.strip()]
    for separator, name in ((b",", "commas"), (b";", "semicolons"), (b"\t", "tabs")):
        counts = {line.count(separator) for line in lines[: max(1, min(len(lines) - 1, 3))]}
        if len(counts) == 1 and counts != {0}:
            return f"a table with {name} (CSV)", ""
    return "a text file", ""
