"""The verbs that work on the nodes of a cluster: apply, plan, facts and verify."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from provision import interruption, inventory_file, lock, order
from provision.check import Outcome, map_targets
from provision.command import command_line, display, progress
from provision.fact import FactAnswers, Unanswered
from provision.interruption import IS_STOPPING
from provision.node import Node
from provision.nodes import pretend
from provision.operation import Operation, Site, Target
from provision.operations.inventory import find_lease
from provision.plan import BEGUN_CHANGES, MACHINE_OPERATION, OperationStep, converge_site
from provision.provider import MachinesToCreate, find_provider
from provision.verbs import cluster_file
from provision.verify import Finding, is_verified, verify_targets
from shardlab.cluster import login_node
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError, UnknownName
from shardlab.terminal import console
from shardlab.terminal.console import Output, Parser
from shardlab.verb import Invocation, Verb
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

LOGIN_S = 30.0
ROOT_HINT = "send the commands that `provision CLUSTER.yaml plan` prints to an administrator, then run the same command again"
RERUN_HINT = "fix the problem that this operation reports and run the same command again; it continues from there"


class NodesVerbInput(NamedTuple):
    """The work of a verb on the nodes of a cluster."""

    site: Site
    """All nodes of the cluster."""
    targets: list[Target]
    """The nodes to work on (--limit)."""
    operations: list[Operation]
    """The operations of the provider, in order."""
    chosen_names: set[str]
    """The names of the operations to carry out (--only, --skip)."""
    parallel: int | None
    """The most nodes that an operation changes at the same time; None: all."""


class NodesVerb(Verb):
    """A verb that works on the nodes of a cluster."""

    may_change: ClassVar[bool] = True
    """Whether the verb may change nodes, so that it takes locks; a verb that takes none does not disturb other commands."""
    starts_ranks: ClassVar[bool] = False
    """Whether the verb starts two ranks on each node, which is not allowed on a login node."""
    has_operations: ClassVar[bool] = True
    """Whether the verb carries out operations, or plans them."""

    def add_options(self, parser: Parser) -> None:
        list_settings: dict[str, Any] = {"ends_list": command_line.may_be_file, "type": command_line.parse_names}
        parser.add_list_option("--limit", metavar="NODE,...", help="work only on these nodes", **list_settings)
        if self.has_operations:
            parser.add_list_option("--only", metavar="OP,...", help="carry out only these operations", **list_settings)
            parser.add_list_option("--skip", metavar="OP,...", help="carry out all operations except these", **list_settings)
            parallel_help = "number of nodes that an operation changes at the same time (default: all)"
            parser.add_argument("--parallel", type=command_line.parse_count, metavar="N", help=parallel_help)
        if self.starts_ranks:
            here_help = "with provider local: check this machine although it is a login node of a Slurm cluster"
            parser.add_argument("--here", action="store_true", help=here_help)
        console.add_trust_option(parser)

    def carry_out_verb(self, output: Output, work: NodesVerbInput) -> tuple[list[OperationStep], list[Finding]]:
        """Carry out the verb on the nodes. Returns (the steps of the operations, the results of the checks)."""
        raise NotImplementedError

    def run(self, invocation: Invocation) -> int:
        arguments, output, workspace = invocation.arguments, invocation.out, invocation.workspace
        file_cluster = present_cluster = cluster_file.read_cluster_file(invocation)
        provider = find_provider(file_cluster.provider)
        if self.starts_ranks and provider.name == "local":
            login_node.refuse_login_node(here_option=arguments.here)
        cluster_file.check_consent(invocation)
        pretend_path: Path | None = getattr(arguments, "pretend", None)
        if provider.present is not None:
            cluster_or_request = provider.present(file_cluster, workspace)
            if isinstance(cluster_or_request, MachinesToCreate):
                limiting_option = "--limit" if arguments.limit else "--pretend" if pretend_path is not None else None
                _check_creation(file_cluster, cluster_or_request, self.name, limiting_option)
                if self.name == "plan":
                    return _print_creation_plan(output, file_cluster, workspace, cluster_or_request)
            else:
                present_cluster = cluster_or_request
        nodes = provider.nodes(present_cluster, workspace)
        limited_names = _choose_names("node", [node.name for node in nodes], arguments.limit)
        operations = order.select_operations(provider)
        operation_names = [operation.name for operation in operations]
        chosen_names = _choose_names(
            "operation", operation_names, getattr(arguments, "only", None), getattr(arguments, "skip", None)
        ) | {MACHINE_OPERATION}
        lock_paths = cluster_file.list_locks(provider, file_cluster, workspace) if self.may_change else []
        if self.may_change or (provider.name != "local" and pretend_path is None):  # a login stores host keys
            workspace_trust.begin_workspace(workspace)
        with lock.hold_locks(lock_paths, ["provision", *arguments.words]):
            if provider.obtain is not None and self.name == "apply":
                with interruption.handle_interruption([], lambda: None):
                    provider.obtain(file_cluster, workspace)
                present_cluster = cluster_file.read_cluster_again(invocation)
                nodes = provider.nodes(present_cluster, workspace)
                limited_names = _choose_names("node", [node.name for node in nodes], arguments.limit)
            site = _make_site(present_cluster, workspace, nodes, pretend_path)
            if site.is_pretended:
                output.print_remark(f"{pretend_path} describes the nodes; no machine is reached", style="dim")
            elif provider.operations is None or MACHINE_OPERATION in provider.operations:
                bring_up = Operation(
                    MACHINE_OPERATION, lambda site, target: provider.bring_up(present_cluster, workspace, target.node)
                )
                operations = [bring_up, *operations]
            targets = [target for target in site.targets if target.node.name in limited_names]
            max_parallel = getattr(arguments, "parallel", None)
            return self._carry_out_and_show(output, NodesVerbInput(site, targets, operations, chosen_names, max_parallel))

    def _carry_out_and_show(self, output: Output, work: NodesVerbInput) -> int:
        find_lease(work.site)  # an unreadable lease raises an error here, before anything is changed
        with interruption.handle_interruption([target.node for target in work.site.targets], lambda: len(BEGUN_CHANGES)):
            steps, findings = self.carry_out_verb(output, work)
        failed_steps = [step for step in steps if step.state in ("failed", "administrator")]
        display.show_machines(output, work.targets)
        if findings:
            display.show_checks(output, findings)
        if (lease := find_lease(work.site)) is not None:
            output.print_line(lease.describe(datetime.now(UTC)))
        output.print_document(display.result_document(self.name, work.site, work.targets, steps, findings, lease))
        fact_answers = [answer for target in work.targets for answer in target.facts.answers.values()]
        has_unanswered = any(isinstance(answer, Unanswered) for answer in fact_answers)
        return 1 if failed_steps or is_verified(findings) is False or (has_unanswered and self.name == "facts") else 0


class ApplyVerb(NodesVerb):
    """Inspect the nodes, change what differs from the cluster file, and verify (the default verb)."""

    name = "apply"
    example = "provision cluster.yaml --limit node0"
    starts_ranks = True

    def carry_out_verb(self, output: Output, work: NodesVerbInput) -> tuple[list[OperationStep], list[Finding]]:
        steps = _make_changes(output, work, is_dry_run=False)
        return steps, _run_checks(output, work, steps, replaces=False)


class PlanChangesVerb(NodesVerb):
    """Show what apply would change; change nothing."""

    name = "plan"
    example = "provision plan --only packages,hosts"
    may_change = False

    def add_options(self, parser: Parser) -> None:
        super().add_options(parser)
        pretend_help = "take the facts of the nodes from this file, as --json prints them; no machine is reached"
        parser.add_argument("--pretend", type=Path, metavar="FACTS.json", help=pretend_help)
        parser.add_argument("--check", action="store_true", help="may be written in place of the verb plan")

    def carry_out_verb(self, output: Output, work: NodesVerbInput) -> tuple[list[OperationStep], list[Finding]]:
        return _make_changes(output, work, is_dry_run=True), []


class FactsVerb(NodesVerb):
    """Show hardware and software of each node."""

    name = "facts"
    example = "provision cluster.yaml facts --json"
    may_change = has_operations = False

    def carry_out_verb(self, output: Output, work: NodesVerbInput) -> tuple[list[OperationStep], list[Finding]]:
        map_targets(work.targets, _ask_all_facts)
        return [], []


class VerifyVerb(NodesVerb):
    """Run only the acceptance checks."""

    name = "verify"
    example = "provision cluster.yaml verify"
    starts_ranks = True

    def carry_out_verb(self, output: Output, work: NodesVerbInput) -> tuple[list[OperationStep], list[Finding]]:
        steps: list[OperationStep] = []
        if not work.site.cluster.ssh.sudo:  # operations are only planned, to list the work for an administrator
            targets, only_names = work.targets, work.chosen_names
            planned_steps = converge_site(
                work.site, work.operations, targets=targets, only_names=only_names, is_dry_run=True, max_parallel=work.parallel
            )
            steps = [step for step in planned_steps if step.state == "administrator"]
            work.site.skipped.clear()
        return steps, _run_checks(output, work, steps, replaces=True)


def _check_creation(file_cluster: Cluster, machines_to_create: MachinesToCreate, verb_name: str, option: str | None) -> None:
    """Check a command for a cluster whose machines do not exist yet. Raises InputError if its verb or an option needs nodes, or
    if the machines cannot be created now. option: the option that needs nodes, if it is given."""
    if machines_to_create.blocked is not None and verb_name != "plan":
        raise InputError(machines_to_create.blocked)
    if verb_name not in ("apply", "plan") or option is not None:
        raise InputError(
            f"{file_cluster.name}: {option or f'the verb {verb_name}'} needs nodes, and its machines do not exist yet. "
            "Run first: provision CLUSTER.yaml"
        )


def _print_creation_plan(output: Output, file_cluster: Cluster, workspace: Workspace, to_create: MachinesToCreate) -> int:
    """Print the plan for machines that do not exist yet. The changes on the machines can be planned only when they exist."""
    for line in to_create.request_lines:
        output.print_line(line)
    output.print_line("changes: 1 planned, none was made; the nodes can be planned for when they exist")
    if to_create.blocked is not None:
        output.print_remark(f"note: {to_create.blocked}", style="yellow")
    plan_document = display.result_document("plan", Site(file_cluster, workspace, []), [], [], [])
    output.print_document({**plan_document, "changes": 1, "request": to_create.request})
    return 0


def _make_site(file_cluster: Cluster, workspace: Workspace, nodes: Sequence[Node], pretend_path: Path | None) -> Site:
    """The nodes with their facts, which come from the machines, or from the file `pretend_path`. Raises InputError."""
    targets = _make_targets(file_cluster, nodes, pretend_path)
    for environment_name in file_cluster.environments:
        described_nodes = find_provider(file_cluster.provider).nodes(file_cluster.for_environment(environment_name), workspace)
        node_copies = [copy.copy(node) for node in nodes]  # a copy has the same connection
        for node, described_node in zip(node_copies, described_nodes, strict=True):
            node.python, node.wheelhouse = described_node.python, described_node.wheelhouse
        for target, environment_target in zip(targets, _make_targets(file_cluster, node_copies, pretend_path), strict=True):
            target.environments[environment_name] = environment_target
    return Site(file_cluster, workspace, targets, is_pretended=pretend_path is not None)


def _make_targets(file_cluster: Cluster, nodes: Sequence[Node], pretend_path: Path | None) -> list[Target]:
    node_facts = (
        [FactAnswers(node, order.list_operation_files()) for node in nodes]
        if pretend_path is None
        else pretend.read_pretended_facts(pretend_path, nodes)
    )
    entry_by_name = {node_entry.name: node_entry for node_entry in file_cluster.nodes}
    return [Target(facts.node, facts, entry_by_name.get(facts.node.name)) for facts in node_facts]


def _make_changes(output: Output, work: NodesVerbInput, *, is_dry_run: bool) -> list[OperationStep]:
    """Make the changes of the operations, or only plan them (dry), with a live table; print and return the steps."""
    site, targets = work.site, work.targets
    if site.cluster.login is not None and not site.is_pretended:
        site.targets[0].node.run(["true"], timeout_s=LOGIN_S)  # logs in before the live table: SSH may ask for a password
    with progress.show_progress(output, [target.node.name for target in targets], len(work.operations)) as observer:
        steps = converge_site(
            site,
            work.operations,
            targets=targets,
            only_names=work.chosen_names,
            is_dry_run=is_dry_run,
            max_parallel=work.parallel,
            observer=observer,
        )
    if steps and not IS_STOPPING.is_set():
        display.show_operations(output, steps)
    return steps


def _run_checks(output: Output, work: NodesVerbInput, steps: Sequence[OperationStep], *, replaces: bool) -> list[Finding]:
    """Run the checks on the nodes on which no operation failed or waits for an administrator. Returns all results.

    replaces: whether the measured times of all-reduces replace all earlier times in the inventory.
    """
    faults = {step.node: ": ".join([f"{step.operation} failed", *step.says[-1:]]) for step in steps if step.state == "failed"}
    operations_by_node = display.find_administrator_operations(steps)
    findings = [Finding(node, "operations", Outcome(False, failure_text, RERUN_HINT)) for node, failure_text in faults.items()]
    findings += [
        Finding(name, "administrator", Outcome(False, f"an administrator has to do: {', '.join(operation_names)}", ROOT_HINT))
        for name, operation_names in operations_by_node.items()
    ]
    ready_targets = [target for target in work.targets if target.node.name not in {**faults, **operations_by_node}]
    if ready_targets and not IS_STOPPING.is_set():
        print_dim_remark = functools.partial(output.print_remark, style="dim")
        check_stages = order.select_checks(find_provider(work.site.cluster.provider))
        findings += verify_targets(work.site, ready_targets, check_stages, print_dim_remark)
        inventory_file.record_all_reduces(work.site, findings, replaces_earlier=replaces)
        environment_checks = [[check for check in stage if check in order.ENVIRONMENT_CHECKS] for stage in check_stages]
        for name in work.site.cluster.environments:
            targets = [target.environments[name] for target in ready_targets]
            output.print_remark(f"environment {name}:", style="dim")
            further_findings = verify_targets(work.site.select_environment(name), targets, environment_checks, print_dim_remark)
            findings += [msgspec.structs.replace(finding, check=f"{finding.check} in {name}") for finding in further_findings]
    return findings


def _ask_all_facts(target: Target) -> None:
    for asked_fact in order.ALL_FACTS:
        with contextlib.suppress(Unanswered):  # `target.facts` stores the failure, and the display lists it
            target.facts[asked_fact]


def _choose_names(
    name_kind: str, allowed_names: Iterable[str], only_names: list[str] | None, skipped_names: list[str] | None = None
) -> set[str]:
    """The names of `allowed_names` in `only_names` (None: all) but not in `skipped_names`. Raises UnknownName. name_kind:
    `node` or `operation`."""
    known_names = list(allowed_names)
    for name in [*(only_names or []), *(skipped_names or [])]:
        if name not in known_names:
            raise UnknownName(name_kind, name, known_names)
    return {name for name in known_names if (only_names is None or name in only_names) and name not in (skipped_names or [])}
