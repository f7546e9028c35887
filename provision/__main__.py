"""`python -m provision` is the same as the `provision` command."""

import sys

from shardlab.command_start import start


def main() -> int:
    """Run the command with the arguments of this process. Returns its exit code."""
    return start("provision")


if __name__ == "__main__":
    sys.exit(main())
