"""What pages say about the fields of a type: the docstrings below the fields, and texts that are equal in every document."""

from __future__ import annotations

import msgspec

from shardlab.files import field_docs

# Texts about fields that mean the same in every document. A text in the source of the type replaces them.
EVERYWHERE = {
    "schema": "version of the format of this document",
    "run_id": "id of the run, which is the name of its folder",
    "run": "id of the run",
    "matrix": "name of the matrix",
    "title": "title of the matrix",
    "cell": "id of the cell",
    "baseline": "what the cells are compared with: a strategy, or the id of a cell",
    "rehearsal": "whether the runs were a rehearsal, whose times say nothing about speed",
    "world": "number of processes",
    "versions": "name of a package -> its version",
    "t_s": "seconds of the monotonic clock, since boot",
    "wall_s": "seconds since the epoch",
    "host": "host name",
    "boot_id": "changes at each boot of the machine",
    "rank": "number of the rank, from 0",
    "metric": "name of the metric",
    "collective": "name of the collective, such as all_reduce",
    "unit": "unit of the numbers beside it",
    "state": "state of the run",
    "why": "the reason, in words",
    "mac": "hardware address",
    "pci": "address on the PCI bus",
    "uuid": "NVML's id of the GPU",
    "lease": "null: the machines are not lent for a time",
}


def of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The text about each field of a type; a field about which the source says nothing is missing."""
    texts = EVERYWHERE | field_docs.read_field_docs(kind)
    return {field.name: texts[field.encode_name] for field in msgspec.structs.fields(kind) if field.encode_name in texts}


def summary(kind: type[msgspec.Struct]) -> str:
    """The first paragraph of the docstring of a type."""
    return field_docs.join_lines(kind.__doc__ or "").split("\n\n")[0]
