"""Asks a Slurm site what it offers: partitions, node types, accounts, modules, folders, and which requests it accepts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from provision.fact import FactAnswers, FactQuery, Unanswered
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
from shardlab.remote.login_shell import make_login_argv

T = TypeVar("T")
QUERIES: list[FactQuery[Any]] = [SLURM_SETTINGS, PARTITIONS, NODE_TYPES, ASSOCIATIONS, MODULES, SHARED_FOLDERS, PYTHONS, QUOTAS]
TEST_S = 60.0
SHOW_CLUSTERS = f"""\
test -n "${VARIABLE}" || {VARIABLE}=$({shlex.join(make_login_argv(f'echo "clusters=${VARIABLE}"'))} < /dev/null 2> /dev/null |
    sed -n 's/^clusters=//p')
printf '%s\\n' "${VARIABLE}"
"""
# If Slurm gives this answer, it is not known whether a request is possible: Slurm gives the same answer if suitable nodes exist
# but are down or drained at this moment.
UNDECIDED_ANSWER = re.compile(r"node configuration is not available")
UNSPECIFIED_ERROR = "Unspecified error"  # sbatch prints this line in addition to the reason of a submit plugin
# other options would not change this answer
_FINAL_ANSWER = re.compile(rf"{UNDECIDED_ANSWER.pattern}|(?i:account|qos|time limit)")
_CPU_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_ERROR_PREFIX = re.compile(r"^(?:sbatch|allocation failure): (?:error: )?", re.M)


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
    shell_output = node.run(["sh", "-c", SHOW_CLUSTERS], timeout_s=30)
    cluster_names = shell_output.stdout.strip().split(",") if shell_output.code == 0 else []
    if ALL in cluster_names:
        raise InputError(f"{node.name}: the environment variable {VARIABLE} is {ALL!r}. Allowed: the name of one cluster.")
    return tuple(cluster_name for cluster_name in cluster_names if re.search(SLURM_CLUSTER_PATTERN, cluster_name))


def survey_site(node: Node) -> Survey:
    """Ask the login node of a site all questions, several at the same time. Raises Unreachable if the login fails."""
    node.run(["true"], timeout_s=30)  # log in once, before several threads use the connection
    facts = FactAnswers(node)
    with ThreadPoolExecutor(4) as thread_pool:
        list(thread_pool.map(lambda fact: _ask_fact(facts, fact), QUERIES))
    unanswered_facts = {fact_name: str(answer) for fact_name, answer in facts.answers.items() if isinstance(answer, Unanswered)}

    def choose_answer(fact: FactQuery[T], default_answer: T) -> T:
        fact_answer: Any = facts.answers.get(fact.name)
        answer_value: T = default_answer if fact_answer is None or isinstance(fact_answer, Unanswered) else fact_answer
        return answer_value

    return Survey(
        settings=choose_answer(SLURM_SETTINGS, SlurmSettings()),
        partitions=choose_answer(PARTITIONS, ()),
        node_types=choose_answer(NODE_TYPES, ()),
        associations=choose_answer(ASSOCIATIONS, ()),
        modules=choose_answer(MODULES, ()),
        folders=choose_answer(SHARED_FOLDERS, ()),
        pythons=choose_answer(PYTHONS, {}),
        quotas=choose_answer(QUOTAS, Quotas()),
        unknown=unanswered_facts,
    )


def _ask_fact(node_facts: FactAnswers, fact: FactQuery[Any]) -> None:
    try:
        node_facts[fact]
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
    rejection_by_request: dict[R, str | None] = {}
    for request_keys, sbatch_options in options_by_request.items():
        if request_keys.is_fallback and any(why is None or _FINAL_ANSWER.search(why) for why in rejection_by_request.values()):
            break
        rejection_by_request[request_keys] = _find_rejection(node.run, sbatch_options)
    return rejection_by_request


def count_job_cpus(node: Node, node_names: str) -> int | None:
    """The smallest number of processors that a job may get on one of these nodes of Slurm, without the processors that Slurm
    reserves for the system; None if it is not known. node_names: in Slurm's short form, such as gpu[1-8]. Raises
    Unreachable."""
    output = node.run(["scontrol", "show", "node", "--oneliner", node_names], timeout_s=TEST_S) if node_names else None
    cpu_counts = []
    for value_by_key in map(parse_pairs, output.stdout.splitlines() if output is not None and output.code == 0 else []):
        total = parse_limit(value_by_key.get("CPUTot", ""))
        threads_per_core = parse_limit(value_by_key.get("ThreadsPerCore", "")) or 1
        effective_cpus = parse_limit(value_by_key.get("CPUEfctv", ""))  # from Slurm 22.05 on
        listed_cpus = sum(
            int(last or first) - int(first) + 1 for first, last in _CPU_RANGE.findall(value_by_key.get("CPUSpecList", ""))
        )
        reserved_cpus = max(listed_cpus, threads_per_core * (parse_limit(value_by_key.get("CoreSpecCount", "")) or 0))
        if (job_cpus := effective_cpus if effective_cpus is not None or total is None else total - reserved_cpus) is not None:
            cpu_counts.append(job_cpus)
    return min(cpu_counts, default=None)


def _find_rejection(run_command: Callable[..., Any], sbatch_options: list[str]) -> str | None:
    test_command = ["sbatch", "--test-only", *sbatch_options, "--wrap=true"]
    test_words = ["sh", "-c", f'{requests.WITHOUT_VARIABLES} exec "$@"', "test", *test_command]
    test_output = run_command(test_words, timeout_s=TEST_S)
    if test_output.code == 0:
        return None
    lines = [_ERROR_PREFIX.sub("", line).strip() for line in test_output.stderr.splitlines()]
    lines = [line for line in dict.fromkeys(lines) if any(char.isalnum() for char in line)]  # without the lines of drawn frames
    informative_lines = [line for line in lines if not line.endswith(UNSPECIFIED_ERROR)] or lines
    rejection = "; ".join(informative_lines) or ("no answer" if test_output.code is None else f"exit code {test_output.code}")
    return "".join(char if char.isprintable() else "?" for char in rejection)[:200]
