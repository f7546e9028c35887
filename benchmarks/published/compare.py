"""Compares predictions with measurements that others published. It needs neither a GPU nor torch.

python benchmarks/published/compare.py [--table TEXT] [--program TEXT] [--without TEXT ...] [--only old|new] [--rows] [--pairs]
                                       [--one-card] [--not-calibrated]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import report
from planned_rows import plan_rows
from published_rows import PublishedRow, read_programs, read_rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--table", default="", help="only tables whose names have this text")
    options.add_argument("--program", default="", help="only programs whose names have this text")
    options.add_argument("--without", action="append", default=[], help="no program whose name has this text")
    options.add_argument("--only", choices=["old", "new"], help="only tables that are new, or only the others")
    options.add_argument("--rows", action="store_true", help="print each row")
    options.add_argument("--pairs", action="store_true", help="print each pair")
    options.add_argument("--one-card", action="store_true", help="one network card in each node, whatever the machine has")
    options.add_argument("--not-calibrated", action="store_true", help="do not use docs/results")
    given = options.parse_args()
    rows = [row for row in read_rows() if _is_chosen(row, given)]
    planned, refused = plan_rows(rows, one_card=given.one_card, calibrated=not given.not_calibrated)
    if given.rows:
        report.print_rows(planned)
    not_planned = sum(count for program in read_programs() for count in program.not_planned.values())
    print(f"{len(rows)} published configurations, {len(refused)} refused; no cell can express {not_planned} others")
    for name, reason in refused.items():
        print(f"  refused: {name}: {reason}")
    if report.with_time(planned):
        report.print_times(planned)
    report.print_memory(planned)
    report.print_fits(planned)
    report.print_pairs(planned, each=given.pairs)


def _is_chosen(row: PublishedRow, given: argparse.Namespace) -> bool:
    return (
        given.table in row.table.name
        and given.program in row.program
        and not any(text in row.program for text in given.without)
        and given.only in (None, "new" if row.table.new else "old")
    )


if __name__ == "__main__":
    main()
