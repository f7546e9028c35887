"""NVML without a GPU: a stub library, compiled here. The real Python binding loads it in the processes that a test starts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "stub_nvml" / "nvml.cpp"


class StubNvml:
    """The compiled stub library. The last call of `say` defines its GPUs."""

    def __init__(self, folder: Path, *flags: str) -> None:
        """Compile the stub. flags: options of g++, such as -DOLD_DRIVER."""
        self._state = folder / "gpus.txt"
        subprocess.run(
            ["g++", "-std=c++20", "-shared", "-fPIC", *flags, SOURCE, "-o", folder / "libnvidia-ml.so.1"], check=True
        )
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
        self.environment = {"LD_LIBRARY_PATH": path, "STUB_NVML": str(self._state)}
        self.say([])

    def say(
        self,
        uuids: Sequence[str],
        *,
        power_w: float = 100.0,
        energy_j: float = 0.0,
        reasons: int = 0,
        processes: Mapping[int, Sequence[int]] | None = None,
        of: Mapping[int, Mapping[str, int]] | None = None,
        mig: Mapping[int, Mapping[str, int]] | None = None,
        xids: Sequence[tuple[int, int]] = (),
        **answers: int,
    ) -> None:
        """Define GPUs with these UUIDs.

        power_w, energy_j, reasons (NVML's bits of throttling) and answers (names as in nvml.cpp) apply to all GPUs.
        of: maps the index of a GPU to answers that only this GPU gives.
        processes: maps the index of a GPU to the process ids that use it.
        mig: maps the index of a GPU to its MIG instances, each with its UUID and its used memory.
        xids: all XID errors up to now, as pairs (index of the GPU, XID number).
        """
        alike = {"power_mw": round(1000 * power_w), "energy_mj": round(1000 * energy_j), "reasons": reasons} | answers
        lines = []
        for place, uuid in enumerate(uuids):
            own = {"uuid": uuid} | alike | dict((of or {}).get(place, {}))
            lines.append(" ".join(["gpu", *(f"{name}={value}" for name, value in own.items())]))
        for place, instances in (mig or {}).items():
            lines += [f"mig {place} uuid={uuid} memory_total={used} memory_used={used}" for uuid, used in instances.items()]
        lines += [f"process {place} {pid}" for place, pids in (processes or {}).items() for pid in pids]
        lines += [f"xid {place} {number}" for place, number in xids]
        unfinished = self._state.with_suffix(".new")
        unfinished.write_text("\n".join(lines))
        unfinished.replace(self._state)


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> StubNvml:
    return _compiled(tmp_path_factory)


@pytest.fixture(scope="module")
def old_nvml(tmp_path_factory: pytest.TempPathFactory) -> StubNvml:
    """The stub of NVML, compiled with only the functions that a driver older than version 510 has."""
    return _compiled(tmp_path_factory, "-DOLD_DRIVER")


def _compiled(folders: pytest.TempPathFactory, *flags: str) -> StubNvml:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return StubNvml(folders.mktemp("nvml"), *flags)
