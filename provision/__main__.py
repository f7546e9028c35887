"""`python -m provision` is the same as the `provision` command."""

import sys

from shardlab.terminal.command_start import start

if __name__ == "__main__":
    sys.exit(start("provision"))
