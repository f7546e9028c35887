"""What the host and torch really were while a run trained: env/HOST.json, written on the host itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardlab import files, host

if TYPE_CHECKING:
    from trainers.ranks import Ranks


def write(path: Path, ranks: Ranks) -> None:
    """Write what `shardlab.host` sees of this machine, and torch's own account of what it will compute with."""
    files.make_folder(path.parent)
    files.write_json(path, {**msgspec.to_builtins(host.observe()), "torch": _torch(ranks)})


def _torch(ranks: Ranks) -> dict[str, Any]:
    import torch
    from torch.cuda.nccl import version as nccl_version

    cuda = ranks.device.type == "cuda"
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(ranks.device) if cuda else "cpu",
        "backend": ranks.backend,
        "nccl": ".".join(map(str, nccl_version())) if cuda else None,  # type: ignore[no-untyped-call]
        "threads": torch.get_num_threads(),
    }
