"""Verbs: the words that give parsed arguments again, and options that belong to another verb."""

import subprocess
import sys

import pytest

import collect.cli
import jobs.cli
import provision.cli
from shardlab.verb import format_words

CLIS = {cli.__package__: cli for cli in (provision.cli, jobs.cli, collect.cli)}


@pytest.mark.parametrize(
    "line",
    [
        "jobs plan --matrix quickstart --scale-out 16 64 --schedule=-x",
        "jobs submit --from=a.zip --where=-gpus>1 --repeats 2 --wait -v --max-gpu-hours 2.5 --wait-gpus 0 --json",
        "jobs retry --only failed,hung ddp-* fsdp2-* --trust --workspace elsewhere",
        "jobs retry",
        "jobs logs --rank 0 -- --workspace",
        "jobs trace /scratch/traces --per-run 4 --pack",
        "collect fetch --run ddp-* --run fsdp2-* --yes",
    ],
)
def test_the_words_made_from_arguments_give_these_arguments(line):
    program, *words = line.split()
    parser = CLIS[program].parser()
    arguments = parser.parse_args(words)
    assert parser.parse_args(format_words(arguments)) == arguments


def test_words_leave_out_what_is_omitted_and_what_is_a_default():
    arguments = jobs.cli.parser().parse_args(["plan", "--scale", "full", "--matrix", "a", "--workspace", "w", "--cluster", "c"])
    assert format_words(arguments, omitted_names=("workspace", "cluster")) == ["plan", "--matrix=a"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "provision facts --skip hosts",
            "--skip belongs to the verbs apply, plan, verify and cannot be combined with the verb",
        ),
        ("provision cluster.yaml --hours=3", "--hours belongs to the verb extend and cannot be combined with the verb 'apply'"),
        ("provision --yes cluster.yaml warm", "--yes belongs to the verb down and cannot be combined with the verb 'warm'"),
        ("jobs status --rank 1", "--rank belongs to the verb logs and cannot be combined with the verb 'status'"),
        ("collect summarize --since 2031-06-01", "--since belongs to the verb history and cannot be combined with"),
        ("jobs --trust status", "--trust comes after the verb: jobs status --trust"),
        ("provision plan --limt node0", "unrecognized arguments: --limt"),
        ("collect summarize --sinc 2031-06-01", "unrecognized arguments: --sinc 2031-06-01"),
    ],
)
def test_an_option_of_another_verb_is_refused_with_the_name_of_its_verb(line, why, capsys):
    program, *words = line.split()
    with pytest.raises(SystemExit, match="2"):
        CLIS[program].main(words)
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["cluster.yaml", "-h"], ["plan", "--help"], ["--help", "cluster.yaml", "plan"]])
def test_the_help_of_provision_shows_only_options_of_the_verb(words, capsys):
    with pytest.raises(SystemExit, match="0"):
        provision.cli.main(words)
    text = capsys.readouterr().out
    assert ("--pretend" in text) == ("plan" in words)
    assert "--parallel" in text
    assert "--hours" not in text


def test_an_empty_cluster_file_is_refused_and_not_taken_for_this_machine(tmp_path, capsys):
    assert provision.cli.main(["", "plan", "--workspace", str(tmp_path)]) == 2
    assert "is a folder, not a file" in capsys.readouterr().err


@pytest.mark.parametrize("program", CLIS)
def test_commands_work_without_docstrings(program):
    command = [sys.executable, "-OO", "-m", program, "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("shardlab ")
