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
# facts that the output leaves out: their answers have hundreds of lines, which only operations and checks read
HIDDEN_FACTS = ("packages", "files", "services", "nodes", "trial", "Slurm here")
STYLE_BY_STATE = {"changed": "green", "would change": "yellow", "administrator": "yellow", "failed": "red", "skipped": "dim"}
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
        "nodes": [_make_node_document(target, steps) for target in targets],
        "verified": is_verified(findings),
        "checks": [{"node": row.node, "check": row.check, **msgspec.to_builtins(row.outcome)} for row in findings],
        **({"lease": lease} if lease is not None else {}),
    }


def _make_node_document(target: Target, steps: Sequence[OperationStep]) -> dict[str, Any]:
    node = target.node
    answers = target.facts.answers
    answer_by_fact = {name: a for name, a in answers.items() if not isinstance(a, Unanswered) and name not in HIDDEN_FACTS}
    return {
        "name": node.name,
        "host": node.host,
        "port": node.port,
        "user": node.user,
        "addresses": answer_by_fact.pop(ADDRESSES.name, None),
        "facts": msgspec.to_builtins(answer_by_fact),
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
        machine_rows = _make_machine_rows(target)
        for answer in target.facts.answers.values():
            if isinstance(answer, Unanswered):
                machine_rows.append(("not answered", str(answer)))
        if machine_rows:
            output.print_table(target.node.name, ("what", "found"), machine_rows)


def _make_machine_rows(target: Target) -> list[tuple[str, str]]:
    answer_by_fact = target.facts.answers
    machine_rows: list[tuple[str, str]] = []
    host_facts = answer_by_fact.get(HOST.name)
    if isinstance(host_facts, Host):
        address_answer = answer_by_fact.get(ADDRESSES.name)
        addresses_by_nic = address_answer if isinstance(address_answer, dict) else {}
        nic_names = [nic.name for nic in host_facts.nics if nic.kind == "physical" or nic.name in addresses_by_nic]
        machine_rows = [
            ("system", f"{host_facts.system}, kernel {host_facts.kernel}"),
            ("CPU", f"{host_facts.cpu_model or 'model not stated'}, {host_facts.cpus_allowed} of {host_facts.cpus} usable"),
            ("memory", f"{host_facts.memory_bytes / 2**30:.1f} GiB"),
            ("GPUs", _describe_gpus(host_facts)),
            ("NICs", ", ".join(" ".join([nic, *addresses_by_nic.get(nic, ())]) for nic in nic_names) or "none but loopback"),
            ("Python", host_facts.python),
        ]
        torch = answer_by_fact.get(TORCH.name)
        if torch is None or isinstance(torch, Unanswered):
            machine_rows.append(("torch", host_facts.packages.get("torch", "not installed")))
        elif torch.version is None:
            machine_rows.append(("torch", f"does not import ({torch.why_absent})"))
        else:
            machine_rows.append(("torch", f"{torch.version} ({', '.join(torch.backends) or 'without distributed training'})"))
    return machine_rows


def _describe_gpus(host: Host) -> str:
    if not host.gpus:
        return f"none ({host.gpu_why_absent or 'NVML finds none'})"
    count_by_model: dict[tuple[str, int | None], int] = {}
    for gpu in host.gpus:
        count_by_model[gpu.name, gpu.memory_bytes] = count_by_model.get((gpu.name, gpu.memory_bytes), 0) + 1
    gpu_texts = [
        f"{count} x {gpu_name}" + (f" ({memory_bytes / 2**30:.0f} GiB)" if memory_bytes is not None else "")
        for (gpu_name, memory_bytes), count in count_by_model.items()
    ]
    return ", ".join(gpu_texts) + f", driver {host.gpu_driver}"


def show_operations(output: Output, steps: Sequence[OperationStep]) -> None:
    """Print what each operation did on each node, the commands for an administrator, and the number of changes.

    For one node, or with --verbose, the details of all operations are listed; otherwise only the details of operations whose
    state is in DETAILED_STATES.
    """
    node_names = list(dict.fromkeys(step.node for step in steps))
    listed_steps = [step for step in steps if len(node_names) == 1 or output.verbose or step.state in DETAILED_STATES]
    if len(node_names) > 1:
        state_by_step = {(step.operation, step.node): step.state for step in steps}
        operations = list(dict.fromkeys(step.operation for step in steps))
        state_rows = [[name, *(state_by_step.get((name, node), "") for node in node_names)] for name in operations]
        output.print_table("operations", ("operation", *node_names), state_rows)
    state_rows = [[step.node, step.operation, step.state, "\n".join(step.says)] for step in listed_steps]
    if state_rows:
        table_title = (
            "operations"
            if len(node_names) == 1
            else "what was done"
            if any(step.state == "changed" for step in listed_steps)
            else "details"
        )
        output.print_table(
            table_title,
            ("node", "operation", "state", "what"),
            state_rows,
            [STYLE_BY_STATE.get(step.state, "") for step in listed_steps],
        )
    show_administrator_commands(output, steps)
    change_count = sum(step.changes for step in steps)
    is_planned = any(step.state == "would change" for step in steps)
    if any(step.state == "failed" for step in steps):
        output.print_line(f"changes: {change_count}; some failed or could not be planned", "red")
    elif operations_by_node := find_administrator_operations(steps):
        node_phrases = "; ".join(f"{node}: {', '.join(operations)}" for node, operations in operations_by_node.items())
        output.print_line(
            f"changes: {change_count}{' planned' if is_planned else ''}; an administrator has to do: {node_phrases}", "red"
        )
    elif change_count:
        output.print_line(f"changes: {change_count}{' planned, none was made' if is_planned else ''}")
    else:
        output.print_line("changes: 0, nothing to do")


def find_administrator_operations(steps: Sequence[OperationStep]) -> dict[str, list[str]]:
    """The operations that only an administrator can carry out, as a list for each node, by the name of the node."""
    operations_by_node: dict[str, list[str]] = {}
    for step in steps:
        if step.state == "administrator":
            operations_by_node.setdefault(step.node, []).append(step.operation)
    return operations_by_node


def show_administrator_commands(output: Output, steps: Sequence[OperationStep]) -> None:
    """Print the commands for an administrator, by node, as a shell script that the user can send to the administrator."""
    for node in find_administrator_operations(steps):
        output.print_line(f"# for an administrator: to be run as root on {node}", "bold")
        for step in steps:
            if step.node != node or step.state != "administrator":
                continue
            for description, script in zip(step.says, step.commands, strict=True):
                script_heading = f"# {step.operation}: {printable.clean_to_one_line(description)}"
                if not output.print_script(f"{script_heading}\n{script}"):
                    output.print_script(
                        f"{script_heading}\n# not shown: a character of its commands would steer the terminal; use --json"
                    )
        output.print_line("")


def show_checks(output: Output, findings: Sequence[Finding]) -> None:
    """Print a table of the checks of each node, the advice for each failed check, and whether the nodes are ready."""
    label_and_colour_by_passed = {True: ("passed", "green"), False: ("failed", "red"), None: ("does not apply", "dim")}
    check_rows = [
        (finding.node, finding.check, label_and_colour_by_passed[finding.outcome.passed][0], finding.outcome.says)
        for finding in findings
    ]
    output.print_table(
        "checks",
        ("node", "check", "result", "what"),
        check_rows,
        [label_and_colour_by_passed[finding.outcome.passed][1] for finding in findings],
    )
    for finding in findings:
        if finding.outcome.passed and finding.outcome.advice is not None:
            output.print_line(f"{finding.node}: {finding.check}: {finding.outcome.advice}.", "yellow")
    failed_findings = [finding for finding in findings if finding.outcome.passed is False]
    for finding in failed_findings:
        output.print_detail(finding.outcome.transcript)
        sentence, advice = finding.outcome.says.rstrip("."), finding.outcome.advice or ""
        sentence_end = "" if advice.endswith("?") else "."
        output.print_line(f"{finding.node}: {finding.check}: {sentence}. Advice: {advice}{sentence_end}", "red")
    if failed_findings:
        output.print_line(f"not verified: {len(failed_findings)} of {len(findings)} checks failed", "red")
    elif is_verified(findings):
        output.print_line("verified: ready to train", "green")
