"""The metrics that a matrix file may name are those that collect has."""

from collect.metric import menu
from shardlab import metric_names


def test_every_metric_may_be_named_and_no_other():
    """To mend: write the names that differ into shardlab/metric_names.py."""
    arguments = {metric.name: metric.argument for metric in menu()}
    assert set(metric_names.PLAIN) == {name for name, argument in arguments.items() if not argument}
    assert {name: argument for name, argument in arguments.items() if argument} == metric_names.WITH_ARGUMENT
    assert len(set(metric_names.KNOWN)) == len(arguments) + 1  # the state
