"""The parsers of facts and the judgement of checks, tested on recorded output of real and broken machines."""

import functools
import os
import re
import signal
import time
import tomllib
from pathlib import Path

import msgspec
import pytest

from provision import order
from provision.checks import _trial, all_reduce, gpus
from provision.checks import torch as torch_check
from provision.fact import FactAnswers, Unanswered
from provision.facts.addresses import parse as parse_addresses
from provision.facts.host import HOST
from provision.facts.host import parse as parse_host
from provision.facts.torch import TORCH, Torch
from provision.facts.torch import parse as parse_torch
from provision.operation import Site, Target
from provision.operations.inventory import render_inventory
from shardlab import extras
from shardlab.cluster.cluster import THIS_MACHINE
from shardlab.remote.remote import CommandOutput
from shardlab.workspace.workspace import Workspace

ROOT = Path(__file__).parents[3]
A100S = """\
Loading modules of the site ...
{"schema":1,"host":"d8545-10s10501","boot_id":"0b7e3c1a-5d1e-4a0f-9d1c-6a7a1c6b2f10","kernel":"5.15.0-168-generic",\
"system":"Ubuntu 22.04.5 LTS","cpu_model":"AMD EPYC 7413 24-Core Processor","cpus":96,"cpus_allowed":96,\
"memory_bytes":540772147200,"gpu_driver":"570.195.03","gpus":[\
{"uuid":"GPU-1","name":"NVIDIA A100-SXM4-40GB","memory_bytes":42949672960,"power_limit_w":400.0,"pci":"00000000:01:00.0"},\
{"uuid":"GPU-2","name":"NVIDIA A100-SXM4-40GB","memory_bytes":42949672960,"power_limit_w":400.0,"pci":"00000000:41:00.0"},\
{"uuid":"GPU-3","name":"NVIDIA A100-SXM4-40GB","memory_bytes":42949672960,"power_limit_w":400.0,"pci":"00000000:81:00.0"},\
{"uuid":"GPU-4","name":"NVIDIA A100-SXM4-40GB","memory_bytes":42949672960,"pci":"00000000:C1:00.0"}],\
"nics":[{"name":"docker0","kind":"virtual","mac":"02:42:1f:00:00:01"},\
{"name":"eno1","kind":"physical","mac":"04:3f:72:00:00:01","pci":"0000:c5:00.0","speed_mbps":25000},\
{"name":"ens5f0","kind":"physical","mac":"04:3f:72:00:00:02","pci":"0000:a1:00.0","speed_mbps":100000},\
{"name":"lo","kind":"loopback"},{"name":"veth1","kind":"virtual","mac":"02:42:1f:00:00:09"}],\
"python":"3.11.13","packages":{"shardlab":"0.1.0","torch":"2.13.0+cu126"}}
"""
NO_GPU = """\
{"schema":1,"host":"vm","boot_id":"32d28cf4-dbec-4c06-b76c-93b4e5799d3a","kernel":"6.18.44","system":"Debian GNU/Linux 12",\
"cpu_model":"AMD EPYC","cpus":2,"cpus_allowed":2,"memory_bytes":25276502016,\
"gpu_why_absent":"NVML: NVML Shared Library Not Found","nics":[{"name":"lo","kind":"loopback"}],"python":"3.11.7",\
"packages":{"torch":"2.13.0+cpu"}}
"""
ADDRESSES = '{"lo": ["127.0.0.1"], "ens5f0": ["10.10.1.1"], "eno1": ["128.105.145.10"], "veth1": []}\n'
TORCH_CUDA = '{"hidden_by": null, "version": "2.13.0+cu126", "cuda": "12.6", "backends": ["gloo", "nccl"], "gpus": 4}\n'
TORCH_CPU = """\
A module that was compiled using NumPy 1.x cannot be run in NumPy 2
{"hidden_by": null, "version": "2.13.0+cpu", "cuda": null, "backends": ["gloo"], "why_no_gpus": "Torch not compiled with CUDA"}
"""
TORCH_ABSENT = '{"why_absent": "ModuleNotFoundError: No module named \'torch\'"}\n'
CPU = parse_host(NO_GPU)
GPU = parse_host(A100S)


class Recorded:
    """A node that answers from a recording. `answers` maps a part of a command to the answer."""

    name, host, port, user, identity, python = "gpu0", "10.10.1.1", 22, "alice", None, "/opt/venv/bin/python"
    address = host

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    def run(self, argv, *, timeout_s, env=None, root=False):
        self.asked.append(argv)
        return next(answer for part, answer in self.answers.items() if part in " ".join(argv))


def target(answers):
    node = Recorded(answers)
    return Target(node, FactAnswers(node))


def test_a_machine_with_gpus_is_read():
    assert (len(GPU.gpus), GPU.gpus[0].memory_bytes, GPU.gpus[3].power_limit_w) == (4, 40 * 2**30, None)
    assert GPU.gpu_driver == "570.195.03"


def test_a_missing_nvml_or_torch_gives_no_number_of_gpus():
    """If NVML or torch is missing, the number of GPUs is None and not 0."""
    assert CPU.gpus is None
    assert parse_torch(TORCH_CPU).gpus is None
    assert parse_torch(TORCH_ABSENT) == Torch(why_absent="ModuleNotFoundError: No module named 'torch'")


def test_addresses_leave_out_loopback_and_silent_interfaces():
    assert parse_addresses(ADDRESSES) == {"eno1": ["128.105.145.10"], "ens5f0": ["10.10.1.1"]}


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_host, ""),
        (parse_host, "\n \n"),
        (parse_host, A100S[: len(A100S) // 2]),
        (parse_host, '{"schema":1,"host":"x"}'),
        (parse_host, "[]"),
        (parse_host, NO_GPU + "Segmentation fault"),
        (parse_torch, "{}"),
        (parse_torch, '{"version": "2", "why_absent": "no"}'),
        (parse_torch, '{"version": "2", "gpus": "four"}'),
        (parse_addresses, '{"lo": "127.0.0.1"}'),
    ],
)
def test_a_broken_answer_of_a_fact_is_refused(parse, text):
    with pytest.raises(ValueError, match=r"\.$"):
        parse(text)


def test_a_question_is_asked_once_and_its_failure_says_where():
    asked = target(
        {"shardlab.hardware.host": CommandOutput(1, "", "Traceback ...\nModuleNotFoundError: No module named 'shardlab'\n")}
    )
    for _ in range(2):
        says = r"gpu0: the fact 'host' is not known, as its command failed: ModuleNotFoundError.*'shardlab'"
        with pytest.raises(Unanswered, match=says):
            asked.facts[HOST]
    assert len(asked.node.asked) == 1
    late = target({"_torch": CommandOutput(None, "", "")})
    with pytest.raises(Unanswered, match="not answered within 120 s"):
        late.facts[TORCH]


def test_the_inventory_holds_nothing_that_changes_by_itself(tmp_path):
    """Values that change without a change of the machine are not in the inventory."""

    def of(host):
        asked = target({"shardlab.hardware.host": CommandOutput(0, host, ""), "psutil": CommandOutput(0, ADDRESSES, "")})
        return render_inventory(Site(THIS_MACHINE, Workspace(tmp_path), [asked]))

    later = A100S.replace("0b7e3c1a", "ffffffff").replace('"cpus_allowed":96', '"cpus_allowed":4').replace("veth1", "veth2")
    assert of(A100S) == of(later)
    assert of(A100S) != of(A100S.replace("570.195.03", "580.1"))
    (node,) = msgspec.json.decode(of(A100S))["nodes"]
    assert (node["name"], node["host"], node["port"], node["user"]) == ("gpu0", "10.10.1.1", 22, "alice")
    assert node["addresses"]["ens5f0"] == ["10.10.1.1"]
    assert [nic["name"] for nic in node["facts"]["nics"]] == ["eno1", "ens5f0"]
    assert len(node["facts"]["gpus"]) == 4


@pytest.mark.parametrize(
    ("host", "torch", "passed", "says"),
    [
        (GPU, parse_torch(TORCH_CUDA), True, "both see 4 x NVIDIA A100"),
        (CPU, parse_torch(TORCH_CPU), None, "NVML Shared Library Not Found"),
        (GPU, parse_torch(TORCH_CPU), False, "NVML sees 4 GPUs, torch none .*built without CUDA"),
        (GPU, Torch(version="2", cuda="12.6", gpus=2, hidden_by="0,1"), False, "torch 2.*CUDA_VISIBLE_DEVICES=0,1 hides"),
        (GPU, Torch(version="2", cuda="13.0", why_no_gpus="driver too old"), False, "too old.*570.195.03 support CUDA 13.0"),
        (CPU, Torch(version="2", cuda="12.6", gpus=1), False, "torch sees 1 GPUs, NVML none"),
        (GPU, parse_torch(TORCH_ABSENT), None, "needs torch"),
    ],
)
def test_the_check_gpus_compares_nvml_with_torch(host, torch, passed, says):
    """The check `gpus` compares the GPUs that NVML sees with the GPUs that torch sees."""
    outcome = gpus.judge_gpus(host, torch)
    assert outcome.passed is passed
    assert re.search(says, f"{outcome.says} {outcome.advice}")


def test_a_missing_torch_names_the_command_that_installs_it():
    outcome = torch_check.judge_torch(parse_torch(TORCH_ABSENT), is_this_machine=True)
    assert outcome.passed is False
    assert "No module named 'torch'" in outcome.says
    assert outcome.advice == f"install an official build: {extras.make_install_command('trainers')}"
    elsewhere = torch_check.judge_torch(parse_torch(TORCH_ABSENT))
    assert "pip" not in elsewhere.advice  # a path of this machine says nothing about another node


@pytest.mark.parametrize(
    ("version", "passed", "says"),
    [
        ("2.10.1+cu128", False, "torch 2.10.1+cu128 is too old: shardlab was tried with torch 2.11 to 2.14"),
        ("2.11.0a0+50eac811a6.nv25.10", True, "torch 2.11.0a0+50eac811a6.nv25.10 can be imported; backends: gloo"),
        ("2.14.1+cpu", True, "torch 2.14.1+cpu can be imported; backends: gloo"),
        ("2.15.0", True, "torch 2.15.0 can be imported; backends: gloo; shardlab was tried with torch 2.11 to 2.14 only"),
        ("built here", True, "torch built here can be imported; backends: gloo"),
    ],
)
def test_an_untested_torch_is_named_and_a_too_old_torch_fails(version, passed, says):
    outcome = torch_check.judge_torch(Torch(version=version, backends=["gloo"]))
    assert (outcome.passed, outcome.says) == (passed, says)


def test_the_check_of_torch_the_requirements_and_the_pages_agree_on_the_range():
    """The newest tried release is the last that pyproject.toml allows. README and docs/gpus.md state the same range."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = [line for line in project["optional-dependencies"]["trainers"] if line.startswith("torch>")]
    (oldest, (major, minor)) = (torch_check.OLDEST_TRIED, torch_check.NEWEST_TRIED)
    assert needed == f"torch>={oldest[0]}.{oldest[1]},<{major}.{minor + 1}"
    for page in ("README.md", "docs/gpus.md", "docs/sites.md"):
        assert f"torch {torch_check.TRIED_RELEASES}" in " ".join((ROOT / page).read_text().split()), page


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert all_reduce.compute_bus_bandwidth(2, 16 * 2**20, 0.01) == pytest.approx(16 * 2**20 / 0.01)
    assert all_reduce.compute_bus_bandwidth(8, 10**9, 0.01) == pytest.approx(175e9)


REPORT = '{"backend":"gloo","ranks":2,"bytes":16777216,"wrong":%d,"iterations":5,"time_s":0.0125}\n'
CHILD_FAILED = """\
[rank1]: Traceback (most recent call last):
[rank1]: RuntimeError: Unable to find address for: lo
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
"""


@pytest.mark.parametrize(
    ("answer", "passed", "says"),
    [
        (
            CommandOutput(0, "[Gloo] Rank 0 is connected\n" + REPORT % 0, ""),
            True,
            "16 MiB (gloo) is exact; bus bandwidth 1.34 GB/s",
        ),
        (CommandOutput(0, REPORT % 3, ""), False, "gave 3 wrong sums"),
        (CommandOutput(0, "", ""), False, "it printed nothing"),
        (CommandOutput(1, "", CHILD_FAILED), False, "RuntimeError: Unable to find address for: lo"),
        (CommandOutput(-9, "", ""), False, "exit status -9"),
        (CommandOutput(None, "", ""), False, "did not end within 195 s"),
    ],
)
def test_the_all_reduce_is_judged(answer, passed, says):
    outcome = all_reduce.judge_all_reduce(answer, cores=2)
    assert outcome.passed is passed
    assert says in outcome.says
    assert bool(outcome.advice) is not passed
    if passed:
        assert outcome.measured["bus_bandwidth_gb_per_s"] == pytest.approx(1.342, abs=1e-3)


def test_one_start_of_torch_answers_all_its_checks():
    summed = msgspec.json.encode(CommandOutput(0, REPORT % 0, "")).decode()
    said = f'{{"torch": {TORCH_CPU.splitlines()[1]}, "all_reduce": {summed}}}\n'
    asked = target({"shardlab.hardware.host": CommandOutput(0, NO_GPU, ""), "_trial": CommandOutput(0, said, "")})
    outcomes = [check.run(None, asked).passed for check in order.TORCH_CHECKS]
    assert outcomes == [True, None, True, None]
    assert [words[-1] for words in asked.node.asked].count("provision.checks._trial") == 1
    assert asked.facts[TORCH].version == "2.13.0+cpu"


def test_a_child_that_fails_or_hangs_leaves_the_others_and_says_why():
    def fail():
        raise RuntimeError("it breaks")

    def crash():
        os.kill(os.getpid(), signal.SIGKILL)

    assert _trial.run_in_children([lambda: os.write(1, b"one\n"), lambda: os.write(1, b"two\n")], 30) == CommandOutput(
        0, "one\n", ""
    )
    hangs = functools.partial(time.sleep, 600)
    failed = _trial.run_in_children([hangs, fail], 30)
    assert (failed.code, "RuntimeError: it breaks" in failed.stderr) == (1, True)
    assert _trial.run_in_children([crash], 30).code == -signal.SIGKILL
    assert _trial.run_in_children([hangs], 0.05).code is None
