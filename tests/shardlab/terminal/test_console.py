"""Where the output of commands goes: a terminal, a pipe whose reader has gone, or a stream that the user has closed. And
options whose value is a list."""

import io
import os
import subprocess
import sys

import pytest
from support_e2e import HANG_S
from support_hostile import on_terminal

import collect.cli
import jobs.cli
import provision.cli
from shardlab.terminal.console import OutputStream

SAID = """
from shardlab.terminal.console import Output
out = Output()
out.print_line('a \\x1b[31mred word', 'bold')
out.print_remark('said', 'red')"""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "is_terminal"),
    [
        (Terminal, {}, True),
        (io.StringIO, {}, False),
        (io.StringIO, {"FORCE_COLOR": "1"}, True),
        (Terminal, {"FORCE_COLOR": ""}, False),
        (io.StringIO, {"TTY_COMPATIBLE": "1"}, True),
        (Terminal, {"TTY_COMPATIBLE": "0"}, False),
    ],
)
def test_environment_variables_decide_what_a_terminal_is_as_in_rich(monkeypatch, stream, environment, is_terminal):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert OutputStream(stream(), soft_wrap=True).is_terminal is is_terminal


def test_a_pipe_gets_the_text_and_a_terminal_gets_it_with_styles():
    done = subprocess.run([sys.executable, "-c", SAID], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("a red word\n", "said\n")
    assert on_terminal(["-c", SAID]) == "\x1b[1ma red word\x1b[0m\n\x1b[31msaid\x1b[0m\n"


def test_a_pipe_does_not_need_rich():
    code = f"{SAID}; out.print_table('', ['name'], [['x']]); import sys; print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("closed", ["2>&-", ">&-"])
def test_a_command_works_with_a_closed_standard_stream(tmp_path, closed):
    line = f'exec "$0" -P -m jobs status --workspace "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable, tmp_path], capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}])
def test_a_command_ends_without_a_traceback_if_the_reader_of_its_output_has_gone(environment):
    code = (
        "import sys; from shardlab.terminal import console\n"
        "def command():\n"
        "    for number in range(100_000): console.Output().print_line('x' * 80)\n"
        "    return 0\n"
        "sys.exit(console.run_command(command))"
    )
    words = ["bash", "-c", '"$0" -c "$1" | head -n 1; echo "${PIPESTATUS[0]}"', sys.executable, code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=HANG_S, env=os.environ | environment)
    assert done.stdout.splitlines()[-1] == "141"
    assert done.stderr == ""


def test_an_error_is_not_followed_by_another_if_the_reader_of_the_errors_has_gone():
    code = (
        "import os, sys; from shardlab.terminal import console\n"
        "from shardlab.errors import InputError\n"
        "def command(): raise InputError('it is wrong')\n"
        "reads, writes = os.pipe(); os.close(reads); kept = os.dup(2); os.dup2(writes, 2)\n"
        "code = console.run_command(command)\n"
        "os.dup2(kept, 2); os._exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("jobs retry --only failed,hung ddp-1", {"only": "failed,hung", "runs": ["ddp-1"]}),
        ("jobs retry --only failed hung ddp-1 fsdp2-1", {"only": "failed,hung", "runs": ["ddp-1", "fsdp2-1"]}),
        ("jobs retry --only failed, hung", {"only": "failed,hung", "runs": []}),
        ("jobs retry --only=failed hung --json ddp-1", {"only": "failed,hung", "runs": ["ddp-1"]}),
        ("jobs retry ddp-1 --only failed", {"only": "failed", "runs": ["ddp-1"]}),
        ("jobs plan --matrix a --scale-out 16 64,512", {"scale_out": "16,64,512"}),
        ("jobs plan --scale-out 16, 64 --matrix a", {"scale_out": "16,64", "matrix": "a"}),
        ("collect summarize --images svg png", {"images": "svg,png"}),
        ("provision --limit node0 node1 a.yaml plan", {"limit": ["node0", "node1"], "cluster": "a.yaml", "verb": "plan"}),
        (
            "provision a.yaml --only hosts clock --skip data plan",
            {"only": ["hosts", "clock"], "skip": ["data"], "verb": "plan"},
        ),
        ("provision --limit node0 ./down", {"limit": ["node0"], "cluster": "./down"}),
        ("provision --limit node0 -- node1.yaml", {"limit": ["node0"], "cluster": "node1.yaml"}),
    ],
)
def test_commas_or_spaces_separate_the_items_of_a_list(line, values):
    command, *words = line.split()
    parsers = {"jobs": jobs.cli.parser, "collect": collect.cli.parser, "provision": provision.cli.parser}
    arguments = vars(parsers[command]().parse_args(words))
    arguments["verb"] = arguments["verb"].name
    assert {name: arguments[name] for name in values} == values


def test_every_option_whose_help_shows_a_list_accepts_commas_and_spaces():
    commands = (jobs.cli.parser(), collect.cli.parser(), provision.cli.parser())
    parsers = [parser for command in commands for parser in command.verb_parsers.values()]
    lists = {
        (parser.prog, option)
        for parser in parsers
        for action in parser._actions
        for option in action.option_strings
        if isinstance(action.metavar, str) and action.metavar.endswith(",...")
    }
    assert lists == {(parser.prog, option) for parser in parsers for option in parser.ends_list_by_option}
    assert len(lists) == 15
