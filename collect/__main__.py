"""`python -m collect`, for nodes where the command is not on the path."""

import sys

from collect.cli import main

if __name__ == "__main__":
    sys.exit(main())
