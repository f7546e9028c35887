"""The metrics, in one module per subject. A metric is a pure function that computes a number with its unit from a run.

Each module has a tuple METRICS, which `collect.metric.load_metrics` collects.
"""
