"""`python -m shardlab` is the same as the `shardlab` command."""

import sys

from shardlab.command_start import start


def main() -> int:
    """Run the command with the words of the command line. Returns its exit code."""
    return start("shardlab")


if __name__ == "__main__":
    sys.exit(main())
