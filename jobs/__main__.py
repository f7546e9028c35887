"""`python -m jobs` is the same as the `jobs` command."""

import sys

from shardlab.command_start import start


def main() -> int:
    """Run the command `jobs` with the arguments of the command line; return its exit code."""
    return start("jobs")


if __name__ == "__main__":
    sys.exit(main())
