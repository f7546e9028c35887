"""The folders of a run that the tests of fetching share; each file has its own `cluster`."""

import pytest


@pytest.fixture
def there(cluster):
    """The folder of the first run on the cluster."""
    return cluster.there.list_run_dirs()[0].path


@pytest.fixture
def here(cluster, there):
    """The folder of the same run on this machine, where a fetch makes it."""
    return cluster.here.runs / there.name
