"""Tests of the digests of the packages and of the source. A run refuses to start if a digest has changed since the run was
submitted."""

import subprocess
import sys

PROGRAM = "from shardlab import source_digest as it; print(it.packages()); import setuptools; print(it.packages())"


def test_a_process_that_imports_setuptools_has_the_digest_of_one_that_does_not():
    """When a process imports setuptools, setuptools adds a folder with its own copies of packages to sys.path. torch imports
    setuptools when it compiles. These copies must not change the digest of the packages."""
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after
