"""The command `provision`: checks its command line, then inspects or changes the machines of a cluster."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from provision import interruption, inventory_file, lock, order
from provision.check import Outcome, map_targets
from provision.cloudlab import hardware
from provision.command import command_line, display, progress
from provision.fact import Facts, Unanswered
from provision.interruption import STOPPING
from provision.node import Node
from provision.nodes import pretend
from provision.operation import Operation, Site, Target
from provision.operations.inventory import find_lease, store_lease
from provision.plan import BEGUN, MACHINE, OperationStep, converge
from provision.provider import Confirmation, MachinesToCreate, Provider, find_provider
from provision.verify import Finding, is_verified, verify_targets
from shardlab import completion
from shardlab.cluster import cluster, login_node
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError, ShardlabError, UnknownName
from shardlab.terminal import console
from shardlab.terminal.console import Output
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

UNLOCKED = ("plan", "facts")  # verbs that take no lock: they change nothing, and do not disturb other commands
PROVIDER_VERBS = ("warm", "extend", "down")  # the provider carries out these verbs; no command runs on a node
LOGIN_S = 30.0
ROOT_HINT = "send the commands that `provision CLUSTER.yaml plan` prints to an administrator, then run the same command again"
RERUN_HINT = "fix the problem that this operation reports and run the same command again; it continues from there"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `provision` with the words `argv` (without the program's name). Returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = command_line.parser()
    completion.answer_shell(parser)
    arguments = parser.parse_intermixed_args(words)
    return console.run_command(functools.partial(_run, arguments, words), name="provision", interrupted=None)


def _run(args: argparse.Namespace, words: Sequence[str]) -> int:
    output = Output.from_arguments(args)
    file, verb = command_line.read_file_and_verb(args)
    workspace = Workspace.find(getattr(args, "workspace", None))
    # A user who can change the workspace could replace host keys and addresses of nodes.
    for sentence in workspace.explain_exposed_folders():
        output.print_remark(f"warning: {sentence}", style="yellow")
    if verb == "init":
        from provision.command import init  # not imported at the top: init imports psutil, which would make --help slower

        return init.print_cluster_file(output, workspace, args.site, args.ssh or [], args.cloudlab)
    if verb == "hardware":
        return _print_hardware(output)
    file_cluster = _find_cluster(file, workspace)
    provider = find_provider(file_cluster.provider)
    if verb == "request":
        return _print_request(output, file, file_cluster, workspace, provider, profile=args.profile)
    if provider.name == "local" and verb in ("apply", "verify"):  # both verbs start two ranks: not allowed on a login node
        login_node.must_not_be_login_node(here_option=args.here)
    named_files = [Path(file)] if file is not None and Path(file).resolve().is_relative_to(workspace.real_path) else []
    if args.trust:
        workspace_trust.store_consent(workspace, output.print_remark, named_files)
    _show_powers_once(output, workspace, file_cluster if named_files else None)
    workspace_trust.must_be_allowed(workspace, "log in to the nodes and change them", named_files)
    present_cluster = file_cluster
    if provider.present is not None and verb not in PROVIDER_VERBS:
        cluster_or_request = provider.present(file_cluster, workspace)
        if isinstance(cluster_or_request, MachinesToCreate):
            _check_creation(file_cluster, cluster_or_request, verb, args)
            if verb == "plan":
                return _print_creation_plan(output, file_cluster, workspace, cluster_or_request)
        else:
            present_cluster = cluster_or_request
    nodes = provider.nodes(present_cluster, workspace)
    limited_names = _choose_names("node", [node.name for node in nodes], args.limit, None)
    operations = order.select_operations(provider)
    chosen_names = _choose_names("operation", [operation.name for operation in operations], args.only, args.skip) | {MACHINE}
    locks = [] if verb in UNLOCKED else _list_locks(provider, file_cluster, workspace)
    if verb not in UNLOCKED or (provider.name != "local" and args.pretend is None):  # a login stores host keys
        workspace_trust.begin_workspace(workspace)
    with lock.hold_locks(locks, ["provision", *words]):
        if verb in PROVIDER_VERBS:
            return _carry_out_provider_verb(output, verb, args, provider, Site(file_cluster, workspace, []), nodes)
        if provider.obtain is not None and verb == "apply":
            with interruption.handle_interruption([], lambda: None):
                provider.obtain(file_cluster, workspace)
            present_cluster = _read_cluster_again(file, workspace)
            nodes = provider.nodes(present_cluster, workspace)
            limited_names = _choose_names("node", [node.name for node in nodes], args.limit, None)
        site = _make_site(present_cluster, workspace, nodes, args.pretend)
        if site.pretended:
            output.print_remark(f"{args.pretend} describes the nodes; no machine is reached", style="dim")
        elif provider.operations is None or MACHINE in provider.operations:
            bring_up = Operation(MACHINE, lambda site, target: provider.bring_up(present_cluster, workspace, target.node))
            operations = [bring_up, *operations]
        targets = [target for target in site.targets if target.node.name in limited_names]
        return _carry_out_and_show(output, verb, site, targets, operations, chosen_names, args.parallel)


def _show_powers_once(output: Output, workspace: Workspace, named_cluster: Cluster | None) -> None:
    """Show what the cluster file makes commands do, if it was there before the workspace began; on a terminal, ask the user.

    named_cluster: as in `workspace_trust.unshown_powers`. Raises InputError if the user does not agree.
    """
    unseen_powers = workspace_trust.unshown_powers(workspace, named_cluster)
    if not unseen_powers:
        return
    for power in unseen_powers:
        output.print_remark(f"the cluster file {power}", style="yellow")
    if sys.stdin.isatty() and output.ask("This file was here before. Type yes if this is what it should do: ") != "yes":
        raise InputError("the cluster file was not allowed. Nothing was changed.")
    workspace_trust.mark_powers_shown(workspace)


def _list_locks(provider: Provider[Any], file_cluster: Cluster, workspace: Workspace) -> list[tuple[Path, str]]:
    """The locks of a command that may change nodes, as `lock.hold_locks` needs them."""
    locks = [(path, f"the cluster {file_cluster.name}") for path in provider.locks(file_cluster)]
    return [*locks, (workspace.shardlab_folder / "provision.lock", f"the workspace {workspace.path}")]


def _check_creation(file_cluster: Cluster, to_create: MachinesToCreate, verb: str, arguments: argparse.Namespace) -> None:
    """Check a command for a cluster whose machines do not exist yet. Raises InputError if its verb or an option needs nodes, or
    if the machines cannot be created now."""
    if to_create.blocked is not None and verb != "plan":
        raise InputError(to_create.blocked)
    if verb not in ("apply", "plan") or arguments.limit or arguments.pretend is not None:
        option = "--limit" if arguments.limit else "--pretend" if arguments.pretend is not None else f"the verb {verb}"
        raise InputError(
            f"{file_cluster.name}: {option} needs nodes, and its machines do not exist yet. Run first: provision CLUSTER.yaml"
        )


def _print_creation_plan(output: Output, file_cluster: Cluster, workspace: Workspace, to_create: MachinesToCreate) -> int:
    """Print the plan for machines that do not exist yet. The changes on the machines can be planned only when they exist."""
    for line in to_create.lines:
        output.print_line(line)
    output.print_line("changes: 1 planned, none was made; the nodes can be planned for when they exist")
    if to_create.blocked is not None:
        output.print_remark(f"note: {to_create.blocked}", style="yellow")
    plan_document = display.result_document("plan", Site(file_cluster, workspace, []), [], [], [])
    output.print_document({**plan_document, "changes": 1, "request": to_create.request})
    return 0


def _carry_out_provider_verb(
    output: Output, verb: str, args: argparse.Namespace, provider: Provider[Any], site: Site, nodes: Sequence[Node]
) -> int:
    """Carry out one of PROVIDER_VERBS, after a confirmation for `down`. site: the cluster file and the workspace."""
    if verb == "down" and provider.confirmation is not None:
        _confirm_down(output, provider.confirmation(site.cluster, site.workspace), args.yes)
    with interruption.handle_interruption(nodes, lambda: None):
        try:
            result_text = provider.carry_out(verb, site.cluster, site.workspace, args.hours, args.reason)
        finally:
            if verb == "extend":  # also after an error: the provider may have granted a part of the hours
                store_lease(site)
    output.print_line(result_text)
    output.print_document(display.result_document(verb, site, [], [], [], find_lease(site)))
    return 0


def _confirm_down(output: Output, confirmation: Confirmation | None, yes: bool) -> None:
    """Show what `down` would remove, and ask the user to type `confirmation.name`. Raises InputError if the user types another
    text."""
    if confirmation is None:
        return
    for sentence in confirmation.lines:
        output.print_remark(sentence, style="yellow")
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(
            f"down was not confirmed. Allowed: the option --yes, or the typed name {confirmation.name} on a terminal."
        )
    if output.ask(f"Type the name {confirmation.name} to confirm: ") != confirmation.name:
        raise InputError(f"down was not confirmed: the typed name is not {confirmation.name}. Nothing was changed.")


def _print_hardware(output: Output) -> int:
    output.print_table("", hardware.COLUMNS, hardware.catalogue_rows())
    output.print_document(hardware.catalogue_document())
    return 0


def _print_request(
    output: Output, file: str | None, file_cluster: Cluster, workspace: Workspace, provider: Provider[Any], *, profile: bool
) -> int:
    """Print only the text of the request for the provider, so that the user can store it in a file. No node has to exist."""
    if provider.request is None:
        raise InputError(f"{file or workspace.path / 'cluster.yaml'}: {provider.carry_out('request', file_cluster, workspace)}")
    text = provider.carry_out("profile" if profile else "request", file_cluster, workspace)
    if not output.json:
        output.results.file.write(text)
    output.print_document(
        {**display.result_document("request", Site(file_cluster, workspace, []), [], [], []), "request": text}
    )
    return 0


def _make_site(file_cluster: Cluster, workspace: Workspace, nodes: Sequence[Node], pretend_path: Path | None) -> Site:
    """The nodes with their facts, which come from the machines, or from the file `pretend_path`. Raises InputError."""
    facts_of_nodes = (
        [Facts(node, order.list_operation_files()) for node in nodes]
        if pretend_path is None
        else pretend.read_pretended_facts(pretend_path, nodes)
    )
    entry_by_name = {entry.name: entry for entry in file_cluster.nodes}
    targets = [Target(facts.node, facts, entry_by_name.get(facts.node.name)) for facts in facts_of_nodes]
    return Site(file_cluster, workspace, targets, pretended=pretend_path is not None)


def _carry_out_and_show(
    output: Output,
    verb: str,
    site: Site,
    targets: list[Target],
    operations: list[Operation],
    only: set[str],
    parallel: int | None,
) -> int:
    find_lease(site)  # an unreadable lease raises an error here, before anything is changed
    with interruption.handle_interruption([target.node for target in site.targets], lambda: len(BEGUN)):
        steps, findings = _carry_out_verb(output, verb, site, targets, operations, only, parallel)
    failed = [step for step in steps if step.state in ("failed", "administrator")]
    display.show_machines(output, targets)
    if findings:
        display.show_checks(output, findings)
    if (lease := find_lease(site)) is not None:
        output.print_line(lease.describe(datetime.now(UTC)))
    output.print_document(display.result_document(verb, site, targets, steps, findings, lease))
    has_unanswered = any(isinstance(answer, Unanswered) for target in targets for answer in target.facts.answers.values())
    return 1 if failed or is_verified(findings) is False or (has_unanswered and verb == "facts") else 0


def _carry_out_verb(
    output: Output,
    verb: str,
    site: Site,
    targets: list[Target],
    operations: list[Operation],
    only: set[str],
    parallel: int | None,
) -> tuple[list[OperationStep], list[Finding]]:
    """Carry out apply, plan, facts or verify on `targets`. Returns (the steps of the operations, the results of the checks)."""
    if verb == "facts":
        map_targets(targets, _ask_all_facts)
    steps = []
    if verb in ("apply", "plan"):
        if site.cluster.login is not None and not site.pretended:
            site.targets[0].node.run(["true"], timeout_s=LOGIN_S)  # logs in before the live table: SSH may ask for a password
        with progress.show_progress(output, [target.node.name for target in targets], len(operations)) as observer:
            steps = converge(site, operations, targets=targets, only=only, dry=verb == "plan", parallel=parallel, view=observer)
    if steps and not STOPPING.is_set():
        display.show_operations(output, steps)
    if verb == "verify" and not site.cluster.ssh.sudo:  # operations are only planned, to list the work for an administrator
        planned_steps = converge(site, operations, targets=targets, only=only, dry=True, parallel=parallel)
        steps = [step for step in planned_steps if step.state == "administrator"]
        site.skipped.clear()
    failed = {step.node: step.operation for step in steps if step.state == "failed"}
    administrator_operations = display.administrator_operations(steps)
    findings: list[Finding] = []
    if verb in ("apply", "verify"):
        findings = [Finding(node, "operations", Outcome(False, f"{name} failed", RERUN_HINT)) for node, name in failed.items()]
        findings += [
            Finding(name, "administrator", Outcome(False, f"an administrator has to do: {', '.join(names)}", ROOT_HINT))
            for name, names in administrator_operations.items()
        ]
        ready_targets = [target for target in targets if target.node.name not in {**failed, **administrator_operations}]
        remark = functools.partial(output.print_remark, style="dim")
        if ready_targets and not STOPPING.is_set():
            findings += verify_targets(site, ready_targets, order.select_checks(find_provider(site.cluster.provider)), remark)
            inventory_file.record_all_reduces(site, findings, replaces=verb == "verify")
    return steps, findings


def _ask_all_facts(target: Target) -> None:
    for fact in order.FACTS:
        with contextlib.suppress(Unanswered):  # `target.facts` stores the failure, and the display lists it
            target.facts[fact]


def _find_cluster(file: str | None, workspace: Workspace) -> Cluster:
    """The cluster of the file in the command, else of cluster.yaml in the workspace. Raises InputError if both are missing."""
    workspace_file = workspace.path / "cluster.yaml"
    if file is None and not workspace_file.exists() and not workspace_file.is_symlink():
        raise InputError(
            f"{workspace_file}: no such file, and the command names no other cluster file. To get one, run: "
            "provision init > cluster.yaml. Or name a cluster file: provision FILE."
        )
    return cluster.find_cluster(Path(file) if file is not None else None, workspace.path)


def _read_cluster_again(file: str | None, workspace: Workspace) -> Cluster:
    """Read the cluster file again after its machines were created.

    An error is raised as ShardlabError and not as InputError, which would mean that nothing was changed.
    """
    try:
        return _find_cluster(file, workspace)
    except InputError as error:
        raise ShardlabError(f"{error} Its machines exist. Correct the cluster file, and run the same command again.") from None


def _choose_names(kind: str, allowed_names: Iterable[str], only: list[str] | None, skip: list[str] | None) -> set[str]:
    """The names of `allowed_names` in `only` (None: all) but not in `skip`. Raises UnknownName. kind: `node` or `operation`."""
    names = list(allowed_names)
    for name in [*(only or []), *(skip or [])]:
        if name not in names:
            raise UnknownName(kind, name, names)
    return {name for name in names if (only is None or name in only) and name not in (skip or [])}
