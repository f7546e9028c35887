"""Code for the user's shell, with which `jobs submit` and our other verbs work although `jobs` is a builtin of the shell.

``jobs`` is a builtin of bash, zsh and fish, so these shells never run an executable of this name. The function or alias that is
defined here passes ``jobs submit`` and our other verbs to this program; ``jobs``, ``jobs -l`` and the like stay with the shell.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from shardlab.errors import UnknownName

VERBS = ("plan", "render", "submit", "status", "logs", "cancel", "retry", "matrices", "strategies", "workloads", "launchers")

# `function` rather than `jobs()`: an alias of that name would otherwise be expanded in the definition. `${1-}`: `set -u`.
ZSH = """\
function jobs {{
    case "${{1-}}" in
        {verbs}) {command} jobs "$@" ;;
        *) builtin jobs "$@" ;;
    esac
}}
"""

# bash empties the table of jobs in every part of a pipeline but one that starts with the builtin itself, so that a function
# would answer `jobs | cat` and the `$(jobs -p | wc -l)` of many prompts with nothing. `jobs -x COMMAND` runs a command from
# within the builtin, which has replaced `%1` by process ids; the function reverses this. An alias works from the next line on
# and only if a person types; `bash -c` and scripts get a function, and there a pipe from `jobs` stays empty.
BASH = """\
function _shardlab_jobs {{
    case "${{1-}}" in
        {verbs}) {command} jobs "$@"; return ;;
    esac
    local word number pid rest words=()
    for word in "$@"; do
        while read -r number pid rest; do
            [[ -n "$word" && "$pid" == "$word" ]] && word="%${{number//[^0-9]/}}"
        done <<< "$(builtin jobs -l)"
        words+=("$word")
    done
    builtin jobs ${{words[@]+"${{words[@]}}"}}
}}
unalias jobs 2> /dev/null || :
if [[ "$-" == *i* && "$-" != *c* ]]; then
    alias jobs='jobs -x _shardlab_jobs'
else
    function jobs {{ _shardlab_jobs "$@"; }}
fi
"""

FISH = """\
function jobs --description 'shardlab jobs, else the jobs of this shell'
    switch "$argv[1]"
        case {verbs}
            {command} jobs $argv
        case '*'
            builtin jobs $argv
    end
end
"""

SHELLS = ("bash", "fish", "zsh")


def init(shell: str | None, command: list[str] | None = None) -> str:
    """The code for the shell, which may evaluate it several times. Raises UnknownName for a shell that is not supported.

    shell: its name; None finds out. command: what runs us (default: as we were started).
    """
    name = shell or running_shell()
    if name not in SHELLS:
        raise UnknownName("shell", name, SHELLS, where="shell-init")
    words = command or our_command()
    if name == "fish":
        return FISH.format(verbs=" ".join(VERBS), command=" ".join(map(fish_quote, words)))
    return {"bash": BASH, "zsh": ZSH}[name].format(verbs="|".join(VERBS), command=" ".join(map(shlex.quote, words)))


def running_shell() -> str:
    """The shell that started us; if another program started us, the login shell, or "" if that is not set."""
    try:
        parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    except OSError:
        parent = ""
    return parent if parent in SHELLS else Path(os.environ.get("SHELL", "")).name


def our_command() -> list[str]:
    """The absolute words that run this installation again, from any folder."""
    started = shutil.which(sys.argv[0])
    if started and Path(started).name == "shardlab":
        return [str(Path(started).absolute())]
    return [sys.executable, "-P", "-m", "shardlab"]  # -P: a folder `jobs` in the current folder is not our package


def fish_quote(word: str) -> str:
    """`word` as one literal word of fish, where a backslash means itself unless a quote or backslash follows."""
    return "'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'"
