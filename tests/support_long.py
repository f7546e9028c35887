"""Whether the long forms of proofs run: `make test-long` sets SHARDLAB_TESTS=long."""

import os

LONG = os.environ.get("SHARDLAB_TESTS") == "long"
