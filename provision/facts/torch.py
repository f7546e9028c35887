"""What torch can do on a machine: its version, the GPUs it sees, the ways its ranks can talk."""

from __future__ import annotations

import msgspec

from provision.facts import Fact, decode

# Importing torch can fail in more ways than not being there (a library of another CUDA, half an installation), and
# what it says then is the answer.
PROGRAM = """\
import json, os
found = {"hidden_by": os.environ.get("CUDA_VISIBLE_DEVICES")}
try:
    import torch
    import torch.distributed as distributed
    found["version"] = str(torch.__version__)
    found["cuda"] = torch.version.cuda
    if distributed.is_available():
        names = ("gloo", "nccl", "mpi")
        found["backends"] = [n for n in names if getattr(distributed, f"is_{n}_available")()]
    try:
        torch.cuda.init()
        found["gpus"] = torch.cuda.device_count()
    except Exception as error:
        found["why_no_gpus"] = str(error).strip().splitlines()[0]
except Exception as error:
    found = {"why_absent": f"{type(error).__name__}: {error}".splitlines()[0]}
print(json.dumps(found))
"""


class Torch(msgspec.Struct, frozen=True, omit_defaults=True):
    """torch as it imports. `version` is None where it does not, `gpus` None where it cannot use any."""

    version: str | None = None
    why_absent: str | None = None
    cuda: str | None = None  # the CUDA release that it was built for
    gpus: int | None = None
    why_no_gpus: str | None = None
    hidden_by: str | None = None  # CUDA_VISIBLE_DEVICES, which hides GPUs from torch and not from NVML
    backends: list[str] = []


def command(python: str) -> list[str]:
    return [python, "-c", PROGRAM]


def parse(stdout: str) -> Torch:
    """What torch said of itself. Raises ValueError."""
    found = decode(stdout, Torch)
    if (found.version is None) == (found.why_absent is None):
        raise ValueError("it names neither a version nor why there is none.")
    return found


TORCH = Fact("torch", command, parse, timeout_s=120)  # 4 s here; a cold NFS home can take a minute
