"""`python -m provision` is the same as the `provision` command."""

import sys

from shardlab.terminal.command_start import start_command

if __name__ == "__main__":
    sys.exit(start_command("provision"))
