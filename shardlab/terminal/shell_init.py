"""Shell code that makes shardlab's command `jobs` and the Tab key work in the user's shell.

``jobs`` is a builtin of bash, zsh and fish, so these shells never run an executable with this name. The shell code defines a
function or an alias with the name ``jobs``. It passes the verbs and options of shardlab's parser, such as ``jobs submit`` and
``jobs --help``, to shardlab, and all other uses, such as ``jobs -l``, to the builtin. The code also tells the shell to ask
shardlab.completion at each press of the Tab key.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from shardlab.errors import UnknownName

COMPLETED_COMMANDS = ("jobs", "provision", "collect", "shardlab")

# The shell code for zsh. `_shardlab` runs shardlab, also at each press of the Tab key.
# The code says `function jobs` and not `jobs()`, because zsh would expand an alias named jobs in `jobs()`. It says `${{1-}}`
# and not `$1`, because under `set -u`, `$1` is an error if there is no argument. The function compdef exists after `compinit`.
ZSH_CODE = """\
function _shardlab {{ {command} "$@"; }}
function jobs {{
    case "${{1-}}" in
        {first_words}) _shardlab jobs "$@" ;;
        *) builtin jobs "$@" ;;
    esac
}}
if (( $+functions[compdef] )); then
{completion}
fi
"""

# The shell code for bash.
# In a pipeline, bash empties the table of jobs in each part of the pipeline whose first word is not the builtin `jobs`. A plain
# function would therefore print nothing for `jobs | cat`, or for `$(jobs -p | wc -l)`, which many prompts use. So the alias
# calls the builtin as `jobs -x COMMAND`: the builtin replaces `%1` by a process id and runs COMMAND, and our function turns
# process ids back into `%1`. Bash expands aliases only in an interactive shell, and only from the line after their definition.
# `bash -c` and scripts get a function instead; with this function, `jobs | cat` prints nothing.
BASH_CODE = """\
function _shardlab {{ {command} "$@"; }}
function _shardlab_jobs {{
    case "${{1-}}" in
        {first_words}) _shardlab jobs "$@"; return ;;
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
{completion}
"""

FISH_CODE = """\
function _shardlab; {command} $argv; end
function jobs --description 'shardlab jobs, else the jobs of this shell'
    switch "$argv[1]"
        case {first_words}
            _shardlab jobs $argv
        case '*'
            builtin jobs $argv
    end
end
{completion}
"""

CODE_BY_SHELL = {"bash": BASH_CODE, "fish": FISH_CODE, "zsh": ZSH_CODE}


def make_shell_code(requested_shell: str | None, first_words: Iterable[str], command_words: list[str] | None = None) -> str:
    """The shell code that `shardlab shell-init` prints. A shell may evaluate the code several times with the same effect.

    requested_shell: the name of the shell, such as bash; None: the shell that started this program.
    first_words: the words after `jobs` that belong to shardlab and not to the builtin; a word may begin with them if they end
    with `=`.
    command_words: the words that run this program; None: the words with which this program was started.
    Raises UnknownName for a shell that is not supported.
    """
    from argcomplete.shell_integration import shellcode

    shell_name = requested_shell or detect_shell()
    if shell_name not in CODE_BY_SHELL:
        raise UnknownName("shell", shell_name, CODE_BY_SHELL, place="shell-init")
    quote_word = quote_for_fish if shell_name == "fish" else shlex.quote
    word_patterns = [f"{word}*" if word.endswith("=") else word for word in first_words]
    return CODE_BY_SHELL[shell_name].format(
        first_words=" ".join(map(quote_for_fish, word_patterns)) if shell_name == "fish" else "|".join(word_patterns),
        command=" ".join(map(quote_word, command_words or find_own_command())),
        completion=shellcode(COMPLETED_COMMANDS, shell=shell_name, argcomplete_script="_shardlab"),
    )


def detect_shell() -> str:
    """The name of the shell that started this program. If no known shell did, the name in $SHELL, or "" if it is not set."""
    try:
        parent_name = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    except OSError:
        parent_name = ""
    return parent_name if parent_name in CODE_BY_SHELL else Path(os.environ.get("SHELL", "")).name


def find_own_command() -> list[str]:
    """The words of a command that runs this installation of shardlab. Their paths are absolute, so they work in any folder."""
    executable = shutil.which(sys.argv[0])
    if executable and Path(executable).name == "shardlab":
        return [str(Path(executable).absolute())]
    return [sys.executable, "-P", "-m", "shardlab"]  # with -P, Python imports no modules from the current folder


def quote_for_fish(word: str) -> str:
    """`word` in single quotes for fish. A backslash in single quotes is literal unless a quote or a backslash follows it."""
    return "'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'"
