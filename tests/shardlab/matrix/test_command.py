"""Commands as workloads: placeholders, where steps are found, and names that a matrix may not use."""

import pytest

from shardlab.errors import InputError
from shardlab.matrix import command
from shardlab.matrix.command import CommandWorkload, StepSource

REGEX = StepSource(regex=r"iter (?P<step>\d+): loss (?P<loss>\S+), (?P<ms>[\d.]+)ms")


def test_placeholders_are_replaced_by_the_values_of_the_cell():
    workload = CommandWorkload(["python", "t.py", "--gpus={gpus}", "{set.lr}", 7, "{{}}", "{set.flag}"])
    filled = command.fill_command(workload, {"gpus": 2, "set.lr": 1e-4, "set.flag": True})
    assert filled.words == ["python", "t.py", "--gpus=2", "0.0001", "7", "{}", "true"]


@pytest.mark.parametrize("word", ["{set.lr}", "{gpus!r}", "{gpus:3}", "{}", "{gpus", "}"])
def test_a_placeholder_without_a_value_or_with_a_format_is_refused(word):
    with pytest.raises(InputError, match=r"braces|a name alone"):
        command.fill_command(CommandWorkload([word]), {"gpus": 2})


def test_a_later_attempt_gets_the_placeholder_of_the_checkpoint():
    workload = CommandWorkload(["t.py"], resume=["--from", "{checkpoint}", "{gpus}"])
    assert command.fill_command(workload, {"gpus": 2}).resume == ["--from", "{checkpoint}", "2"]
    assert command.find_placeholders(workload) == {"checkpoint", "gpus"}


@pytest.mark.parametrize(
    ("source", "line", "values"),
    [
        (REGEX, "iter 40: loss 2.5e-1, 1,204.5ms", None),
        (REGEX, "iter 40: loss 2.5e-1, 204.5ms, mfu 3", {"step": 40.0, "loss": 0.25, "ms": 204.5}),
        (REGEX, "saving checkpoint", None),
        (StepSource(regex=r"(?P<step>\S+) steps"), "1,000 steps", {"step": 1000.0}),
        (StepSource(regex=r"(?P<step>\S+) steps"), "nan steps", None),
        (StepSource(regex=r"(?P<step>\S+) steps"), "1.5 steps", None),
        (StepSource(regex=r"(?P<step>\S+) steps"), "-1 steps", None),
        (StepSource(jsonl="log", names={"step": "iter"}), '{"iter": 3, "loss": "0.5", "step": 9}', {"step": 3.0, "loss": 0.5}),
        (StepSource(jsonl="log"), '{"step": true}', None),
        (StepSource(jsonl="log"), "[1]", None),
        (StepSource(jsonl="log"), '{"step": 1e300}', None),
        (
            StepSource(jsonl="log"),
            '{"step": 2, "tokens": -1, "ms": "inf", "seconds": "nan", "loss": -3}',
            {"step": 2.0, "loss": -3.0},
        ),
        (StepSource(jsonl="log"), "{" * 100_000, None),
        (StepSource(jsonl="log"), '{"step": 3, "loss": null}', {"step": 3.0}),
    ],
)
def test_the_values_of_a_step_are_read_from_a_line(source, line, values):
    assert command.read_step(source, line) == values


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (StepSource(), "found neither"),
        (StepSource(jsonl="a", regex="b"), "found both"),
        (StepSource(regex="("), "not a regular expression"),
        (StepSource(regex="loss (?P<loss>.)"), "found the groups loss"),
        (StepSource(regex="(?P<step>.)(?P<lr>.)"), "Allowed: step, and any of loss, tokens, seconds, ms"),
        (StepSource(jsonl="a", names={"lr": "x"}), "no value of a step"),
        (StepSource(regex=r"step (?P<step>\d+)", sample="iter 3"), "no step is found in 'iter 3'"),
    ],
)
def test_a_wrong_description_of_steps_is_named(source, fault):
    assert fault in command.explain_wrong_steps(source)
    assert command.explain_wrong_steps(REGEX) is None


@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "SHARDLAB_RUN", "MASTER_PORT", "SLURM_PROCID", "PYTHONPATH", "A-B", "1A"]
)
def test_a_variable_that_launchers_set_is_refused(name):
    assert command.explain_wrong_variable(name)
    assert command.explain_wrong_variable("NCCL_ALGO") is None
