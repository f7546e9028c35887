"""Ctrl-C and SIGTERM: at any moment the command prints one true sentence, exits with 130, and leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support_e2e import HANG_S, until

from provision.interruption import describe_interruption

ROOT = Path(__file__).parents[2]
LOCAL = str(ROOT / "examples/local.yaml")
SIGNALS = [pytest.param(number, id=number.name) for number in (signal.SIGINT, signal.SIGTERM)]
# A package that every command imports. It writes a file when its import begins, and its import never ends.
SLOW = """
import os, pathlib, time
pathlib.Path(os.environ["SEEN"]).write_text("")
time.sleep(600)
"""
# Runs two commands of a change on this machine at the same time, in threads, as operations do.
CHANGE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from shardlab.terminal import command_start
from provision import interruption
from provision.practice import base
import signal
for number in command_start.INTERRUPT_SIGNALS:
    signal.signal(number, command_start._handle_signal)
with interruption.handle_interruption([], lambda: 1), ThreadPoolExecutor() as pool:
    print("ready", flush=True)
    list(pool.map(lambda seconds: base.run_here(["sleep", seconds]), ["601", "602"]))
print("not reached")
"""


def start(*words, **environment):
    return subprocess.Popen(
        [sys.executable, "-P", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def interrupted(process, number):
    """Sends the signal and returns standard error. Checks that the process ended in time with 130 and printed nothing else."""
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    return stderr


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("command", ["provision", "jobs", "collect", "shardlab"])
def test_a_signal_during_the_imports_ends_a_command_with_a_sentence(command, number, tmp_path):
    (tmp_path / "msgspec").mkdir()
    (tmp_path / "msgspec/__init__.py").write_text(SLOW)
    seen = tmp_path / "seen"
    process = start("-m", command, "--version", PYTHONPATH=str(tmp_path), SEEN=str(seen))
    until(seen.exists, "it imports")
    assert interrupted(process, number) == "interrupted before anything was changed.\n"


def test_a_signal_that_the_shell_ignores_stays_ignored():
    """A script ignores SIGINT for a command that runs in the background."""
    script = f"trap '' INT; exec {sys.executable} -P -m provision --version"
    code = "from shardlab.terminal import command_start; import signal; command_start.start_command('shardlab')"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("shardlab ")
    look = f"trap '' INT; exec {sys.executable} -P -c \"{code}; print(signal.getsignal(2) is signal.SIG_IGN)\" schema cluster"
    done = subprocess.run(["sh", "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("True\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_during_checks_ends_their_processes_and_is_reported(number, tmp_path):
    process = start("-m", "provision", LOCAL, "verify", "--json", "--workspace", str(tmp_path))
    children = until(lambda: psutil.Process(process.pid).children(recursive=True), "a check runs")
    said = interrupted(process, number).splitlines()[-1]
    # on a busy machine the command may not notice in time that everything has ended, or a check may have ended by itself
    told = "(; the commands on localhost were ended|; on localhost these commands may run until .*)?"
    assert re.fullmatch(rf"interrupted; nothing was changed{told}\.", said), said
    until(lambda: not any(map(lives, children)), "its processes end")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_during_a_change_ends_its_processes(number):
    process = start("-c", CHANGE)
    assert process.stdout.readline() == "ready\n"
    children = until(lambda: (found := psutil.Process(process.pid).children())[1:] and found, "both run")
    assert interrupted(process, number) == "interrupted after 1 change had begun; run the same command again to continue.\n"
    until(lambda: not any(map(lives, children)), "they end")


def lives(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, [], {}), "interrupted; nothing was changed."),
        ((None, [], {}), "interrupted; run the same command again to continue."),
        (
            (2, ["a", "b"], {"a": (), "b": ()}),
            "interrupted after 2 changes had begun; run the same command again to continue; the commands on a, b were ended.",
        ),
        (
            (1, ["a", "b"], {"a": ("sh",), "b": ()}),
            (
                "interrupted after 1 change had begun; run the same command again to continue; the commands on b were ended; "
                "on a these commands may run until they end or reach their time limit: sh."
            ),
        ),
    ],
)
def test_the_sentence_of_an_interruption_names_changes_and_running_commands(arguments, says):
    assert describe_interruption(*arguments) == says
