"""Checks that the metric names that a matrix file may use are exactly the metrics that `collect` computes."""

from collect.metric import load_metrics
from shardlab.matrix import metric_names


def test_every_metric_may_be_named_and_no_other():
    """If this test fails, shardlab/matrix/metric_names.py does not list the metrics of `collect`: correct that file."""
    arguments = {metric.name: metric.argument for metric in load_metrics()}
    assert set(metric_names.PLAIN_METRICS) == {name for name, argument in arguments.items() if not argument}
    assert {name: argument for name, argument in arguments.items() if argument} == metric_names.WITH_ARGUMENT
    assert len(set(metric_names.KNOWN_METRICS)) == len(arguments) + 1  # KNOWN also has the state of a run


def test_metrics_have_the_instrument_that_their_records_come_from():
    """If this test fails, correct INSTRUMENTS in shardlab/matrix/metric_names.py. Metrics with an argument declare no reads."""
    by_name = {metric.name: metric for metric in load_metrics()}
    needed = {}
    for name in metric_names.PLAIN_METRICS:
        reads = by_name[by_name[name].compares or name].reads
        if reads.breakdown or reads.trace:
            needed[name] = "profile"
        elif any(key.startswith("instruments.memory.") for key in reads.result):
            needed[name] = metric_names.CATEGORIES
        elif any(key.startswith("instruments.checkpoints.") for key in reads.result):
            needed[name] = "checkpoints"
        elif any("accuracy" in key for key in reads.result):
            needed[name] = "validation"
    assert needed == {name: what for name, what in metric_names.INSTRUMENTS.items() if name in metric_names.PLAIN_METRICS}
    assert metric_names.WITH_ARGUMENT.keys() == metric_names.INSTRUMENTS.keys() - set(metric_names.PLAIN_METRICS)
