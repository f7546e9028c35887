"""`python -m shardlab` is the same as the `shardlab` command."""

import sys

from shardlab.terminal.command_start import start

if __name__ == "__main__":
    sys.exit(start("shardlab"))
