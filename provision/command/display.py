"""The results of `provision`, as tables for a person and as one JSON document for a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from provision.fact import Unanswered
from provision.facts.addresses import ADDRESSES
from provision.facts.host import HOST
from provision.facts.torch import TORCH
from provision.operation import Site, Target
from provision.plan import OperationStep
from provision.verify import Finding, is_verified
from shardlab.cluster.lease import Lease
from shardlab.hardware.host import Host
from shardlab.terminal import printable
from shardlab.terminal.console import Output

SCHEMA = 1
HIDDEN_FACTS = (
    "packages",
    "files",
    "services",
    "nodes",
    "trial",
    "Slurm here",
)  # facts that the output leaves out: their answers have hundreds of lines, which only operations and checks read
STYLES = {"changed": "green", "would change": "yellow", "administrator": "yellow", "failed": "red", "skipped": "dim"}
DETAILED_STATES = ("changed", "would change", "administrator", "failed")  # their details are shown also for several nodes


def result_document(
    verb: str,
    site: Site,
    targets: Sequence[Target],
    steps: Sequence[OperationStep],
    findings: Sequence[Finding],
    lease: Lease | None = None,
) -> Any:
    """The result of a verb as the JSON document that --json prints.

    In the document, `facts` has the answers of a node, and `unanswered` has the reason for each question without an answer.
    lease: the lease of the machines; None if they are not lent.
    """
    return {
        "schema": SCHEMA,
        "cluster": site.cluster.name,
        "provider": site.cluster.provider,
        "verb": verb,
        "changes": sum(step.changes for step in steps),
        "nodes": [_node_document(target, steps) for target in targets],
        "verified": is_verified(findings),
        "checks": [{"node": row.node, "check": row.check, **msgspec.to_builtins(row.outcome)} for row in findings],
        **({"lease": lease} if lease is not None else {}),
    }


def _node_document(target: Target, steps: Sequence[OperationStep]) -> dict[str, Any]:
    node = target.node
    answers = target.facts.answers
    answered = {name: a for name, a in answers.items() if not isinstance(a, Unanswered) and name not in HIDDEN_FACTS}
    return {
        "name": node.name,
        "host": node.host,
        "port": node.port,
        "user": node.user,
        "addresses": answered.pop(ADDRESSES.name, None),
        "facts": msgspec.to_builtins(answered),
        "unanswered": {name: str(answer) for name, answer in answers.items() if isinstance(answer, Unanswered)},
        "operations": [
            {"name": step.operation, "state": step.state, "changes": step.changes, "says": step.says}
            | ({"administrator": step.commands} if step.state == "administrator" else {})
            for step in steps
            if step.node == node.name
        ],
    }


def show_machines(output: Output, targets: Sequence[Target]) -> None:
    """Print a table for each node with the facts that the node was asked for."""
    for target in targets:
        rows = _machine_rows(target)
        for answer in target.facts.answers.values():
            if isinstance(answer, Unanswered):
                rows.append(("not answered", str(answer)))
        if rows:
            output.print_table(target.node.name, ("what", "found"), rows)


def _machine_rows(target: Target) -> list[tuple[str, str]]:
    answers = target.facts.answers
    rows: list[tuple[str, str]] = []
    host = answers.get(HOST.name)
    if isinstance(host, Host):
        addresses = answers.get(ADDRESSES.name)
        addresses_by_nic = addresses if isinstance(addresses, dict) else {}
        nics = [nic.name for nic in host.nics if nic.kind == "physical" or nic.name in addresses_by_nic]
        rows = [
            ("system", f"{host.system}, kernel {host.kernel}"),
            ("CPU", f"{host.cpu_model or 'model not stated'}, {host.cpus_allowed} of {host.cpus} usable"),
            ("memory", f"{host.memory_bytes / 2**30:.1f} GiB"),
            ("GPUs", _gpus_text(host)),
            ("NICs", ", ".join(" ".join([nic, *addresses_by_nic.get(nic, ())]) for nic in nics) or "none but loopback"),
            ("Python", host.python),
        ]
        torch = answers.get(TORCH.name)
        if torch is None or isinstance(torch, Unanswered):
            rows.append(("torch", host.packages.get("torch", "not installed")))
        elif torch.version is None:
            rows.append(("torch", f"does not import ({torch.why_absent})"))
        else:
            rows.append(("torch", f"{torch.version} ({', '.join(torch.backends) or 'without distributed training'})"))
    return rows


def _gpus_text(host: Host) -> str:
    if not host.gpus:
        return f"none ({host.gpu_why_absent or 'NVML finds none'})"
    kinds: dict[tuple[str, int | None], int] = {}
    for gpu in host.gpus:
        kinds[gpu.name, gpu.memory_bytes] = kinds.get((gpu.name, gpu.memory_bytes), 0) + 1
    gpu_texts = [
        f"{count} x {name}" + (f" ({size / 2**30:.0f} GiB)" if size is not None else "")
        for (name, size), count in kinds.items()
    ]
    return ", ".join(gpu_texts) + f", driver {host.gpu_driver}"


def show_operations(output: Output, steps: Sequence[OperationStep]) -> None:
    """Print what each operation did on each node, the commands for an administrator, and the number of changes.

    For one node, or with --verbose, the details of all operations are listed; otherwise only the details of operations whose
    state is in DETAILED_STATES.
    """
    nodes = list(dict.fromkeys(step.node for step in steps))
    listed = [step for step in steps if len(nodes) == 1 or output.verbose or step.state in DETAILED_STATES]
    if len(nodes) > 1:
        states = {(step.operation, step.node): step.state for step in steps}
        names = list(dict.fromkeys(step.operation for step in steps))
        rows = [[name, *(states.get((name, node), "") for node in nodes)] for name in names]
        output.print_table("operations", ("operation", *nodes), rows)
    rows = [[step.node, step.operation, step.state, "\n".join(step.says)] for step in listed]
    if rows:
        title = "operations" if len(nodes) == 1 else "what was done" if any(s.state == "changed" for s in listed) else "details"
        output.print_table(title, ("node", "operation", "state", "what"), rows, [STYLES.get(step.state, "") for step in listed])
    show_administrator_commands(output, steps)
    changes = sum(step.changes for step in steps)
    is_planned = any(step.state == "would change" for step in steps)
    if any(step.state == "failed" for step in steps):
        output.print_line(f"changes: {changes}; some failed or could not be planned", "red")
    elif operations_by_node := administrator_operations(steps):
        parts = "; ".join(f"{node}: {', '.join(names)}" for node, names in operations_by_node.items())
        output.print_line(f"changes: {changes}{' planned' if is_planned else ''}; an administrator has to do: {parts}", "red")
    elif changes:
        output.print_line(f"changes: {changes}{' planned, none was made' if is_planned else ''}")
    else:
        output.print_line("changes: 0, nothing to do")


def administrator_operations(steps: Sequence[OperationStep]) -> dict[str, list[str]]:
    """The operations that only an administrator can carry out, as a list for each node, by the name of the node."""
    parts: dict[str, list[str]] = {}
    for step in steps:
        if step.state == "administrator":
            parts.setdefault(step.node, []).append(step.operation)
    return parts


def show_administrator_commands(output: Output, steps: Sequence[OperationStep]) -> None:
    """Print the commands for an administrator, by node, as a shell script that the user can send to the administrator."""
    for node in administrator_operations(steps):
        output.print_line(f"# for an administrator: to be run as root on {node}", "bold")
        for step in steps:
            if step.node != node or step.state != "administrator":
                continue
            for description, script in zip(step.says, step.commands, strict=True):
                heading = f"# {step.operation}: {printable.one_line(description)}"
                if not output.print_script(f"{heading}\n{script}"):
                    output.print_script(
                        f"{heading}\n# not shown: a character of its commands would steer the terminal; use --json"
                    )
        output.print_line("")


def show_checks(output: Output, findings: Sequence[Finding]) -> None:
    """Print a table of the checks of each node, the advice for each failed check, and whether the nodes are ready."""
    label_and_color = {True: ("passed", "green"), False: ("failed", "red"), None: ("does not apply", "dim")}
    rows = [(f.node, f.check, label_and_color[f.outcome.passed][0], f.outcome.says) for f in findings]
    output.print_table(
        "checks", ("node", "check", "result", "what"), rows, [label_and_color[f.outcome.passed][1] for f in findings]
    )
    for finding in findings:
        if finding.outcome.passed and finding.outcome.advice is not None:
            output.print_line(f"{finding.node}: {finding.check}: {finding.outcome.advice}.", "yellow")
    failed_findings = [finding for finding in findings if finding.outcome.passed is False]
    for finding in failed_findings:
        output.print_detail(finding.outcome.transcript)
        sentence, advice = finding.outcome.says.rstrip("."), finding.outcome.advice or ""
        end = "" if advice.endswith("?") else "."
        output.print_line(f"{finding.node}: {finding.check}: {sentence}. Advice: {advice}{end}", "red")
    if failed_findings:
        output.print_line(f"not verified: {len(failed_findings)} of {len(findings)} checks failed", "red")
    elif is_verified(findings):
        output.print_line("verified: ready to train", "green")
