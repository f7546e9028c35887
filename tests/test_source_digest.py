"""Tests of the digests of the packages and of the source. A run refuses to start if a digest has changed since the run was
submitted."""

import subprocess
import sys

PROGRAM = "from shardlab import source_digest as it; print(it.packages()); import setuptools; print(it.packages())"


def test_a_process_that_imports_setuptools_has_the_digest_of_one_that_does_not():
    """setuptools makes the packages that it contains visible to Python when it is imported, and torch imports setuptools when
    it compiles. The digest of the packages must not include them."""
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after
