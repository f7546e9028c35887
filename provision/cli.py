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

from provision import interruption, inventory_file, lock, roles
from provision.check import Outcome, each
from provision.cloudlab import hardware
from provision.command import command_line, display, progress
from provision.fact import Facts, Unanswered
from provision.interruption import STOPPING
from provision.node import Node
from provision.nodes import pretend
from provision.operation import Operation, Site, Target
from provision.operations.inventory import keep_lease, lease_of
from provision.plan import BEGUN, MACHINE, OperationStep, converge
from provision.provider import Confirmation, Provider, ToCreate
from provision.provider import provider as load_provider
from provision.verify import Finding, verified, verify
from shardlab import completion
from shardlab.cluster import cluster, login_node
from shardlab.cluster.cluster import Cluster
from shardlab.errors import InputError, ShardlabError, UnknownName
from shardlab.terminal import console
from shardlab.terminal.console import Output
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

UNLOCKED = ("plan", "facts")  # verbs that take no lock: they change nothing, and do not disturb other commands
BY_PROVIDER = ("warm", "extend", "down")  # the provider carries out these verbs; no command runs on a node
LOGIN_S = 30.0
BY_ROOT = "send the commands that `provision CLUSTER.yaml plan` prints to an administrator, then run the same command again"
AGAIN = "fix the problem that this operation reports and run the same command again; it continues from there"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `provision` with the words `argv` (without the program's name). Returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = command_line.parser()
    completion.answer_shell(parser)
    arguments = parser.parse_intermixed_args(words)
    return console.run(functools.partial(_run, arguments, words), name="provision", interrupted=None)


def _run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    output = Output.of(arguments)
    file, verb = command_line.file_and_verb(arguments)
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    for sentence in workspace.exposed():  # a user who can change the workspace could replace host keys and addresses of nodes
        output.remark(f"warning: {sentence}", style="yellow")
    if verb == "init":
        from provision.command import init  # not imported at the top: init imports psutil, which would make --help slower

        return init.run(output, workspace, arguments.site, arguments.ssh or [], arguments.cloudlab)
    if verb == "hardware":
        return _hardware(output)
    described = _cluster(file, workspace)
    provider = load_provider(described.provider)
    if verb == "request":
        return _request(output, file, described, workspace, provider, profile=arguments.profile)
    if provider.name == "local" and verb in ("apply", "verify"):  # both verbs start two ranks: not allowed on a login node
        login_node.must_not_be(here=arguments.here)
    named = [Path(file)] if file is not None and Path(file).resolve().is_relative_to(workspace.real_path) else []
    if arguments.trust:
        workspace_trust.consent(workspace, output.remark, named)
    _show_once(output, workspace, described if named else None)
    workspace_trust.must_be_allowed(workspace, "log in to the nodes and change them", named)
    present = described
    if provider.present is not None and verb not in BY_PROVIDER:
        found = provider.present(described, workspace)
        if isinstance(found, ToCreate):
            _check_creation(described, found, verb, arguments)
            if verb == "plan":
                return _would_create(output, described, workspace, found)
        else:
            present = found
    nodes = provider.nodes(present, workspace)
    limited = _chosen("node", [node.name for node in nodes], arguments.limit, None)
    order = roles.operations(provider)
    chosen = _chosen("operation", [operation.name for operation in order], arguments.only, arguments.skip) | {MACHINE}
    locks = []
    if verb not in UNLOCKED:
        locks = [(path, f"the cluster {described.name}") for path in provider.locks(described)]
        locks.append((workspace.own / "provision.lock", f"the workspace {workspace.path}"))
    if verb not in UNLOCKED or (provider.name != "local" and arguments.pretend is None):  # a login stores host keys
        workspace_trust.begin(workspace)
    with lock.held(locks, ["provision", *words]):
        if verb in BY_PROVIDER:
            if verb == "down" and provider.confirmation is not None:
                _confirm(output, provider.confirmation(described, workspace), arguments.yes)
            site = Site(described, workspace, [])
            with interruption.handled(nodes, lambda: None):
                try:
                    said = provider.carry_out(verb, described, workspace, arguments.hours, arguments.reason)
                finally:
                    if verb == "extend":  # also after an error: the provider may have granted a part of the hours
                        keep_lease(site)
            output.line(said)
            output.document(display.document(verb, site, [], [], [], lease_of(site)))
            return 0
        if provider.obtain is not None and verb == "apply":
            with interruption.handled([], lambda: None):
                provider.obtain(described, workspace)
            present = _with_nodes(file, workspace)
            nodes = provider.nodes(present, workspace)
            limited = _chosen("node", [node.name for node in nodes], arguments.limit, None)
        site = _site(present, workspace, nodes, arguments.pretend)
        if site.pretended:
            output.remark(f"{arguments.pretend} describes the nodes; no machine is reached", style="dim")
        elif provider.operations is None or MACHINE in provider.operations:
            order = [Operation(MACHINE, lambda site, target: provider.bring_up(present, workspace, target.node)), *order]
        targets = [target for target in site.targets if target.node.name in limited]
        return _converge(output, verb, site, targets, order, chosen, arguments.parallel)


def _show_once(output: Output, workspace: Workspace, named: Cluster | None) -> None:
    """Show what the cluster file makes commands do, if it was there before the workspace began; on a terminal, ask the user.

    named: as in `workspace_trust.unshown_powers`. Raises InputError if the user does not agree.
    """
    unshown = workspace_trust.unshown_powers(workspace, named)
    if not unshown:
        return
    for power in unshown:
        output.remark(f"the cluster file {power}", style="yellow")
    if sys.stdin.isatty() and output.ask("This file was here before. Type yes if this is what it should do: ") != "yes":
        raise InputError("the cluster file was not allowed. Nothing was changed.")
    workspace_trust.mark_shown(workspace)


def _check_creation(described: Cluster, to_create: ToCreate, verb: str, arguments: argparse.Namespace) -> None:
    """Check a command for a cluster whose machines do not exist yet. Raises InputError if its verb or an option needs nodes, or
    if the machines cannot be created now."""
    if to_create.blocked is not None and verb != "plan":
        raise InputError(to_create.blocked)
    if verb not in ("apply", "plan") or arguments.limit or arguments.pretend is not None:
        what = "--limit" if arguments.limit else "--pretend" if arguments.pretend is not None else f"the verb {verb}"
        raise InputError(
            f"{described.name}: {what} needs nodes, and its machines do not exist yet. Run first: provision CLUSTER.yaml"
        )


def _would_create(output: Output, described: Cluster, workspace: Workspace, to_create: ToCreate) -> int:
    """Print the plan for machines that do not exist yet. The changes on the machines can be planned only when they exist."""
    for line in to_create.says:
        output.line(line)
    output.line("changes: 1 planned, none was made; the nodes can be planned for when they exist")
    if to_create.blocked is not None:
        output.remark(f"note: {to_create.blocked}", style="yellow")
    shown = display.document("plan", Site(described, workspace, []), [], [], [])
    output.document({**shown, "changes": 1, "request": to_create.request})
    return 0


def _confirm(output: Output, confirmation: Confirmation | None, yes: bool) -> None:
    """Show what `down` would remove, and ask the user to type `confirmation.name`. Raises InputError if the user types another
    text."""
    if confirmation is None:
        return
    for sentence in confirmation.says:
        output.remark(sentence, style="yellow")
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(
            f"down was not confirmed. Allowed: the option --yes, or the typed name {confirmation.name} on a terminal."
        )
    if output.ask(f"Type the name {confirmation.name} to confirm: ") != confirmation.name:
        raise InputError(f"down was not confirmed: the typed name is not {confirmation.name}. Nothing was changed.")


def _hardware(output: Output) -> int:
    output.table("", hardware.COLUMNS, hardware.rows())
    output.document(hardware.document())
    return 0


def _request(
    output: Output, file: str | None, described: Cluster, workspace: Workspace, provider: Provider[Any], *, profile: bool
) -> int:
    """Print only the text of the request for the provider, so that the user can store it in a file. No node has to exist."""
    if provider.request is None:
        raise InputError(f"{file or workspace.path / 'cluster.yaml'}: {provider.carry_out('request', described, workspace)}")
    text = provider.carry_out("profile" if profile else "request", described, workspace)
    if not output.json:
        output.results.file.write(text)
    output.document({**display.document("request", Site(described, workspace, []), [], [], []), "request": text})
    return 0


def _site(described: Cluster, workspace: Workspace, nodes: Sequence[Node], pretended: Path | None) -> Site:
    """The nodes with their facts, which come from the machines, or from the file `pretended`. Raises InputError."""
    answers = [Facts(node, roles.files()) for node in nodes] if pretended is None else pretend.facts(pretended, nodes)
    entries = {entry.name: entry for entry in described.nodes}
    targets = [Target(facts.node, facts, entries.get(facts.node.name)) for facts in answers]
    return Site(described, workspace, targets, pretended=pretended is not None)


def _converge(
    output: Output,
    verb: str,
    site: Site,
    targets: list[Target],
    order: list[Operation],
    chosen: set[str],
    parallel: int | None,
) -> int:
    lease_of(site)  # an unreadable lease raises an error here, before anything is changed
    with interruption.handled([target.node for target in site.targets], lambda: len(BEGUN)):
        steps, findings = _carried_out(output, verb, site, targets, order, chosen, parallel)
    failed = [step for step in steps if step.state in ("failed", "administrator")]
    display.machines(output, targets)
    if findings:
        display.checks(output, findings)
    if (lease := lease_of(site)) is not None:
        output.line(lease.in_words(datetime.now(UTC)))
    output.document(display.document(verb, site, targets, steps, findings, lease))
    unanswered = any(isinstance(a, Unanswered) for target in targets for a in target.facts.answers.values())
    return 1 if failed or verified(findings) is False or (unanswered and verb == "facts") else 0


def _carried_out(
    output: Output,
    verb: str,
    site: Site,
    targets: list[Target],
    order: list[Operation],
    chosen: set[str],
    parallel: int | None,
) -> tuple[list[OperationStep], list[Finding]]:
    """Carry out apply, plan, facts or verify on `targets`. Returns (the steps of the operations, the results of the checks)."""
    if verb == "facts":
        each(targets, _ask_all)
    steps = []
    if verb in ("apply", "plan"):
        if site.cluster.login is not None and not site.pretended:
            site.targets[0].node.run(["true"], timeout_s=LOGIN_S)  # logs in before the live table: SSH may ask for a password
        with progress.shown(output, [target.node.name for target in targets], len(order)) as watch:
            steps = converge(site, order, targets=targets, chosen=chosen, dry=verb == "plan", parallel=parallel, watch=watch)
    if steps and not STOPPING.is_set():
        display.operations(output, steps)
    if verb == "verify" and not site.cluster.ssh.sudo:  # operations are only planned, to list the work for an administrator
        planned = converge(site, order, targets=targets, chosen=chosen, dry=True, parallel=parallel)
        steps = [step for step in planned if step.state == "administrator"]
        site.skipped.clear()
    failed = {step.node: step.operation for step in steps if step.state == "failed"}
    missing = display.administrator_parts(steps)
    findings: list[Finding] = []
    if verb in ("apply", "verify"):
        findings = [Finding(name, "operations", Outcome(False, f"{what} failed", AGAIN)) for name, what in failed.items()]
        findings += [
            Finding(name, "administrator", Outcome(False, f"an administrator has to do: {', '.join(parts)}", BY_ROOT))
            for name, parts in missing.items()
        ]
        sound = [target for target in targets if target.node.name not in {**failed, **missing}]
        begins = functools.partial(output.remark, style="dim")
        if sound and not STOPPING.is_set():
            findings += verify(site, sound, roles.checks(load_provider(site.cluster.provider)), begins)
            inventory_file.record(site, findings, again=verb == "verify")
    return steps, findings


def _ask_all(target: Target) -> None:
    for fact in roles.FACTS:
        with contextlib.suppress(Unanswered):  # `target.facts` stores the failure, and the display lists it
            target.facts[fact]


def _cluster(file: str | None, workspace: Workspace) -> Cluster:
    """The cluster of the file in the command, else of cluster.yaml in the workspace. Raises InputError if both are missing."""
    own = workspace.path / "cluster.yaml"
    if file is None and not own.exists() and not own.is_symlink():
        raise InputError(
            f"{own}: no such file, and the command names no other cluster file. To get one, run: "
            "provision init > cluster.yaml. Or name a cluster file: provision FILE."
        )
    return cluster.find(Path(file) if file is not None else None, workspace.path)


def _with_nodes(file: str | None, workspace: Workspace) -> Cluster:
    """Read the cluster file again after its machines were created.

    An error is raised as ShardlabError and not as InputError, which would mean that nothing was changed.
    """
    try:
        return _cluster(file, workspace)
    except InputError as error:
        raise ShardlabError(f"{error} Its machines exist. Correct the cluster file, and run the same command again.") from None


def _chosen(kind: str, menu: Iterable[str], only: list[str] | None, skip: list[str] | None) -> set[str]:
    """The names of `menu` in `only` (None: all) but not in `skip`. Raises UnknownName. kind: `node` or `operation`."""
    names = list(menu)
    for name in [*(only or []), *(skip or [])]:
        if name not in names:
            raise UnknownName(kind, name, names)
    return {name for name in names if (only is None or name in only) and name not in (skip or [])}
