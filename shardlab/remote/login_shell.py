"""Runs a script in a login shell (`bash -l`) and proves that it ran: a startup file may start another program in its place."""

from __future__ import annotations

import shlex

# $1: the script; then its arguments. The script itself writes to descriptor 3. Startup files read nothing from standard input,
# and what they print on standard output is dropped.
_RUN = """\
text=$1; shift
exec 4>&1 6<&0
ran=$(bash -lc "$text" bash "$@" 3>&1 4>&4 6<&6 > /dev/null < /dev/null)
code=$?
test -z "$ran" || exit "$code"
files=$(cd && grep -lsE '(^|[;&|[:space:]])(exec|exit)([[:space:]]|$)' \\
    /etc/profile .bash_profile .bash_login .profile .bashrc | tr '\\n' ' ')
echo "the login shell (bash -l) did not run our command (exit code $code): a startup file starts another program (exec) or" \\
    "ends the shell; look in ${files:-/etc/profile and ~/.bash_profile }and let it do this only on a terminal:" \\
    '[ -t 0 ] && exec ...' >&2
exit 1
"""
_BEGIN = "echo ran >&3; exec <&6 >&4 3>&- 4>&- 6<&-\n"


def login_shell_argv(script: str, *arguments: str) -> list[str]:
    """A command, as a list of words, that runs a bash script in a login shell. arguments: $1, $2 ... of the script.

    If the login shell does not run the script, the command fails and says why.
    """
    return ["sh", "-c", _RUN, "login-shell", _BEGIN + script, *arguments]


# A line of sh that prints the PATH of a login shell.
PRINT_PATH = shlex.join(login_shell_argv("printf '%s\\n' \"$PATH\""))
