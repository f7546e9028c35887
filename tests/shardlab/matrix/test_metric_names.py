"""Checks that the metric names that a matrix file may use are exactly the metrics that `collect` computes."""

from collect.metric import all_metrics
from shardlab.matrix import metric_names


def test_every_metric_may_be_named_and_no_other():
    """If this test fails, shardlab/matrix/metric_names.py does not list the metrics of `collect`: correct that file."""
    arguments = {metric.name: metric.argument for metric in all_metrics()}
    assert set(metric_names.PLAIN_METRICS) == {name for name, argument in arguments.items() if not argument}
    assert {name: argument for name, argument in arguments.items() if argument} == metric_names.WITH_ARGUMENT
    assert len(set(metric_names.KNOWN_METRICS)) == len(arguments) + 1  # KNOWN also has the state of a run
