"""Tests shardlab on GPUs: every strategy, the correctness of measurements, and speed.

    python benchmarks/gpu/prove.py --out docs/results [--minutes 9] [--only A,C]

The command runs on any machine with one or more GPUs. The most important stage runs first. When the time is over, the remaining
stages are dropped. The stages in their order:

    A  strategies and precisions over NCCL, with a rank on each GPU; takes at most 60 % of the time
    C  whether the reported step times, kernels, TF32, memory and energy are correct
    D  GPT-2 Large in bf16: MFU, and the ratio to a plain PyTorch loop; the loss
    E  only with several GPUs: strategies and precisions with one rank (with a single GPU, stage A does this)
    B  strategies with two and four ranks on one GPU, with collectives through host memory

The command writes into the folder OUT/DATE-GPU: HOST.json, proof.jsonl, table.txt, and torch's trace and memory snapshot. Each
record becomes a line of proof.jsonl at once, so that an interruption loses no record. Exit code: 0 if all checks hold, 1 if a
check fails or no check was made, 2 if there is no GPU. The command needs no network: missing packages can be copied to the
machine as wheels (wheels.py).
"""

# ruff: noqa: E402 - wheels must be unpacked before their packages are imported
from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that torch.cuda.is_available() does not initialize CUDA
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo looks the machine's own name up, which may fail without a network
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order in which NVML numbers GPUs

import wheels

wheels.use()  # must come before the first import of a package that may be missing
if absent := wheels.REQUIRED.intersection(wheels.missing()):
    sys.exit(
        f"missing packages: {', '.join(sorted(absent))}. Install them, or bring them along as wheels: see {wheels.__file__}"
    )

import cells
import forked
from records import Record, Records, total

from shardlab.files import files
from shardlab.hardware import host
from shardlab.hardware.host import Host

HERE = Path(__file__).resolve().parent
CHECK_S = 150.0  # time limit of one check
STAGE_A_SHARE = 0.6  # share of the time that stage A may take if other stages follow
LIBRARIES = (
    "deepspeed", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
    "transformers.models.vit.modeling_vit", "trainers.run.loop",
)  # fmt: skip


@dataclass(frozen=True)
class Proof:
    """The arguments of every stage.

    folder: the folder for temporary files.
    out: the folder for results.
    gpus: the number of GPUs of the machine.
    where: an expression that selects cells; '' selects all cells.
    ends: the value of time.monotonic() after which no further check starts.
    """

    folder: Path
    out: Path
    gpus: int
    where: str
    ends: float


def main(argv: Sequence[str] | None = None, observe: Callable[[], Host] = host.read_host, today: str = "") -> int:
    """Run the command and return its exit code.

    observe: reads the properties of the machine. today: the date in the name of the folder; empty: the current date. Tests
    replace observe and today.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="where results are kept (default: docs/results)")
    parser.add_argument("--minutes", type=float, default=9.0, help="no further check starts after so many minutes (default: 9)")
    parser.add_argument("--only", default="A,C,D,E,B", metavar="STAGE,...", help="only these stages, in this order")
    parser.add_argument("--where", default="", help="stages A, B and E: only cells for which this holds, as in jobs plan")
    arguments = parser.parse_args(argv)
    stages = arguments.only.split(",")
    if unknown := [stage for stage in stages if stage not in STAGES]:
        parser.error(f"--only: found {unknown[0]!r}. Allowed: {', '.join(STAGES)}.")
    ends = time.monotonic() + 60 * arguments.minutes
    machine = observe()
    if not machine.gpus:
        print(f"there is no GPU here: {machine.gpu_why_absent}", file=sys.stderr)
        return 2
    if len(machine.gpus) > 1:
        print(f"for traffic, overlap and predictions with a rank on each GPU: make gpu-proof GPUS={min(len(machine.gpus), 8)}")
    name = re.sub(r"[^a-z0-9]+", "-", machine.gpus[0].name.lower()).strip("-")
    out: Path = arguments.out / f"{today or datetime.datetime.now(datetime.UTC).date()}-{name}"
    files.make_folder(out)
    files.write_json(out / "HOST.json", machine)
    _import()
    records = Records(out)
    with tempfile.TemporaryDirectory(prefix="gpu-proof-") as folder:
        log = Path(folder) / "first.log"
        _, gpus = forked.answer(_usable_gpus, CHECK_S, log)
        if not gpus:  # perhaps an import has initialized CUDA in this process
            print(f"a forked process cannot use a GPU: {log.read_text()[-2000:]}", file=sys.stderr)
            return 1
        for stage in stages:
            share = STAGE_A_SHARE if stage == "A" and stage != stages[-1] else 1.0
            proof = Proof(Path(folder), out, gpus, arguments.where, ends - 60 * arguments.minutes * (1 - share))
            for record in STAGES[stage](proof):
                records.add({"stage": stage, **record})
    print(f"{total(records.new)}\nkept in {out}")
    verdicts = {record["verdict"] for record in records.new}
    return 0 if "holds" in verdicts and "fails" not in verdicts else 1


def _import() -> None:
    """Import the libraries of the ranks before the first fork. A failed import is printed; cells that need it will fail."""
    from trainers.tasks import vision_library

    os.environ["DS_ACCELERATOR"] = "cuda"
    loads = {"torchvision": vision_library.import_torchvision}  # first, because transformers uses operators of torchvision
    loads |= {name: partial(importlib.import_module, name) for name in LIBRARIES}
    for name, load in loads.items():
        try:
            load()
        except Exception as error:  # noqa: BLE001 - an import can raise any exception
            print(f"{name} cannot be imported: {error!r}"[:300], file=sys.stderr)


def _usable_gpus() -> int:
    """The number of GPUs on which this process can compute. It initializes CUDA, so it must run in a forked process."""
    import torch

    return sum(bool(torch.ones(1, device=f"cuda:{index}").sum() == 1) for index in range(torch.cuda.device_count()))


def over_nccl(proof: Proof) -> Iterator[Record]:
    """Stage A: strategies and precisions over NCCL, with one rank on each GPU."""
    several = ["every-gpu", "meshes"] if proof.gpus > 2 and proof.gpus % 2 == 0 else ["every-gpu"]
    yield from _matrices(proof, several if proof.gpus > 1 else ["one-rank"])


def one_rank(proof: Proof) -> Iterator[Record]:
    """Stage E: strategies and precisions with one rank, if stage A had several ranks."""
    yield from _matrices(proof, ["one-rank"] if proof.gpus > 1 else [])


def _matrices(proof: Proof, names: Sequence[str]) -> Iterator[Record]:
    for name in names:
        how = cells.How("NCCL", proof.out, proof.where, proof.ends)
        yield from cells.made(proof.folder / name, cells.sized((HERE / f"{name}.yaml").read_text(), proof.gpus), how)


def shared_gpu(proof: Proof) -> Iterator[Record]:
    """Stage B: strategies with several ranks on one GPU."""

    def prepare(rank: int) -> None:
        import staged

        os.environ["LOCAL_RANK"] = "0"
        staged.install()

    _, exclusive = forked.answer(_takes_one_process, CHECK_S, proof.folder / "compute-mode.log")
    if exclusive:
        yield {"name": "compute mode", "verdict": "dropped", "why": "the GPU's compute mode allows one process only"}
        return
    how = cells.How("gloo over the host", proof.out, proof.where, proof.ends, prepare)
    yield from cells.made(proof.folder / "shared-gpu", (HERE / "shared-gpu.yaml").read_text(), how)


def _takes_one_process() -> bool:
    import pynvml

    try:
        pynvml.nvmlInit()
        mode = pynvml.nvmlDeviceGetComputeMode(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError:
        return False
    return bool(mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)


def truth(proof: Proof) -> Iterator[Record]:
    """Stage C: whether measurements are correct."""
    from truth import CHECKS

    yield from _checks(CHECKS, proof)


def speed(proof: Proof) -> Iterator[Record]:
    """Stage D: the speed of GPT-2 Large."""
    from speed import ROWS

    yield from _checks(ROWS, proof)


def _checks(checks: dict[str, Callable[[], Record]], proof: Proof) -> Iterator[Record]:
    for number, (name, check) in enumerate(checks.items()):
        left_s = proof.ends - time.monotonic()
        if left_s < 0:
            yield {"name": name, "verdict": "dropped", "why": "the time was over"}
            continue
        log, began = proof.folder / f"check-{number}.log", time.monotonic()
        code, found = forked.answer(check, min(CHECK_S, left_s + cells.GRACE_S), log)
        if code == forked.KILLED and left_s + cells.GRACE_S < CHECK_S:
            yield {"name": name, "verdict": "dropped", "why": "the time was over"}
            continue
        if found is not None and "dropped" in found:
            yield {"name": name, "verdict": "dropped", "why": found["dropped"]}
            continue
        if code:
            found = {"holds": False, "why": f"exit code {code}", "log": log.read_text()[-2000:]}
        verdict = "holds" if found.pop("holds") else "fails"
        yield {"name": name, "took_s": round(time.monotonic() - began, 1), "verdict": verdict, **found}


STAGES: dict[str, Callable[[Proof], Iterator[Record]]] = {
    "A": over_nccl,
    "B": shared_gpu,
    "C": truth,
    "D": speed,
    "E": one_rank,
}

if __name__ == "__main__":
    sys.exit(main())
