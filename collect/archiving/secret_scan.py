"""Searches the files of an archive for secrets: keys of clouds, tokens of services, signed URLs, private keys and passwords.

A secret is recognized by its form, or by the name to which a value is assigned, such as HF_TOKEN. Digests, commits,
placeholders, names inside of longer words and expressions of source code are not reported.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from shardlab.errors import InputError
from shardlab.files import files
from shardlab.workspace import archive
from shardlab.workspace.archive import ArchiveIndex

BLOCK_BYTES = 1 << 20  # bytes that are read at a time
MOST_SECRET_BYTES = 1 << 12  # the largest size of a secret, and of the part of a line that names its key
MOST_NAMED_FILES = 10
SHORTEST_SECRET = 16  # the fewest characters of a value, other than a password, that counts as a secret because of its name
REMOVAL_HELP = """
Replace each secret in the workspace by the word REMOVED, and run the command again. Let jobs read their secrets from a
file that only you can read, which a line of slurm.setup may source."""
# The beginning of a word, also after an escape of JSON, such as \n, and after a color of a terminal.
_WORD_START = r"(?:(?<!\w)|(?<=\\[nrt])|(?<=\dm))"
_QUOTE = r"(?:\\*[\"']|&quot;|&#(?:34|39|x27);)?"
_KEY_PREFIXES = ("api", "access", "secret", "private", "auth", "account", "license", "kaggle")
_KEY_WORD = "".join(f"|(?<={prefix})key|(?<={prefix}[_-])key" for prefix in _KEY_PREFIXES)
_AUTH_HEADER = rf"(?i:authorization{_QUOTE}\s{{0,4}}[:=]\s{{0,4}}{_QUOTE}(?:(?:basic|bearer|token)\s+)?|{_WORD_START}bearer\s+)"
# A value that is assigned to a name, as in YAML, JSON, shell scripts and Python, or that follows an option of a command.
_ASSIGNED_VALUE = (
    rf"(?i)(?P<name>token|secret|passw(?:or)?d|passphrase|(?<=[_.-])pwd|credentials?{_KEY_WORD})(?:[_-]?\d)?"
    rf"(?:{_QUOTE}[ \t]{{0,4}}(?::=|=>|[:=])[ \t]{{0,4}}|(?P<option>[\"',\s]{{1,5}}))"
    rf"(?P<quote>{_QUOTE})(?P<value>[^\x00-\x20\"'<>\\,;&|(){{}}\[\]`]{{6,}}+)(?P<code>[(\[{{])?"
)
# (what the secret is, texts in lower case with one of which every such secret begins, pattern). A pattern is only compared
# where one of these texts is, because a search for the patterns themselves takes many times as long.
SECRET_FORMS = [
    (description, clues.encode().split(), re.compile(pattern.encode()))
    for description, clues, pattern in (
        ("a private key", "begin putty-user-key-file-",
         r"BEGIN (?:[A-Z0-9]+ ){0,4}PRIVATE KEY[A-Z ]{0,6}-{4,5}(?:\\+[nr]|\s)+(?:[A-Za-z0-9+/]{4}|\Z)|PuTTY-User-Key-File-\d"),
        ("a key of AWS", "akia asia", _WORD_START + r"A[KS]IA(?!\w*EXAMPLE)[A-Z2-7]{16}(?!\w)"),
        ("a key of Google", "aiza gocspx- ya29.", _WORD_START + r"(?:AIza[\w-]{35}|GOCSPX-[\w-]{28}|ya29\.[\w-]{30,})"),
        ("a signed URL", "ignature= sig=", r"(?:(?<=[?&;6-][Ss])ignature|(?<=[?&;6])sig)=[\w%+/.~-]{16,}"),
        ("a password in a URL", "://", r"://[^\s/?#:@'\"<]*:(?![${<*]|(?i:pass|secret|x+@))[^\s/?#@'\"<>]{3,}@"),
        ("a token of Hugging Face or W&B", "hf_ wandb_v1_", _WORD_START + r"(?:hf_[A-Za-z0-9]{30,}|wandb_v1_\w{30,})"),
        ("a token of GitHub", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
         _WORD_START + r"(?:gh[a-z]_[A-Za-z0-9]{36,}|github_pat_\w{50,})"),
        ("a token of GitLab or Slack", "glpat- gldt- glrt- glcbt- xox xapp-",
         _WORD_START + r"(?:gl[a-z]{2,3}|xox[a-z]|xapp)-(?=[\w.-]*\d)[\w.-]{15,}"),
        ("a token of a registry", "nvapi- dckr_pat_ npm_ pypi-",
         _WORD_START + r"(?:(?:nvapi-|dckr_pat_|pypi-AgE)[\w-]{20,}|npm_[A-Za-z0-9]{36})"),
        ("a key of an AI service", "sk-",
         _WORD_START + r"(?<!-)sk-(?:[0-9a-f]{32,}|or-v1-[0-9a-f]{40,}|(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,})"),
        ("a key of Stripe, SendGrid or Kaggle", 'sk_live_ rk_live_ sg. "key',
         (_WORD_START + r"(?:[rs]k_live_\w{16,}|SG\.[\w-]{16,}\.[\w-]{16,})"
         rf"|\"key{_QUOTE}\s{{0,4}}:\s{{0,4}}{_QUOTE}[0-9a-f]{{32}}(?!\w)")),
        ("the URL of a webhook", "hooks.slack.com/services/ /api/webhooks/",
         r"hooks\.slack\.com/services/T\w+/B\w+/\w{16,}|/api/webhooks/\d{6,}/[\w-]{20,}"),
        ("a password of a command", "curl sshpass",
         (rf"curl\s[^\n|;]{{0,300}}?(?<=\s)(?:-u|--user)[ =]{_QUOTE}[^\s:$<\"']+:(?![$<])[^\s\"']{{3,}}"
         rf"|sshpass\s+-p\s{{0,4}}{_QUOTE}(?![$<])[^\s\"'<]{{4,}}")),
        ("a JSON Web Token", "eyj", _WORD_START + r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
        ("a password of a login", "login api",
         (r"(?:(?<=wandb[ .])login|(?i:(?<=wandb: )api key))[^\n]{0,30}?(?<!\w)[0-9a-f]{40}(?!\w)"
         r"|login\s+\S+\s+password\s+(?![<$])\S{6,}")),
        ("a header that authorizes", "authorization bearer", _AUTH_HEADER + r"(?=[\w.~+/=-]*(?:\d|[a-z][A-Z]))[\w.~+/=-]{12,}"),
        ("a value whose name says that it is secret", "token secret passw passphrase pwd credential key", _ASSIGNED_VALUE),
    )
]  # fmt: skip
# Values that are no secrets: variables and placeholders, paths and URLs, names of variables, and the tokens with which shardlab
# marks its jobs, such as `quickstart.0123456789`.
_HARMLESS_VALUE = re.compile(
    rb"[^A-Za-z]*|(?i:[$%*.-].*|.*(?:example|placeholder|redacted|removed|hidden|change-?me|your|xxx|\*\*\*).*|x+"
    rb"|(?:~|\.{0,2})/[a-z][\w.-]*(?:/.*)?|[a-z][a-z0-9+.-]*://.*)|[a-z0-9._-]+\.[0-9a-f]{10}(?:_\d+)?|[A-Z]+(?:_[A-Z]+)+"
    rb"|[a-z._-]+(?:/[a-z._-]+)+"
)
_CODE_NAME = re.compile(rb"[A-Za-z_]\w*[_.][\w.]*")  # a name in source code that has several parts
_ASSIGNED_KEY = re.compile(rb'"([A-Za-z_][\w.-]{0,60})"\s*:|^\s*(?:-\s+)?(?:export\s+)?([A-Za-z_][\w.-]{0,60})\s*[:=]')


def check_no_secrets(folder: Path, archive_index: ArchiveIndex) -> None:
    """Search all files of an archive before it is written. Raises InputError, which names the places of secrets.

    folder: the folder with the files. archive_index: the content of archive.json, which is searched first, because it has the
    names of all files. Files .gz are unzipped. Parquet files and pictures are not, as they only repeat the content of other
    files.
    """
    secret_places = list(islice(_find_secrets([files.encode_json(archive_index)], archive.INDEX_FILE), 1))
    for archived_name in archive_index.files if not secret_places else ():
        relative_path = archived_name.removeprefix(archive.WORKSPACE_PREFIX)
        secret_places += islice(_find_secrets(_read_blocks(folder / relative_path), relative_path), 1)
    if secret_places:
        problem_summary = f"no archive was written, because {len(secret_places)} file(s) seem to have a secret:"
        raise InputError("\n  ".join([problem_summary, *secret_places[:MOST_NAMED_FILES]]) + REMOVAL_HELP)


def find_secret(folder: Path, file_names: Iterable[str]) -> str | None:
    """The place of the first secret in files of a folder; None if no file has one. file_names: of the files, relative to the
    folder; links are not followed."""
    places = (_find_secrets(_read_blocks(folder / file), file) for file in file_names if not (folder / file).is_symlink())
    return next(chain.from_iterable(places), None)


def _read_blocks(path: Path) -> Iterator[bytes]:
    """The content of a file in blocks of whole lines, unzipped if it is a .gz file, up to any damage of it. A longer line is in
    several blocks, each of which repeats the end of the block before."""
    with files.as_workspace_error("read"), files.open_regular(path) as raw_file:
        content_file, incomplete_line = gzip.GzipFile(fileobj=raw_file) if path.suffix == ".gz" else raw_file, b""
        with contextlib.suppress(gzip.BadGzipFile, EOFError, zlib.error):
            while new_bytes := content_file.read1(BLOCK_BYTES):
                block = incomplete_line + new_bytes
                lines_end = block.rfind(b"\n") + 1
                yield block[:lines_end] or block
                incomplete_line = block[lines_end or -MOST_SECRET_BYTES :]
        yield incomplete_line


def _find_secrets(blocks: Iterable[bytes], file_name: str) -> Iterator[str]:
    """The places of secrets in a file, as texts that do not contain the secrets. blocks: the content of the file."""
    first_line_number = 1
    for block in blocks:
        lower_block = block.lower()
        for kind, clue, pattern in ((kind, clue, pattern) for kind, clues, pattern in SECRET_FORMS for clue in clues):
            position = -1
            while (position := lower_block.find(clue, position + 1)) >= 0:
                if (match := pattern.match(block, position)) is not None and (key := _name_secret(block, match)) is not None:
                    line_number = first_line_number + block.count(b"\n", 0, position)
                    yield f"{file_name}: line {line_number}{key and f', {key}'}: {kind}"
        first_line_number += block.count(b"\n")


def _name_secret(block: bytes, match: re.Match[bytes]) -> str | None:
    """The name or key to which a secret belongs, such as HF_TOKEN; "" if it is not known. None: the value is no secret."""
    line_before = block[max(block.rfind(b"\n", 0, match.start()) + 1, match.start() - MOST_SECRET_BYTES) : match.start()]
    if "name" in match.re.groupindex:
        key = re.sub(rb"(?s).*(?:\\[nrt]|[^\w.-])", b"", line_before[-60:] + match["name"])
        if not _is_secret(key, match):
            return None
    else:
        key = b"".join((_ASSIGNED_KEY.findall(line_before) or [(b"", b"")])[-1])
    return "" if any(pattern.search(key) for _, _, pattern in SECRET_FORMS) else key.lstrip(b"-").decode("utf-8", "replace")


def _is_secret(key_name: bytes, match: re.Match[bytes]) -> bool:
    """Whether a value is a secret, and not a placeholder, a path or source code. key_name: that to which it is assigned."""
    candidate, is_quoted, has_digit = match["value"], bool(match["quote"]), re.search(rb"\d", match["value"]) is not None
    is_code = match["code"] or (not is_quoted and not key_name.isupper() and _CODE_NAME.fullmatch(candidate))
    if is_code or (match["option"] and not key_name.startswith(b"--")) or _HARMLESS_VALUE.fullmatch(candidate):
        return False
    if re.search(rb"(?i)pass|pwd", key_name):
        return is_quoted or has_digit or not candidate.isalpha()
    return len(candidate) >= SHORTEST_SECRET and (has_digit or key_name.isupper())
