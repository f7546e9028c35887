"""The digests of packages and source, by which a run finds out whether they changed since it was submitted."""

import subprocess
import sys

PROGRAM = "from shardlab import source_digest as it; print(it.packages()); import setuptools; print(it.packages())"


def test_a_process_that_imports_setuptools_has_the_digest_of_one_that_does_not():
    """setuptools brings copies of packages along, and torch imports setuptools when it compiles."""
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after
