"""Computes and writes checksums of a model's weights (`shardlab.runs.checksums`)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from shardlab.runs.checksums import PROJECTIONS, ModelChecksum, PieceChecksum
from shardlab.runs.record import SCHEMA
from shardlab.weights.pieces import UnseenParameter, list_pieces

CHUNK_ELEMENTS = 1 << 20  # elements whose signs are in memory at a time


def write_checksums(folder: Path, model: Any, optimizer: Any, step: int) -> None:
    """Append the checksums of the weights that this rank holds to the file of the rank. No rank sends anything."""
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if has_group else int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    environment_size = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)
    world_size = torch.distributed.get_world_size() if has_group else environment_size
    model_checksum = ModelChecksum(schema=SCHEMA, step=step, rank=rank, world_size=world_size)
    own_optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate, Lightning and DeepSpeed wrap that of the script
    model_checksum.optimizer = None if optimizer is None else type(own_optimizer).__name__
    checksum_tensors: list[torch.Tensor] = []
    for piece in list_pieces(model):
        if isinstance(piece, UnseenParameter):
            model_checksum.unseen[piece.name] = piece.reason
            continue
        if piece.weight.numel() == 0:
            continue
        checksum_tensors.append(_compute_projections(piece.weight, piece.name, piece.shape, piece.offsets))
        if piece.gradient is not None:
            checksum_tensors.append(_compute_projections(piece.gradient, piece.name, piece.shape, piece.offsets))
        model_checksum.pieces.append(
            PieceChecksum(
                name=piece.name, shape=list(piece.shape), offsets=list(piece.offsets), block=list(piece.weight.shape),
                dtype=str(piece.weight.dtype).removeprefix("torch."), weight=[],
                gradient=None if piece.gradient is None else [],
            )
        )  # fmt: skip
    checksum_numbers = iter(torch.stack(checksum_tensors).tolist() if checksum_tensors else ())  # waits for the GPU, once
    for piece_checksum in model_checksum.pieces:
        piece_checksum.weight = next(checksum_numbers)
        piece_checksum.gradient = None if piece_checksum.gradient is None else next(checksum_numbers)
    checksums_path = folder / f"rank-{rank:05d}.jsonl"
    descriptor = os.open(checksums_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(model_checksum) + b"\n")


@torch.no_grad()
def _compute_projections(block: torch.Tensor, name: str, shape: tuple[int, ...], offsets: tuple[int, ...]) -> torch.Tensor:
    """The checksum of a block of a parameter, as a tensor on the device of the block."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    sums = torch.zeros(PROJECTIONS, dtype=torch.float64, device=block.device)
    strides = [1]
    for dimension_size in reversed(shape[1:]):
        strides.insert(0, strides[0] * dimension_size)
    chunk_rows = max(1, CHUNK_ELEMENTS // max(1, block[0].numel()))
    for first_row in range(0, block.shape[0], chunk_rows):
        chunk = block[first_row : first_row + chunk_rows]
        first_place = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True)) + first_row * strides[0]
        places = torch.full((1,) * chunk.dim(), first_place, dtype=torch.int64, device=block.device)
        for dimension, (dimension_size, stride) in enumerate(zip(chunk.shape, strides, strict=True)):
            dimension_places = torch.arange(dimension_size, device=block.device) * stride
            places = places + dimension_places.view([-1 if axis == dimension else 1 for axis in range(chunk.dim())])
        values = chunk.to(torch.float64).flatten()
        sums += torch.stack([torch.where(is_negative, -values, values).sum() for is_negative in _draw_signs(places, seed)])
    return sums


def _draw_signs(places: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """For each number of a checksum, which elements are subtracted. The same place and seed give the same sign on each device.

    The bits are those of SplitMix64, with arithmetic shifts, because torch has no others.
    """
    bits = places.flatten() * -7046029254386353131 + seed
    bits = (bits ^ (bits >> 30)) * -4658895280553007687
    bits = (bits ^ (bits >> 27)) * -7723592293110705685
    for number in range(PROJECTIONS):
        yield (bits >> (40 + number)) & 1 == 1
