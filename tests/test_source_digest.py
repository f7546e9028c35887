"""The digests of packages and source. A run refuses to start if they have changed since it was submitted."""

import subprocess
import sys

PROGRAM = "from shardlab import source_digest as it; print(it.packages()); import setuptools; print(it.packages())"


def test_a_process_that_imports_setuptools_has_the_digest_of_one_that_does_not():
    """setuptools contains copies of other packages, and torch imports setuptools when it compiles."""
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after
