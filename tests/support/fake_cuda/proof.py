"""Runs `benchmarks/gpu/prove.py` on one fake GPU: `python -m fake_cuda.proof LIBRARY ARGUMENTS...`.

LIBRARY is the C++ library of the fake GPUs; ARGUMENTS are the arguments of prove.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import fake_cuda


def main() -> int:
    fake_cuda.install(Path(sys.argv[1]))
    import msgspec
    import prove

    from shardlab.hardware import host
    from shardlab.hardware.nvml import Gpu

    machine = msgspec.structs.replace(host.read_host(), gpus=[Gpu(uuid="GPU-0", name=fake_cuda.NAME)])
    return prove.main(sys.argv[2:], lambda: machine, today="2026-01-01")


if __name__ == "__main__":
    sys.exit(main())
