"""`python -m jobs` is the same as the `jobs` command."""

import sys

from shardlab.terminal.command_start import start_command

if __name__ == "__main__":
    sys.exit(start_command("jobs"))
