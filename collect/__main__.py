"""`python -m collect` is the same as the `collect` command."""

import sys

from shardlab.command_start import start


def main() -> int:
    """Run the `collect` command with the arguments of the command line, and return its exit code."""
    return start("collect")


if __name__ == "__main__":
    sys.exit(main())
