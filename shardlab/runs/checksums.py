"""The records of a model's weights that a training script of the user leaves: sums of the weights, not the weights."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shardlab.record_types import Count, Measured, Positive
from shardlab.runs.record import Record

PROJECTIONS = 8  # numbers in a checksum
ParameterName = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,300}\Z")]
Projections = Annotated[list[Measured], msgspec.Meta(min_length=PROJECTIONS, max_length=PROJECTIONS)]


class PieceChecksum(Record, kw_only=True):
    """The checksum of the elements of a parameter that a rank holds: a block of the whole parameter.

    Each number of a checksum is the sum of all elements, each with a sign that depends on the name of the parameter and on the
    place of the element in the whole parameter. So checksums of blocks add up to the checksum of the whole parameter, and the
    mean square of the difference of two checksums estimates the square of the L2 distance of two tensors.
    """

    name: ParameterName
    """The name of the parameter in the model of the user, without the names of wrappers."""
    shape: list[Positive]
    """The shape of the whole parameter; one number, its elements, if the block is contiguous in memory."""
    offsets: list[Count]
    """The place of the first element of the block in the whole parameter."""
    block: list[Positive]
    """The shape of the block."""
    dtype: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]{1,30}\Z")]
    """The type of the elements, such as float32."""
    weight: Projections
    """Of the weights."""
    gradient: Projections | None = None
    """Of the gradient; absent if the library no longer has the gradient."""


class ModelChecksum(Record, kw_only=True):
    """The checksums of the weights that a rank holds after a step."""

    schema: Count
    step: Count
    """The number of steps before; 0: before the first step."""
    rank: Count
    """The number of the rank, from 0."""
    world_size: Positive
    """The number of ranks."""
    optimizer: str | None = None
    """The name of the optimizer's class; absent if the script did not tell it."""
    unseen: dict[ParameterName, str] = msgspec.field(default_factory=dict)
    """Parameters whose blocks could not be found -> the reason."""
    pieces: list[PieceChecksum] = msgspec.field(default_factory=list)
    """The blocks of parameters that the rank holds."""
