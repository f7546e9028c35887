"""`python -m collect` is the same as the `collect` command."""

import sys

from shardlab.terminal.command_start import start

if __name__ == "__main__":
    sys.exit(start("collect"))
