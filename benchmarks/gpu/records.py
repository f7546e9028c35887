"""Writes the records of a proof. Proofs on the same day add to the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardlab.files import files

Record = dict[str, Any]  # has at least: stage, name, verdict (holds, fails or dropped), why
Finding = dict[str, Any]  # the result of a check; has at least: holds (a bool) or dropped (the reason)
FIGURES = ("step_ms", "mfu_pct", "ratio", "share")


class Records:
    """The records in a folder: proof.jsonl for programs, table.txt for people.

    A new record replaces the earlier record of the same stage and name, unless the verdict of the new record is "dropped".
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._table = folder / "proof.jsonl", folder / "table.txt"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        earlier = [json.loads(line) for line in lines]
        self._all: dict[tuple[str, str], Record] = {(one["stage"], one["name"]): one for one in earlier}
        self.new: list[Record] = []

    def add(self, record: Record) -> None:
        """Store a record in both files, and print its line."""
        self.new.append(record)
        key = (record["stage"], record["name"])
        if record["verdict"] != "dropped" or key not in self._all:
            self._all[key] = record
        everything = list(self._all.values())
        files.write_atomic(self._file, "".join(f"{json.dumps(one)}\n" for one in everything).encode())
        table = [*map(line, everything), total(everything)]
        files.write_atomic(self._table, "".join(f"{one}\n" for one in table).encode())
        print(line(record), flush=True)


def line(record: Record) -> str:
    found = [f"{name} {record[name]:.4g}" for name in FIGURES if record.get(name) is not None]
    took = f"{record['took_s']:6.1f} s" if "took_s" in record else " " * 8
    return f"{record['stage']} {record['verdict']:7} {took}  {record['name']}: {', '.join(found) or record.get('why', '')}"[
        :200
    ]


def total(records: list[Record]) -> str:
    counts = {verdict: sum(one["verdict"] == verdict for one in records) for verdict in ("holds", "fails", "dropped")}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
