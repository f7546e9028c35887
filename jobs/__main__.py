"""`python -m jobs`, where the command's folder is not on PATH."""

import sys

from jobs.cli import main

sys.exit(main())
