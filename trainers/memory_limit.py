"""Hold a rank to less memory than its machine has, so that a study's out-of-memory boundary can be looked for anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30


def hold(limit_gib: float, device: torch.device) -> None:
    """From now on this process gets no more than `limit_gib` of its GPU's memory.

    On a CPU the limit stands for a GPU's: it is what the process may take beyond what it has now, with its libraries loaded
    and nothing built, by the kernel's count of its private writable memory (RLIMIT_DATA). Beyond it torch says that it
    cannot allocate memory.
    """
    if device.type == "cuda":
        import torch

        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * GIB / total), device)
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + int(limit_gib * GIB), hard))


def _data_bytes() -> int:
    """What the kernel counts against RLIMIT_DATA now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("VmData:"))
    return int(kib) * 1024
