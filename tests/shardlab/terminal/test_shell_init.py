"""Shells have a builtin command `jobs`. shell_init adds shardlab's `jobs` to the builtin, which keeps all of its behaviour."""

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import support_collect
from support_e2e import HANG_S

from jobs.cli import main as jobs_main
from shardlab import __version__, cli
from shardlab.errors import UnknownName
from shardlab.terminal import shell_init
from shardlab.workspace.workspace import Workspace

SHARDLAB = Path(sys.executable).parent / "shardlab"
SHELLS = [
    pytest.param(name, marks=pytest.mark.skipif(not shutil.which(name), reason=f"{name} is not installed here"))
    for name in shell_init.CODE_BY_SHELL
]
PLAIN = {
    "bash": ["bash", "--norc", "--noediting", "-i"],
    "zsh": ["zsh", "-f", "-i", "+Z"],
    "fish": ["fish", "--no-config", "-i"],
}


@pytest.fixture
def stand_in(tmp_path):
    """An executable that stands in for shardlab. It prints its arguments and exits with 7. Its path needs quoting."""
    path = tmp_path / 'it\'s "a" $HOME `x` \\d' / "shardlab"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\nprintf "ours:"; printf "[%s]" "$@"; echo; exit 7\n')
    path.chmod(0o755)
    return path


def script(name, text, *, cwd=None):
    arguments = {"bash": ["bash", "--norc"], "zsh": ["zsh", "-f"], "fish": ["fish", "--no-config"]}[name]
    return subprocess.run([*arguments, "-c", text], capture_output=True, text=True, timeout=HANG_S, cwd=cwd)


def _waits(shell, terminal):
    """Returns whether the shell waits for input: the shell sleeps, and no program that it started controls the terminal."""
    return os.tcgetpgrp(terminal) == shell and psutil.Process(shell).status() == psutil.STATUS_SLEEPING


def type_into(command, lines, *, until=HANG_S):
    """Returns the output of a shell on a terminal in which a person types `lines`, one line each time the shell waits.

    until: seconds after which the shell counts as hung.
    """
    pid, terminal = pty.fork()
    if pid == 0:  # the child process becomes the shell
        os.environ.update(PS1="", PROMPT="", TERM="dumb", HISTFILE="/dev/null")
        os.execvp(command[0], command)
    text = b""
    end = time.monotonic() + until
    waiting = [*lines, "exit", "exit"]
    quiet = 0.0
    while time.monotonic() < end:
        readable, _, _ = select.select([terminal], [], [], 0.1)
        if readable:
            try:
                got = os.read(terminal, 65536)
            except OSError:
                break
            if not got:
                break
            text, quiet = text + got, 0.0
        else:
            quiet += 0.1
        if quiet > 0.15 and waiting and _waits(pid, terminal):  # the shell has printed everything and waits for the next line
            os.write(terminal, waiting.pop(0).encode() + b"\n")
            quiet = 0.0
    os.close(terminal)
    os.waitpid(pid, 0)
    return text.decode(errors="replace").replace("\r", "")


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_on_a_terminal_the_builtin_jobs_works_as_before(name, tmp_path):
    """With and without shell_init, the builtin `jobs` prints the same about background jobs."""
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed here")
    asked = tmp_path / "asked"
    answers = [tmp_path / "plain", tmp_path / "with-ours"]
    questions = ["jobs", "jobs %1", "jobs %%", "jobs %+", "jobs %-", "jobs -r", "jobs -s", "jobs | cat", "jobs %2 | cat"]
    asked.write_text("\n".join(questions))
    for index, out in enumerate(answers):
        lines = ["sleep 77 &", "sleep 78 &"]
        if index:
            teach = f'eval "$({shlex.quote(str(SHARDLAB))} shell-init)"'
            lines = ["set -u", teach, teach, *lines]
        for question in questions:
            lines.append(f"{question} >> {out} 2>&1 || echo no >> {out}")
        lines.append(f"jobs -p > {out}.pids; echo count=$(jobs -p | wc -l) >> {out}")
        lines.append(f"jobs -l | cat > {out}.long")
        lines.append("kill %1 %2")
        type_into(PLAIN[name], lines)
    plain, ours = (path.read_text() for path in answers)
    assert plain == ours
    assert plain.count("sleep 77") >= 4
    assert "count=2" in re.sub(r" +", "", ours)
    for path in answers:
        found = Path(f"{path}.pids").read_text()
        assert len(re.findall(r"\b\d{2,}\b", found)) >= 2
        assert Path(f"{path}.long").read_text().count("sleep") == 2


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_on_a_terminal_verbs_of_jobs_reach_our_command(name, stand_in):
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed here")
    command = f"{shlex.quote(sys.executable)} -c " + shlex.quote(
        f"from shardlab.terminal import shell_init; print(shell_init.make_shell_code({name!r}, ['submit'], "
        f"[{str(stand_in)!r}]))"
    )
    out = stand_in.parent / "said"
    said = type_into(
        PLAIN[name], [f'eval "$({command})"', f"jobs submit --where 'a b' '' > {shlex.quote(str(out))}; echo rc=$?"]
    )
    assert "rc=7" in said
    assert out.read_text() == "ours:[jobs][submit][--where][a b][]\n"


@pytest.mark.parametrize("name", SHELLS)
def test_words_and_exit_code_pass_through(name, stand_in):
    text = shell_init.make_shell_code(name, ["submit"], [str(stand_in)])
    status = "$status" if name == "fish" else "$?"
    done = script(name, f"{text}\n{text}\njobs submit --matrix 'a b' '' '*'; echo rc={status}\njobs -l; echo rc={status}")
    assert done.stdout.splitlines()[:2] == ["ours:[jobs][submit][--matrix][a b][][*]", "rc=7"]
    assert done.stderr == ""


# zsh lists background jobs only on a terminal
@pytest.mark.parametrize("name", [shell for shell in SHELLS if shell.values != ("zsh",)])
def test_background_jobs_are_listed_in_scripts(name):
    monitor = "status job-control full" if name == "fish" else "set -m"
    text = shell_init.make_shell_code(name, ["submit"], ["/nowhere/shardlab"])
    end = "kill (jobs -p)" if name == "fish" else "kill %1"
    done = script(name, f"{monitor}\n{text}\nsleep 77 &\njobs\njobs -l\njobs %1\njobs -p\n{end}")
    assert done.stdout.count("sleep 77") >= 3, done


def test_bash_survives_strict_mode(stand_in):
    text = shell_init.make_shell_code("bash", ["submit", "logs"], [str(stand_in)])
    done = script(
        "bash",
        f"set -euo pipefail -m\n{text}\njobs\nsleep 77 &\njobs %1\njobs\nkill %1\njobs submit || echo rc=$?\njobs logs\n",
    )
    assert done.returncode == 7
    assert done.stdout.count("sleep 77") == 2
    assert "rc=7" in done.stdout


@pytest.mark.parametrize("name", SHELLS)
def test_the_real_command_answers(name):
    pipe = f"'{SHARDLAB}' shell-init | source" if name == "fish" else f"eval \"$('{SHARDLAB}' shell-init)\""
    done = script(name, f"{pipe}\njobs strategies --help")
    assert "usage: jobs strategies" in done.stdout, done


@pytest.mark.parametrize("flags", [["-ic"], ["-c"]])
def test_bash_knows_our_verbs_on_the_same_line_as_shell_init(flags):
    text = f"eval \"$('{SHARDLAB}' shell-init bash)\"; jobs strategies --help"
    words = ["bash", "--norc", *flags, text]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, start_new_session=True)
    assert "usage: jobs strategies" in done.stdout, done


def test_our_command_is_found_again_from_any_folder(tmp_path, monkeypatch):
    done = subprocess.run([SHARDLAB, "shell-init", "bash"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert f'{{ {SHARDLAB} "$@"; }}' in done.stdout
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").write_text("raise SystemExit('the wrong jobs')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "shardlab", "shell-init", "zsh"], capture_output=True, text=True, check=True
    )
    done = subprocess.run(
        ["bash", "-c", f"{done.stdout}\njobs strategies --help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert "usage: jobs strategies" in done.stdout, done


def test_an_unknown_shell_prints_the_menu(monkeypatch):
    with pytest.raises(UnknownName, match=r"unknown shell 'tcsh'.*bash, fish, zsh"):
        shell_init.make_shell_code("tcsh", [])
    monkeypatch.setattr(os, "getppid", os.getpid)  # running_shell finds no shell as parent process, so $SHELL decides
    monkeypatch.setenv("SHELL", "/bin/csh")
    with pytest.raises(UnknownName, match="'csh'"):
        shell_init.make_shell_code(None, [])
    monkeypatch.setenv("SHELL", "/usr/local/bin/fish")
    assert shell_init.detect_shell() == "fish"


def teach(name):
    """The line that evaluates the shell code of the installed shardlab."""
    return f"'{SHARDLAB}' shell-init {name} | source" if name == "fish" else f"eval \"$('{SHARDLAB}' shell-init {name})\""


@pytest.mark.parametrize("name", SHELLS)
def test_every_verb_and_option_of_the_parser_reaches_our_jobs(name, capsys):
    """The help of `jobs` lists the verbs; each verb must answer with its own help, also after an option."""
    with pytest.raises(SystemExit):
        jobs_main(["--help"])
    verbs = re.findall(r"^    (\w+)  ", capsys.readouterr().out, re.MULTILINE)
    assert {"submit", "advise", "trace"} <= set(verbs)
    lines = [f"jobs {verb} --help" for verb in verbs]
    lines += ["jobs --workspace /tmp plan -h", "jobs --workspace=/tmp plan -h", "jobs --json plan -h", "jobs -v plan -h"]
    done = script(name, "\n".join([teach(name), *lines, "jobs --help", "jobs -h", "jobs --version"]))
    used = re.findall(r"^usage: jobs ?([a-z]*)", done.stdout, re.MULTILINE)
    assert used == [*verbs, "plan", "plan", "plan", "plan", "", ""]
    assert done.stdout.endswith(f"shardlab {__version__}\n")
    assert done.stderr == ""


COMPLETIONS = (
    ("jobs ad", ["advise"]),
    ("shardlab jobs ad", ["advise"]),
    ("shardlab shell", ["shell-init"]),
    ("provision ve", ["verify"]),
    ("provision own.yaml ve", ["verify"]),
    ("provision own.yaml plan --pre", ["--pretend"]),
    ("provision ow", ["own.yaml"]),
    ("collect sum", ["summarize"]),
    ("jobs submit --max-p", ["--max-parallel"]),
    ("jobs plan --matrix quick", ["quickstart"]),
    ("jobs plan --matrix ./own", ["./own.yaml"]),
    ("jobs logs --workspace theirs fsdp2-", ["fsdp2-first", "fsdp2-second"]),
    ("jobs status --workspace theirs --matrix ", ["sharding"]),
    ("collect timeline --workspace theirs ddp", ["ddp-only"]),
    ("collect summarize --workspace theirs --baseline fs", ["fsdp2"]),
    ("collect export --to xls", ["xlsx"]),
    ("jobs submit --track tens", ["tensorboard"]),
)


@pytest.fixture
def completed_folder(tmp_path):
    """A folder with a matrix file and the workspace `theirs`, which has one matrix and three runs."""
    (tmp_path / "own.yaml").touch()
    workspace = Workspace(tmp_path / "theirs")
    for run in ("fsdp2-first", "fsdp2-second", "ddp-only"):
        (workspace.runs / run).mkdir(parents=True)
    support_collect.keep(
        workspace, [support_collect.cell(strategy="ddp"), support_collect.cell(strategy="fsdp2")], name="sharding"
    )
    return tmp_path


def complete_in_bash(line, folder):
    asked = f"COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)} _python_argcomplete__shardlab {line.split()[0]}"
    return script("bash", f'{teach("bash")}\n{asked}\nprintf "%s\\n" "${{COMPREPLY[@]}}"', cwd=folder)


@pytest.mark.parametrize(("line", "words"), COMPLETIONS)
def test_bash_completes_verbs_and_options(line, words, completed_folder):
    done = complete_in_bash(line, completed_folder)
    assert sorted(word.strip() for word in done.stdout.splitlines()) == words, done


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed here")
@pytest.mark.parametrize(("line", "words"), COMPLETIONS)
def test_fish_completes_verbs_and_options(line, words, completed_folder):
    done = script("fish", f"{teach('fish')}\ncomplete -C {shell_init.quote_for_fish(line)}", cwd=completed_folder)
    assert sorted(entry.split("\t")[0] for entry in done.stdout.splitlines()) == words, done


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_the_tab_key_completes_on_a_terminal(name, completed_folder, monkeypatch):
    """A person types the beginning of a verb and of a run id, each with the Tab key; the shell runs the completed line."""
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed here")
    monkeypatch.chdir(completed_folder)
    monkeypatch.setenv("ZDOTDIR", str(completed_folder))
    lines = ["autoload -Uz compinit; compinit -u"] if name == "zsh" else []
    interactive = {"bash": ["bash", "--norc", "-i"], "zsh": ["zsh", "-f", "-i"]}[name]
    typed = ["jobs advi\t--help", "jobs logs --workspace theirs ddp\t; echo ended", "true && jobs strat\t--help"]
    out = type_into(interactive, [*lines, teach(name), *typed])
    assert "usage: jobs advise" in out
    assert "ddp-only" in out.split("usage: jobs advise")[1]
    assert "usage: jobs strategies" in out


def test_completion_of_a_broken_workspace_prints_no_error(completed_folder):
    """An error must not appear in the line that the user is typing."""
    (completed_folder / "theirs" / ".shardlab" / "last-matrix.json").write_text("{")
    done = complete_in_bash("collect summarize --workspace theirs --baseline f", completed_folder)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_the_command_shardlab_refuses_unknown_words(capsys):
    """The command `shardlab` refuses unknown words and passes known commands on."""
    assert cli.main(["job"]) == 2
    assert "Did you mean 'jobs'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        cli.main(["provision", "--help"])
    assert ended.value.code == 0
    assert "usage: provision" in capsys.readouterr().out
