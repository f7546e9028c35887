"""Replaces the names of users, hosts, accounts, sites and paths in the files of an archive by pseudonyms such as `host1`.

A name has the same pseudonym in all files, so that a reader still sees which records are about the same host. The names are
collected from the cluster file, the inventory, the records of the runs and this machine. GPU UUIDs, MAC addresses and other
UUIDs are found by their form. Words of shardlab's formats remain, as `max_grad_norm` for a user `max`: commands need them.
"""

from __future__ import annotations

import contextlib
import gzip
import html
import json
import os
import pwd
import re
import shlex
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from socket import getfqdn, gethostname
from types import ModuleType
from typing import IO, cast

import msgspec

from collect import metric
from collect.reading.load import LoadedMatrix
from collect.traces import event
from shardlab.cluster import cluster as cluster_file
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError, ShardlabError
from shardlab.hardware import host
from shardlab.matrix import expansion, matrix, study
from shardlab.runs import record, run
from shardlab.runs.state import STATE_MEANINGS
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace

BLOCK_BYTES = 2**16  # bytes that are searched at a time
MOST_UNZIPPED_BYTES = 2**30  # a gzip file whose content, or a file in which one line, has more bytes than this is not archived
SHORTEST_NAME = 2  # characters of a name that is replaced: a name of one character occurs in most texts
SHORTEST_INNER_NAME = 5  # bytes of a name that is searched within words: shorter names occur by chance (`vm` in NVML)
# Paths that are not replaced by pseudonyms: they are usual on Linux systems, so they identify nobody.
SYSTEM_PATHS = {
    "/", "/tmp", "/usr", "/usr/local", "/srv", "/opt", "/home", "/root", "/var", "/etc", "/data", "/mydata", "/scratch",
    "/dev/shm",
}  # fmt: skip
COMMON_NAMES = {"root", "localhost", "local", "localhost.localdomain", "127.0.0.1", "0.0.0.0", "::1"}  # noqa: S104
PATTERN_BY_IDENTIFIER = {
    "gpu": re.compile(rb"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
    "uuid": re.compile(rb"(?<![0-9A-Za-z-])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![0-9A-Za-z-])"),
    "mac": re.compile(rb"(?<![0-9A-Fa-f:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![0-9A-Fa-f:])"),
}
# In logs, every IPv4 address is replaced. In other files, only the known addresses of nodes are replaced, because a version of
# a package can look like an IPv4 address.
IPV4_PATTERN = re.compile(rb"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")


class Pseudonyms:
    """The pseudonyms of the names in an archive.

    counts: how many names of each kind were given a pseudonym, such as {"host": 2}.
    """

    def __init__(self, names: Iterable[tuple[str, str]], words: Collection[str] = ()) -> None:
        """Give each name a pseudonym. Raises InputError if a name equals one of `words` or RESERVED_WORDS.

        names: (kind, name) of each name to replace, such as ("host", "gpu1"). words: texts that must not be replaced, also
        if a name is a part of them.
        """
        self.count_by_kind: dict[str, int] = {}
        self._pseudonym_by_identifier: dict[bytes, bytes] = {}
        pseudonym_by_spelling: dict[bytes, bytes] = {}
        # Names with a domain come first, so that a host gets one pseudonym for its full and its short name.
        for kind, name in sorted(dict.fromkeys(names), key=lambda kind_and_name: not _find_host_domain(kind_and_name[1])):
            if len(name) < SHORTEST_NAME or name.lower() in COMMON_NAMES or name in SYSTEM_PATHS:
                continue
            if name in RESERVED_WORDS or name in words:
                raise InputError(
                    f"--anonymous: the {kind} {name!r} has the same name as a key or value in the records, so it "
                    "cannot be replaced. Allowed: other names, or an archive without --anonymous."
                )
            if name.lower().encode() in pseudonym_by_spelling:
                continue
            pseudonym = self._make_pseudonym(kind)
            short_name = name.partition(".")[0] if kind == "host" and _find_host_domain(name) else name
            for spelling in _list_spellings(name) | _list_spellings(short_name):
                pseudonym_by_spelling.setdefault(spelling.lower(), pseudonym)
        self._pseudonym_by_spelling = pseudonym_by_spelling
        kept_words = {word.encode() for word in (*KEPT_WORDS, *words)}
        pattern_by_spelling = {text: _make_standalone_pattern(text) for text in pseudonym_by_spelling}
        joined_pattern = _join_patterns(pattern_by_spelling)
        pattern_by_kept_word = {
            word: _make_standalone_pattern(word)
            for word in kept_words
            if word.lower() not in pseudonym_by_spelling and joined_pattern and joined_pattern.search(word)
        }
        equal_words = {word for word in kept_words if word.lower() in pseudonym_by_spelling}
        pattern_by_kept_word |= {b'"%b"' % word: b'"%b"(?=\\s*:)' % re.escape(word) for word in equal_words}
        self._name_pattern = _join_patterns(pattern_by_spelling | pattern_by_kept_word)
        inner_names = [text for text in pseudonym_by_spelling if len(text) >= SHORTEST_INNER_NAME]
        self._inner_name_pattern = _join_patterns({text: re.escape(text) for text in inner_names} | pattern_by_kept_word)

    def _make_pseudonym(self, kind: str) -> bytes:
        number = self.count_by_kind[kind] = self.count_by_kind.get(kind, 0) + 1
        return f"/{kind}{number}".encode() if kind == "path" else f"{kind}{number}".encode()

    def replace_names(self, content: bytes, *, is_log: bool = False) -> bytes:
        """The text `content` with pseudonyms in place of names. is_log: whether all IPv4 addresses are replaced, too."""
        if self._name_pattern is not None:
            content = self._name_pattern.sub(lambda match: self._pseudonym_by_spelling.get(match[0].lower(), match[0]), content)
        for kind, pattern in (*PATTERN_BY_IDENTIFIER.items(), *([("address", IPV4_PATTERN)] if is_log else [])):
            content = pattern.sub(lambda match, kind=kind: self._find_or_make_pseudonym(kind, match[0]), content)  # type: ignore[misc]
        return content

    def replace_names_in_text(self, text: str) -> str:
        """As `replace_names`, for a text in memory, such as the name of a file."""
        return self.replace_names(text.encode()).decode()

    def _find_or_make_pseudonym(self, kind: str, text: bytes) -> bytes:
        if text.decode() in COMMON_NAMES:
            return text
        if text.lower() not in self._pseudonym_by_identifier:
            self._pseudonym_by_identifier[text.lower()] = self._make_pseudonym(kind)
        return self._pseudonym_by_identifier[text.lower()]

    def find_remaining(self, content: bytes) -> set[str]:
        """Names that should be replaced, but still stand in `content` inside longer words. Returned in lower case."""
        matches = self._inner_name_pattern.finditer(content) if self._inner_name_pattern is not None else ()
        spellings = {match[0].lower() for match in matches} & self._pseudonym_by_spelling.keys()
        return {spelling.decode("utf-8", "replace").lower() for spelling in spellings}


def _make_standalone_pattern(spelling: bytes) -> bytes:
    """A pattern that finds a text that has no letter and no digit beside it; `_` and `-` may be beside it, as in gpu1-ib."""
    return b"(?<![A-Za-z0-9])" * (spelling[:1] != b"/") + re.escape(spelling) + b"(?![A-Za-z0-9])"


def _join_patterns(pattern_by_text: dict[bytes, bytes]) -> re.Pattern[bytes] | None:
    """A pattern that finds each text, the longest first; None if there are none. pattern_by_text: text -> the pattern of this
    text."""
    longest_patterns = [pattern_by_text[text] for text in sorted(pattern_by_text, key=len, reverse=True)]
    return re.compile(b"|".join(longest_patterns), re.IGNORECASE) if longest_patterns else None


def make_pseudonyms(workspace: Workspace, loaded: LoadedMatrix, cluster: Cluster) -> Pseudonyms:
    """Make the pseudonyms for an archive. Raises InputError if a name equals a key or value of the records that must stay
    readable, or is a part of the name of the matrix."""
    names = [*_list_named_paths(workspace, loaded, cluster), *_list_cluster_names(cluster)]
    names += [*_list_run_names(loaded), *_list_machine_names(workspace)]
    cells_json = msgspec.json.encode([[cell.cell for cell in loaded.cells], [cell.cell for cell in loaded.expansion.excluded]])
    kept_texts = {text.decode() for text in re.findall(rb'"([^"\\]+)"', cells_json)}
    plugin_names = {cell.cell.workload for cell in loaded.cells if cell.cell.workload_code is not None}
    plugin_names |= {cell.cell.strategy for cell in loaded.cells if cell.cell.strategy_code is not None}
    kept_texts |= {text for loaded_run in loaded.runs for event in loaded_run.events for text in (event.event, event.writer)}
    kept_texts |= {loaded_run.run_id for loaded_run in loaded.runs}
    kept_texts |= {loaded_run.result.unit for loaded_run in loaded.runs if loaded_run.result is not None}
    pseudonyms = Pseudonyms(
        names, {*STATE_MEANINGS, *(text for text in kept_texts if not any(plugin_name in text for plugin_name in plugin_names))}
    )
    if pseudonyms.replace_names_in_text(loaded.expansion.name) != loaded.expansion.name:
        reason = f"--anonymous: the name of the matrix {loaded.expansion.name!r} contains a name that must be replaced"
        raise InputError(f"{reason}. Allowed: a matrix with another name, or an archive without --anonymous.")
    return pseudonyms


class UnsearchableFile(ShardlabError):
    """Raised if names in a file cannot be found. The message is the reason, as a clause."""


def copy_with_pseudonyms(archive_path: str, source_file: IO[bytes], target_file: IO[bytes], pseudonyms: Pseudonyms) -> None:
    """Copy a text file or gzip file, whose path in the archive is `archive_path`. Raises UnsearchableFile, and OSError."""
    is_log = "/log/" in archive_path or "/events." in archive_path
    try:
        with contextlib.ExitStack() as zip_files:
            if is_gzip := archive_path.endswith(".gz"):
                source_file = cast("IO[bytes]", zip_files.enter_context(gzip.GzipFile(fileobj=source_file)))
                target_file = cast("IO[bytes]", zip_files.enter_context(gzip.GzipFile("", "wb", 6, target_file, mtime=0)))
            for lines in read_whole_lines(source_file):
                if is_gzip and source_file.tell() > MOST_UNZIPPED_BYTES:
                    raise UnsearchableFile(f"it has more than {MOST_UNZIPPED_BYTES / 2**30:g} GiB when it is unzipped")
                lines.decode()
                target_file.write(pseudonyms.replace_names(lines, is_log=is_log))
    except UnicodeDecodeError:
        raise UnsearchableFile("it is not text, so names in it cannot be found") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UnsearchableFile(f"it cannot be unzipped: {error}") from None


def read_whole_lines(source_file: IO[bytes]) -> Iterator[bytes]:
    """The content of a file in parts of whole lines, so that a name is never in two parts and few lines are in memory.

    Raises UnsearchableFile if a line is longer than MOST_UNZIPPED_BYTES.
    """
    while lines := source_file.read(BLOCK_BYTES):
        lines += source_file.readline(MOST_UNZIPPED_BYTES)
        if len(lines) > MOST_UNZIPPED_BYTES:
            raise UnsearchableFile(f"it has a line of more than {MOST_UNZIPPED_BYTES / 2**30:g} GiB")
        yield lines


def _list_spellings(name: str) -> set[bytes]:
    """All ways in which files write a name: as plain text, and with characters escaped as in JSON, shell scripts and HTML."""
    ascii_json, unicode_json = json.dumps(name)[1:-1], json.dumps(name, ensure_ascii=False)[1:-1]
    return {text.encode() for text in (name, ascii_json, unicode_json, shlex.quote(name), html.escape(name))}


def _list_named_paths(workspace: Workspace, loaded: LoadedMatrix, cluster: Cluster) -> list[tuple[str, str]]:
    paths = {str(workspace.path), str(workspace.real_path), str(Path(loaded.expansion.path).parent), sys.prefix, _find_home()}
    for loaded_run in loaded.runs:
        run_file = loaded_run.folder.read_run()
        paths |= {run_file.data_path, run_file.proofs_path or "", run_file.source or ""}
        paths |= {cluster_value for cluster_value in run_file.cluster.values() if cluster_value.startswith("/")}
    storage = cluster.storage
    paths |= {storage.shared or "", storage.mount or "", cluster.data.path or "", cluster.ssh.identity or ""}
    for environment in cluster.map_environments().values():
        paths |= {environment.python or "", environment.use or "", environment.container or "", environment.wheelhouse or ""}
    absolute_paths = {str(PurePosixPath(path)) for path in paths if path.startswith("/")}
    return [("path", path) for path in sorted(absolute_paths, key=lambda path: (-len(path), path))]


def _list_cluster_names(cluster: Cluster) -> list[tuple[str, str]]:
    hosts: set[str | None] = set()
    users: set[str | None] = {cluster.ssh.user}
    accounts: set[str | None] = set()
    sites: set[str | None] = set()
    if cluster.provider != "local":
        sites.add(cluster.name)
    if cluster.login is not None:
        hosts.add(cluster.login.host)
        users.add(cluster.login.user)
    for node in cluster.nodes:
        hosts |= {node.name, node.host, node.address, node.control}
        users.add(node.user)
    if cluster.slurm is not None:
        accounts |= {cluster.slurm.account, cluster.slurm.qos}
        sites.add(cluster.slurm.cluster)
    if cluster.cloudlab is not None:
        accounts.add(cluster.cloudlab.project)
        sites.add(cluster.cloudlab.site)
    sites |= {_find_host_domain(name) for name in hosts if name}
    names_of_kinds = (("host", hosts), ("user", users), ("account", accounts), ("site", sites))
    return [(kind, name) for kind, names in names_of_kinds for name in sorted(filter(None, names))]


def _list_run_names(loaded: LoadedMatrix) -> list[tuple[str, str]]:
    hosts = {name for loaded_run in loaded.runs for name in loaded_run.folder.list_hosts()}
    sites = {_find_host_domain(name) for name in hosts} | {run.folder.read_run().slurm_cluster or "" for run in loaded.runs}
    sites |= {event.data.get("cluster") or "" for run in loaded.runs for event in run.events}
    return [("host", name) for name in sorted(hosts)] + [("site", name) for name in sorted(filter(None, sites))]


def _list_machine_names(workspace: Workspace) -> list[tuple[str, str]]:
    users = {os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), os.environ.get("SUDO_USER", "")}
    for uid in (os.geteuid(), workspace.real_path.stat().st_uid):
        try:
            users.add(pwd.getpwuid(uid).pw_name)
        except KeyError:
            continue
    hosts = {gethostname(), getfqdn()}
    known_inventory = inventory.read_any_inventory(workspace)
    for node in known_inventory.nodes if known_inventory is not None else ():
        hosts |= {text for text in (node.name, node.host, node.address) if text}
    names = [("user", name) for name in sorted(users - {""})] + [("host", name) for name in sorted(hosts)]
    return names + [("site", name) for name in sorted(filter(None, map(_find_host_domain, hosts)))]


def _find_host_domain(host_name: str) -> str:
    """The domain of a host name, such as `cluster.edu` of `gpu1.cluster.edu`; "" for an address or a name without a domain."""
    domain = host_name.partition(".")[2]
    return domain if "." in domain and not domain.replace(".", "").isdecimal() else ""


def _find_home() -> str:
    return str(Path.home()) if "HOME" in os.environ else ""


def _list_record_keys(*modules: ModuleType) -> frozenset[str]:
    """The keys of all types that are read from files and that these modules define or import."""
    module_members = [member for module in modules for member in vars(module).values()]
    struct_types = {member for member in module_members if isinstance(member, type) and issubclass(member, msgspec.Struct)}
    return frozenset(field.encode_name for member in struct_types for field in msgspec.structs.fields(member))


# Words in the paths of a run's files, and values for which commands look.
FORMAT_WORDS = frozenset((
    "env", "events", "exact", "full", "job", "json", "jsonl", "log", "loopback", "matrix", "memory", "physical", "rank",
    "result", "run", "samples", "shardlab", "tiny", "trace", "traceEvents", "virtual",
))  # fmt: skip
# A name that equals one of these words is refused, because texts and expressions contain these words too.
RESERVED_WORDS = _list_record_keys(expansion, host, record, run, study, matrix) | FORMAT_WORDS
RESERVED_WORDS |= {known_metric.name for known_metric in metric.load_metrics()}
# Further keys of JSON files. A name may equal such a key, which stays in place.
KEPT_WORDS = RESERVED_WORDS | _list_record_keys(cluster_file, event)
