"""What is said in each case of a kind: why a job waits, what a file is, why a login fails, what is wrong with GPUs or a portal.

Golden file: golden/sentences_by_case.txt. The terms of each strategy's communication by theory are there with their numbers.
"""

import gzip
import io
import tarfile
import types

import httpx
import msgspec
from support_golden import same_as_golden
from support_planner import cell

from collect.traces import command as trace_command
from collect.traces import file_kind
from collect.traces.lacks import Lack
from provision.checks import driver, gpus
from provision.cloudlab import portal
from provision.cloudlab.token import Token
from provision.facts.nvidia import GpuSettings, Nvidia, PciDevice
from provision.facts.torch import Torch
from shardlab.cluster import slurm_waiting
from shardlab.errors import ShardlabError
from shardlab.hardware.host import Host
from shardlab.hardware.nvml import Gpu
from shardlab.remote.login_failure import describe_login_failure
from shardlab.remote.remote import CommandOutput
from trainers import menu
from trainers.theory.term import ModelPart

# Reasons of squeue, one for each entry of slurm_waiting.WAITS, and one that passes by itself.
REASONS = (
    "JobHoldMaxRequeue", "launch_failed_requeued_held", "JobHeldUser", "JobHeldAdmin", "PartitionTimeLimit",
    "PartitionNodeLimit", "PartitionDown", "PartitionInactive", "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount",
    "AccountNotAllowed", "InvalidQOS", "QOSNotAllowed", "ReqNodeNotAvail, UnavailableNodes:n1", "Reservation",
    "AssocMaxCpuPerJobLimit", "QOSMaxGRESPerNode", "AssocGrpGRES", "QOSMaxJobsPerUserLimit", "Priority",
)  # fmt: skip


def sentences_of_waiting():
    for reason in REASONS:
        yield f"{reason}, run", slurm_waiting.explain_waiting(reason, slurm_waiting.FOR_RUNS)
    for reason in ("JobHoldMaxRequeue", "PartitionTimeLimit", "PartitionNodeLimit", "DependencyNeverSatisfied"):
        yield f"{reason}, provision", slurm_waiting.explain_waiting(reason, slurm_waiting.FOR_PROVISION)


def make_tar():
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("x"))
    return content.getvalue()


FILES = {
    "empty": b"", "zip": b"PK\x03\x04", "bzip2": b"BZh9", "xz": b"\xfd7zXZ\0", "zstd": b"\x28\xb5\x2f\xfd", "elf": b"\x7fELF",
    "sqlite": b"SQLite format 3\0", "parquet": b"PAR1", "pdf": b"%PDF-1.7", "lfs": b"version https://git-lfs.github.com/spec",
    "pickle": b"\x80\x04\x95abc", "old pickle": b"(dp0\n", "snapshot": b"\x80\x04\x95segments", "html": b"<!DOCTYPE html><p>",
    "xml": b"<?xml version='1.0'?>", "lines": b'{"a": 1}\n{"a": 2}\n', "spaces": b" \n", "binary": b"\x01\x02\0\x03",
    "commas": b"a,b\n1,2\n", "semicolons": b"a;b\n1;2\n", "tabs": b"a\tb\n1\t2\n", "text": b"hello\nthere\n",
    "json": b'{"a": 1}',
}  # fmt: skip


def sentences_of_files(folder):
    for name, content in (FILES | {"tar": make_tar()}).items():
        (folder / "file").write_bytes(content)
        yield name, file_kind.name_file_kind(folder / "file")
    for name in ("empty", "zip", "text"):
        (folder / "file").write_bytes(gzip.compress(FILES[name]))
        yield f"{name}, gzip", file_kind.name_file_kind(folder / "file")


LOGINS = {
    "no key of a machine": "No ED25519 host key is known for uni and you have requested strict checking.",
    "a changed key": "Host key for uni has changed and you have requested strict checking.",
    "a revoked key": "ED25519 host key for uni was revoked and you have requested strict checking.",
    "two keys": "debug1: Server host key: ssh-ed25519 SHA256:old\ndebug1: Server host key: ssh-ed25519 SHA256:new\n"
    "No ED25519 host key is known for uni and you have requested strict checking.",
    "no key": "debug1: Authentications that can continue: publickey\nalice@uni: Permission denied (publickey).",
    "a passphrase": "debug1: Server accepts key: /k\nalice@uni: Permission denied (publickey).",
    "a wrong key": "alice@uni: Permission denied (publickey).",
    "too many keys": "Received disconnect from uni port 22:2: Too many authentication failures",
    "a second factor": "Authenticated using publickey with partial success.\nalice@uni: Permission denied (password).",
    "no machine": "ssh: connect to host uni port 22: Connection refused",
    "another machine": "ssh: connect to host jump port 2222: No route to host",
    "a closed connection": "kex_exchange_identification: Connection closed by remote host",
    "no name": "ssh: Could not resolve hostname uni: Name or service not known",
    "nothing": "",
}


def sentences_of_logins():
    for name, output in LOGINS.items():
        yield name, describe_login_failure("uni", output)
    yield "keys are not kept", describe_login_failure("uni", LOGINS["no key of a machine"], keeps_host_keys=False)


HOST = Host(
    schema=1, host="gpu1", boot_id="b", kernel="6.1", system="Debian 12", cpu_model="EPYC", cpus=64, cpus_allowed=32,
    memory_bytes=2**38, gpu_driver="550.54", gpus=[Gpu(uuid="GPU-0", name="NVIDIA A100", memory_bytes=80 * 2**30)] * 2,
    nics=[], python="3.12.3", packages={},
)  # fmt: skip
WITHOUT = msgspec.structs.replace(HOST, gpus=None)
TORCH = Torch(version="2.9.0", cuda="12.8", gpus=2)
SEEN = GpuSettings("NVIDIA A100", "GPU-0", persistence=True, mig=False, ecc=True)
DRIVER = Nvidia(
    gpus=[PciDevice("0000:01:00.0", 0x0302, 0x20B0)] * 2, loaded="580.1", module="580.1", nvml="580.1", seen=[SEEN] * 2
)


def sentences_of_gpus():
    replace = msgspec.structs.replace
    cases = [
        (HOST, Torch(why_absent="no module")), (HOST, TORCH), (WITHOUT, TORCH), (WITHOUT, replace(TORCH, gpus=None)),
        (replace(WITHOUT, gpu_why_absent="no libnvidia-ml"), replace(TORCH, gpus=None)), (HOST, replace(TORCH, gpus=1)),
        (HOST, replace(TORCH, gpus=1, hidden_by="0")), (HOST, replace(TORCH, gpus=None, cuda=None, why_no_gpus="old driver")),
    ]  # fmt: skip
    for host, torch in cases:
        yield "gpus", gpus.judge_gpus(host, torch)
    for nvidia in (
        DRIVER, replace(DRIVER, nouveau=True), replace(DRIVER, nvml=None, why_no_nvml="no such file"),
        replace(DRIVER, seen=[SEEN, replace(SEEN, fault="ERR!")]), replace(DRIVER, gpus=DRIVER.gpus[:1]),
    ):  # fmt: skip
        yield "driver", driver.judge_driver(nvidia, 2)
    for code, stdout in (
        (0, '{"wrong": [0, 0]}'),
        (0, '{"wrong": [0, 3]}'),
        (0, '{"wrong": [0]}'),
        (0, "x"),
        (1, ""),
        (None, ""),
    ):
        yield (
            "product",
            driver.judge_product(CommandOutput(code, stdout, ""), replace(DRIVER, remarks=["infoROM is corrupted"])),
        )


def describe_outcome(outcome):
    return "none" if outcome is None else f"{outcome.passed}: {outcome.says} | {outcome.advice}"


def sentences_of_portals():
    """Each answer is given by httpx's own transport in place of the network."""
    asked = portal.Portal("https://portal.example", Token("secret", "~/token"), lambda _: None)
    for status in (302, 400, 401, 403, 404, 422, 429, 500, 503):
        for request in ("the state of the experiment", portal.CREATION_REQUEST):
            try:
                asked._raise_refusal(portal.PortalAnswer(status, b'{"error": "no secret."}', None, None), request)
            except ShardlabError as error:
                yield f"HTTP {status}", f"{type(error).__name__}: {error}"
    reasons = {"no route": httpx.ConnectError, "SSL: bad": httpx.ConnectError, "x": httpx.ConnectTimeout}
    for text, kind in [*reasons.items(), ("x", httpx.ReadTimeout), ("reset", httpx.ReadError)]:

        def fail(*_, kind=kind, text=text, **__):
            raise kind(text)

        asked._client = httpx.Client(transport=httpx.MockTransport(fail))
        try:
            asked._send_once("GET", "/x", "the state", None)
        except ShardlabError as refused:
            yield kind.__name__, f"{type(refused).__name__}: {refused}"


PART = ModelPart(
    elements=1000, blocks=4, block_elements=800, buffer_bytes=64, powersgd_bytes=(100, 200), fetched=(1500, 40),
    matrix_elements=900, hidden_elements=64, recomputed_blocks=4, reductions=(2, 2), has_split_embedding=True,
    split_logit_rows=8, partial_elements=16, messages=2, tied=((50, 2),),
)  # fmt: skip
CELLS = {
    "fp32": {}, "fp16-autocast": {"precision": "fp16-autocast"}, "two passes": {"passes": 2}, "tp": {"tp": 2}, "pp": {"pp": 2},
    "tp and pp": {"tp": 2, "pp": 2},
}  # fmt: skip


def sentences_of_theory():
    for name in sorted(menu.load_strategies()):
        for title, keys in CELLS.items():
            if not {*keys} & {"tp", "pp"} <= {*name.split("-")}:
                continue
            described = cell("gpt2-tiny", name, 8, nnodes=2, **keys)
            yield from sentences_of_terms(f"{name}, {title}", described)
    quantized = {"quantized_weights": True, "quantized_gradients": True, "hpz_partition_size": 4}
    yield from sentences_of_terms("zero3, quantized", cell("gpt2-tiny", "zero3", 8, nnodes=2, passes=2, options=quantized))
    for strategy in ("zero1", "zero2", "zero3"):
        described = cell("gpt2-tiny", strategy, 8, passes=2, options={"overlap_comm": True})
        yield from sentences_of_terms(f"{strategy}, sizes not known", described, msgspec.structs.replace(PART, fetched=None))


def sentences_of_terms(title, described, part=PART):
    for term in menu.find_strategy(described.strategy).theory_of_communication(described, part) or ():
        numbers = f"{term.payload_bytes:g} B, {term.ranks} ranks of {term.axis}, {term.times:g} times, {term.calls:g} calls"
        yield title, f"{term.description}: {term.op}, {numbers}, hidden in {term.hides_in}"


def sentences_of_lacks():
    """More files than are named lack the same."""
    lack = Lack(kind="gpu_launches", count=3, total=10, text="3 of 10 launches have no event.")
    figures = [types.SimpleNamespace(path=f"{number}.json", lacks=[lack]) for number in range(trace_command._MOST_FILES + 2)]
    names = {one.path: f"rank {one.path}" for one in figures}
    answers = types.SimpleNamespace(missing_ranks="rank 7 was not profiled.")
    yield from (("lacks", sentence) for sentence in trace_command.describe_lacks(figures, names, answers))


def test_each_case_has_its_golden_sentence(tmp_path):
    lines = [f"waiting: {name}: {text}" for name, text in sentences_of_waiting()]
    lines += [f"file: {name}: {text}" for name, text in sentences_of_files(tmp_path)]
    lines += [f"login: {name}: {text}" for name, text in sentences_of_logins()]
    lines += [f"{name}: {describe_outcome(outcome)}" for name, outcome in sentences_of_gpus()]
    lines += [f"portal: {name}: {text}" for name, text in sentences_of_portals()]
    lines += [f"trace: {name}: {text}" for name, text in sentences_of_lacks()]
    lines += [f"theory: {name}: {text}" for name, text in sentences_of_theory()]
    same_as_golden("sentences_by_case.txt", "\n".join(lines) + "\n")
