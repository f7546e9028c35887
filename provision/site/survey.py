"""Asks a Slurm site what it offers: partitions, node types, accounts, modules, folders, and which requests it accepts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from provision.fact import Fact, Facts, Unanswered
from provision.facts.associations import ASSOCIATIONS, Association
from provision.facts.modules import MODULES
from provision.facts.node_types import NODE_TYPES, NodeType
from provision.facts.partitions import PARTITIONS, SitePartition
from provision.facts.pythons import PYTHONS
from provision.facts.quotas import QUOTAS, Quotas
from provision.facts.shared_folders import SHARED_FOLDERS, SharedFolder
from provision.facts.slurm_settings import SLURM_SETTINGS, SlurmSettings
from provision.facts.slurm_text import parse_limit, parse_pairs
from provision.node import Node
from provision.site import requests
from shardlab.cluster.slurm_cluster import ALL, VARIABLE
from shardlab.errors import InputError
from shardlab.record_types import SLURM_CLUSTER_PATTERN
from shardlab.remote.login_shell import login_shell_argv

T = TypeVar("T")
SURVEY_FACTS: list[Fact[Any]] = [SLURM_SETTINGS, PARTITIONS, NODE_TYPES, ASSOCIATIONS, MODULES, SHARED_FOLDERS, PYTHONS, QUOTAS]
TEST_S = 60.0
SHOW_CLUSTERS = f"""\
test -n "${VARIABLE}" || {VARIABLE}=$({shlex.join(login_shell_argv(f'echo "clusters=${VARIABLE}"'))} < /dev/null 2> /dev/null |
    sed -n 's/^clusters=//p')
printf '%s\\n' "${VARIABLE}"
"""
# If Slurm gives this answer, it is not known whether a request is possible: Slurm gives the same answer if suitable nodes exist
# but are down or drained at this moment.
UNDECIDED = re.compile(r"node configuration is not available")
UNSPECIFIED_ERROR = "Unspecified error"  # sbatch prints this line in addition to the reason of a submit plugin
_NO_FALLBACK = re.compile(rf"{UNDECIDED.pattern}|(?i:account|qos|time limit)")  # other options would not change this answer
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_ERROR = re.compile(r"^(?:sbatch|allocation failure): (?:error: )?", re.M)


class Survey(msgspec.Struct, frozen=True):
    """The answers of a Slurm site. A fact without an answer has an empty field; `unknown` maps its name to the reason."""

    settings: SlurmSettings = SlurmSettings()
    partitions: tuple[SitePartition, ...] = ()
    node_types: tuple[NodeType, ...] = ()
    associations: tuple[Association, ...] = ()
    modules: tuple[str, ...] = ()
    folders: tuple[SharedFolder, ...] = ()
    pythons: dict[str, tuple[int, int]] = {}
    quotas: Quotas = Quotas()
    clusters: tuple[str, ...] = ()
    """The clusters of Slurm that the user's shell chooses, of which the first answered; empty: the default cluster answered."""
    unknown: dict[str, str] = {}


def list_chosen_clusters(node: Node) -> tuple[str, ...]:
    """The clusters in the variable SLURM_CLUSTERS of the user's shell, or else of the login shell. Raises Unreachable, and
    InputError if the variable says `all`, because a cluster file describes one cluster."""
    answer = node.run(["sh", "-c", SHOW_CLUSTERS], timeout_s=30)
    names = answer.stdout.strip().split(",") if answer.code == 0 else []
    if ALL in names:
        raise InputError(f"{node.name}: the environment variable {VARIABLE} is {ALL!r}. Allowed: the name of one cluster.")
    return tuple(name for name in names if re.search(SLURM_CLUSTER_PATTERN, name))


def survey_site(node: Node) -> Survey:
    """Ask the login node of a site all questions, several at the same time. Raises Unreachable if the login fails."""
    node.run(["true"], timeout_s=30)  # log in once, before several threads use the connection
    facts = Facts(node)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda fact: _ask_fact(facts, fact), SURVEY_FACTS))
    unknown = {name: str(answer) for name, answer in facts.answers.items() if isinstance(answer, Unanswered)}

    def answer_or(fact: Fact[T], otherwise: T) -> T:
        answer: Any = facts.answers.get(fact.name)
        result: T = otherwise if answer is None or isinstance(answer, Unanswered) else answer
        return result

    return Survey(
        settings=answer_or(SLURM_SETTINGS, SlurmSettings()),
        partitions=answer_or(PARTITIONS, ()),
        node_types=answer_or(NODE_TYPES, ()),
        associations=answer_or(ASSOCIATIONS, ()),
        modules=answer_or(MODULES, ()),
        folders=answer_or(SHARED_FOLDERS, ()),
        pythons=answer_or(PYTHONS, {}),
        quotas=answer_or(QUOTAS, Quotas()),
        unknown=unknown,
    )


def _ask_fact(facts: Facts, fact: Fact[Any]) -> None:
    try:
        facts[fact]
    except Unanswered:
        return  # `facts` has stored the error in place of an answer


class TestedRequest(Protocol):
    """The keys of a request."""

    @property
    def is_fallback(self) -> bool: ...


R = TypeVar("R", bound=TestedRequest)


def find_rejections(node: Node, options_by_request: Mapping[R, list[str]]) -> dict[R, str | None]:
    """For each request, why Slurm would reject a job with these options of sbatch; None if Slurm would accept the job.
    Fallbacks are tried in their order until Slurm accepts one, and only if Slurm rejects all other requests for their options.

    options_by_request: the options of each request. `sbatch --test-only` submits nothing. Raises Unreachable.
    """
    rejections: dict[R, str | None] = {}
    for request, options in options_by_request.items():
        if request.is_fallback and any(why is None or _NO_FALLBACK.search(why) for why in rejections.values()):
            break
        rejections[request] = _find_rejection(node.run, options)
    return rejections


def count_job_cpus(node: Node, names: str) -> int | None:
    """The smallest number of processors that a job may get on one of these nodes of Slurm, without the processors that Slurm
    reserves for the system; None if it is not known. names: in Slurm's short form, such as gpu[1-8]. Raises Unreachable."""
    answer = node.run(["scontrol", "show", "node", "--oneliner", names], timeout_s=TEST_S) if names else None
    counts = []
    for pairs in map(parse_pairs, answer.stdout.splitlines() if answer is not None and answer.code == 0 else []):
        total, threads = parse_limit(pairs.get("CPUTot", "")), parse_limit(pairs.get("ThreadsPerCore", "")) or 1
        effective = parse_limit(pairs.get("CPUEfctv", ""))  # from Slurm 22.05 on
        listed = sum(int(last or first) - int(first) + 1 for first, last in _RANGE.findall(pairs.get("CPUSpecList", "")))
        reserved = max(listed, threads * (parse_limit(pairs.get("CoreSpecCount", "")) or 0))
        if (count := effective if effective is not None or total is None else total - reserved) is not None:
            counts.append(count)
    return min(counts, default=None)


def _find_rejection(run: Callable[..., Any], options: list[str]) -> str | None:
    test_command = ["sbatch", "--test-only", *options, "--wrap=true"]
    argv = ["sh", "-c", f'{requests.WITHOUT_VARIABLES} exec "$@"', "test", *test_command]
    answer = run(argv, timeout_s=TEST_S)
    if answer.code == 0:
        return None
    lines = [_ERROR.sub("", line).strip() for line in answer.stderr.splitlines()]
    lines = [line for line in dict.fromkeys(lines) if any(char.isalnum() for char in line)]  # without the lines of drawn frames
    informative_lines = [line for line in lines if not line.endswith(UNSPECIFIED_ERROR)] or lines
    text = "; ".join(informative_lines) or ("no answer" if answer.code is None else f"exit code {answer.code}")
    return "".join(char if char.isprintable() else "?" for char in text)[:200]
