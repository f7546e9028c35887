"""Properties of torch on this machine: ``python -m provision.facts._torch`` prints them as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

KNOWN_BACKENDS = ("gloo", "nccl", "mpi")


def inspect_torch() -> dict[str, Any]:
    """The fields of `provision.facts.torch.Torch` for this machine, by name.

    The import of torch can fail although torch is installed, for example because of a library of another CUDA release or an
    incomplete installation. The error is then the answer.
    """
    fields: dict[str, Any] = {"hidden_by": os.environ.get("CUDA_VISIBLE_DEVICES")}
    try:
        import torch
        from torch import distributed

        fields["version"] = str(torch.__version__)
        fields["cuda"] = torch.version.cuda
        if distributed.is_available():
            fields["backends"] = [backend for backend in KNOWN_BACKENDS if getattr(distributed, f"is_{backend}_available")()]
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            fields["gpus"] = torch.cuda.device_count()
        except Exception as error:  # noqa: BLE001 (any error is the reason why torch cannot use the GPUs)
            fields["why_no_gpus"] = str(error).strip().splitlines()[0]
    except Exception as error:  # noqa: BLE001
        return {"why_absent": f"{type(error).__name__}: {error}".splitlines()[0]}
    return fields


def main() -> None:
    """Print the properties of torch on this machine as JSON."""
    sys.stdout.write(json.dumps(inspect_torch()) + "\n")


if __name__ == "__main__":
    main()
