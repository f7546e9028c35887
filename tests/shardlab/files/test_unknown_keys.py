"""Every part of a file that users write refuses a key that it does not know, so that no misspelled key is ignored."""

import msgspec
import pytest

from shardlab.cluster.cluster import Cluster
from shardlab.matrix.cell import Cell
from shardlab.matrix.matrix import MatrixFile
from shardlab.matrix.model_file import ModelByConfiguration


def list_parts(described, parts):
    """Collects in `parts` the struct types that a type uses, at any depth. described: the type, as msgspec.inspect shows it."""
    if isinstance(described, msgspec.inspect.StructType):
        if described.cls in parts:
            return
        parts.add(described.cls)
    for name in getattr(described, "__struct_fields__", ()):
        value = getattr(described, name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, msgspec.inspect.Type | msgspec.inspect.Field):
                list_parts(inner, parts)


def parts_of(*roots):
    parts = set()
    for root in roots:
        list_parts(msgspec.inspect.type_info(root), parts)
    return sorted(parts, key=lambda part: part.__name__)


PARTS = parts_of(Cluster, MatrixFile, Cell, ModelByConfiguration)


def test_the_parts_are_found():
    assert {"Cluster", "Lan", "NodeEntry", "Optimizer", "Claim"} <= {part.__name__ for part in PARTS}
    assert len(PARTS) > 20


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_part_refuses_a_key_that_it_does_not_know(part):
    with pytest.raises(msgspec.ValidationError, match="unknown field `no_such_key`"):
        msgspec.convert({"no_such_key": 1}, part)
