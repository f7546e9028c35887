"""Checks that torch.compile works on the GPU. Without a C compiler on the node, every run with `compile: true` would fail."""

from __future__ import annotations

import msgspec

from provision.check import Check, Outcome
from provision.checks import trial
from provision.checks.all_reduce import explain_failure
from provision.checks.trial import COMPILED_S
from provision.fact import decode_last_line
from provision.operation import Site, Target
from shardlab.remote.remote import CommandOutput

MOST_DIFFERENCE = 1e-5  # results are float32 numbers up to 3, and two versions of sin may differ in the last bits
COMPILER_ADVICE = "install a C compiler and Python's headers (gcc, libc6-dev, python3-dev), or train without compile: true"


class CompiledReport(msgspec.Struct, frozen=True):
    """The report that the test program of torch.compile (_compiled.py) prints as JSON."""

    difference: float
    """The largest difference between a result of the compiled function and of the plain function."""


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if torch.compile generates correct kernels for the first GPU of this node."""
    torch_trial = trial.run_trial(target)
    if torch_trial.compiled is None:
        return Outcome(None, "torch sees no GPU to compile for")
    return judge_compiled(torch_trial.compiled)


def judge_compiled(program_output: CommandOutput) -> Outcome:
    """Returns a passed Outcome if the results of the compiled function and of the plain function agree."""
    if program_output.code != 0:
        message = f"torch.compile does not work on the GPU: {explain_failure(program_output, COMPILED_S)}"
        return Outcome(False, message, COMPILER_ADVICE, transcript=program_output.stderr)
    try:
        difference = decode_last_line(program_output.stdout, CompiledReport).difference
    except ValueError as error:
        return Outcome(False, f"the test's output cannot be read: {error}", "try again: provision CLUSTER.yaml verify")
    if not difference <= MOST_DIFFERENCE:
        message = f"a compiled function differs from the plain one by {difference:g}"
        return Outcome(False, message, "do not train with compile: true here: is Triton the version that torch was built with?")
    return Outcome(True, "torch.compile makes kernels for the GPU", measured={"largest_difference": difference})


COMPILES = Check("compile", run)
