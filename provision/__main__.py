"""`python -m provision` is the same as the `provision` command."""

import sys

from provision.cli import main

if __name__ == "__main__":
    sys.exit(main())
