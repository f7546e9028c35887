"""`python -m shardlab` is the same as the `shardlab` command."""

import sys

from shardlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
