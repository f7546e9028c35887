"""What the menu of metrics says: unit, direction, column and definition of each metric. Golden file: golden/metrics.txt."""

import msgspec
from support_golden import same_as_golden

from collect.metric import load_metrics


def test_the_menu_of_metrics_has_its_units_and_columns():
    lines = []
    for metric in load_metrics():
        said = {name: value for name, value in msgspec.structs.asdict(metric).items() if not callable(value)}
        column = metric.column and msgspec.to_builtins(metric.column)
        facts = {name: said[name] for name in ("compares", "argument", "exact", "of_all_steps") if said[name]}
        facts |= {"reads": msgspec.to_builtins(metric.reads)} if metric.reads else {}
        lines += [f"{metric.name}: {metric.unit}, {metric.direction}", f"    {metric.definition}", f"    {column} {facts}"]
    same_as_golden("metrics.txt", "\n".join(lines) + "\n")
