"""Shell code that makes `jobs submit` and the other verbs of shardlab's command `jobs` work in the user's shell.

``jobs`` is a builtin of bash, zsh and fish, so these shells never run an executable with this name. The shell code defines a
function or an alias with the name ``jobs``. It passes ``jobs submit`` and the other verbs of shardlab to shardlab, and all
other uses, such as ``jobs -l``, to the builtin.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from shardlab.errors import UnknownName

VERBS = ("plan", "render", "submit", "status", "logs", "cancel", "retry", "matrices", "strategies", "workloads", "launchers")

# The shell code for zsh. It says `function jobs` and not `jobs()`, because zsh would expand an alias named jobs in `jobs()`. It
# says `${1-}` and not `$1`, because under `set -u`, `$1` is an error if there is no argument.
ZSH = """\
function jobs {{
    case "${{1-}}" in
        {verbs}) {command} jobs "$@" ;;
        *) builtin jobs "$@" ;;
    esac
}}
"""

# The shell code for bash.
# In a pipeline, bash empties the table of jobs in each part of the pipeline whose first word is not the builtin `jobs`. A plain
# function would therefore print nothing for `jobs | cat`, or for `$(jobs -p | wc -l)`, which many prompts use. So the alias
# calls the builtin as `jobs -x COMMAND`: the builtin replaces `%1` by a process id and runs COMMAND, and our function turns
# process ids back into `%1`. Bash expands aliases only in an interactive shell, and only from the line after their definition.
# `bash -c` and scripts get a function instead; with this function, `jobs | cat` prints nothing.
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
    """The shell code that `shardlab shell-init` prints. A shell may evaluate the code several times with the same effect.

    shell: the name of the shell, such as bash; None: the shell that started this program.
    command: the words that run this program; None: the words with which this program was started.
    Raises UnknownName for a shell that is not supported.
    """
    name = shell or running_shell()
    if name not in SHELLS:
        raise UnknownName("shell", name, SHELLS, where="shell-init")
    words = command or our_command()
    if name == "fish":
        return FISH.format(verbs=" ".join(VERBS), command=" ".join(map(fish_quote, words)))
    return {"bash": BASH, "zsh": ZSH}[name].format(verbs="|".join(VERBS), command=" ".join(map(shlex.quote, words)))


def running_shell() -> str:
    """The name of the shell that started this program. If no known shell did, the name in $SHELL, or "" if it is not set."""
    try:
        parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    except OSError:
        parent = ""
    return parent if parent in SHELLS else Path(os.environ.get("SHELL", "")).name


def our_command() -> list[str]:
    """The words of a command that runs this installation of shardlab. Their paths are absolute, so they work in any folder."""
    started = shutil.which(sys.argv[0])
    if started and Path(started).name == "shardlab":
        return [str(Path(started).absolute())]
    return [sys.executable, "-P", "-m", "shardlab"]  # with -P, Python imports no modules from the current folder


def fish_quote(word: str) -> str:
    """`word` in single quotes for fish. A backslash in single quotes is literal unless a quote or a backslash follows it."""
    return "'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'"
