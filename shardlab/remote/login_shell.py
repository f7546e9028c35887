"""Runs a script in a login shell (`bash -l`) and proves that it ran: a startup file may start another program in its place."""

from __future__ import annotations

import shlex

# $1: the script; then its arguments. Startup files read nothing from standard input, and what they print on standard output, up
# to the line with the mark, is dropped. They get no descriptor but the three standard ones: a program that they leave in the
# background, such as ssh-agent, closes only these, and would keep all others open.
_START_MARK = "shardlab: the login shell runs our command"
_RUN_SCRIPT = """\
text=$1; shift
folder=$(mktemp -d) || exit 1
trap 'rm -rf -- "$folder"' EXIT; trap 'exit 1' HUP INT TERM
cat > "$folder/input"
{ SHARDLAB_INPUT="$folder/input" bash -lc "$text" bash "$@" < /dev/null; echo $? > "$folder/code"; } |
    while IFS= read -r line; do case $line in *MARK) : > "$folder/ran"; exec cat;; esac; done
code=$(cat "$folder/code")
test ! -e "$folder/ran" || exit "$code"
files=$(cd && grep -lsE '(^|[;&|[:space:]])(exec|exit)([[:space:]]|$)' \\
    /etc/profile .bash_profile .bash_login .profile .bashrc | tr '\\n' ' ')
echo "the login shell (bash -l) did not run our command (exit code $code): a startup file starts another program (exec) or" \\
    "ends the shell; look in ${files:-/etc/profile and ~/.bash_profile }and let it do this only on a terminal:" \\
    '[ -t 0 ] && exec ...' >&2
exit 1
""".replace("*MARK", f"*'{_START_MARK}'")
_BASH_ENTRY = f'echo {_START_MARK}; exec < "$SHARDLAB_INPUT"; unset SHARDLAB_INPUT\n'


def make_login_argv(script: str, *arguments: str) -> list[str]:
    """A command, as a list of words, that runs a bash script in a login shell. arguments: $1, $2 ... of the script.

    If the login shell does not run the script, the command fails and says why.
    """
    return ["sh", "-c", _RUN_SCRIPT, "login-shell", _BASH_ENTRY + script, *arguments]


# A line of sh that prints the PATH of a login shell.
PRINT_PATH = shlex.join(make_login_argv("printf '%s\\n' \"$PATH\"")) + " < /dev/null"
