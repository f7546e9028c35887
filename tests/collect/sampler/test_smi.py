"""On a machine without NVML the sampler reads GPUs by nvidia-smi. A stand-in for nvidia-smi prints normal and hostile lines."""

import os
import stat

import pytest
from support_e2e import until
from support_sampler import ended, records, sampled, start

from collect.sampler.gpu import GpuSource
from collect.sampler.nvidia_smi import SmiSource
from shardlab.runs.record import Sample

GOOD = "GPU-a, 97, 1024, 301.55, 61, 1980, 2619, 3, 0, 0x0000000000000044"
PARTS = "GPU-b, [N/A], 2048, [Not Supported], 40, 210, 405, [N/A], [N/A], [Unknown Error]"
LOST = "GPU-c, [GPU is lost]" + ", [GPU is lost]" * 8


def stand_in(folder, lines, then="exec sleep 60"):
    """Write a stand-in for nvidia-smi that prints these lines once. Returns a value of PATH that finds the stand-in.

    then: the shell command that the stand-in runs after it printed the lines.
    """
    (folder / "lines").write_bytes(lines.encode(errors="surrogateescape"))
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" >{folder}/arguments\necho $$ >{folder}/pid\ncat {folder}/lines\n{then}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def filled(source, wanted):
    """Let a source fill new samples until the function `wanted` returns true for a sample. Returns this sample."""
    found = []

    def look():
        sample = Sample(schema=1, t_s=0, wall_s=0, host="h", boot_id="b")
        source.fill(sample)
        found.append(sample)
        return wanted(sample)

    until(look, "nvidia-smi writes")
    return found[-1]


@pytest.fixture
def said(tmp_path, monkeypatch):
    """A function that makes a source of the sampler, whose nvidia-smi is a stand-in that prints the given lines."""
    sources = []

    def source(lines, then="exec sleep 60"):
        monkeypatch.setenv("PATH", stand_in(tmp_path, lines, then))
        sources.append(SmiSource(2))
        return sources[-1]

    yield source
    for one in sources:
        one.close()


def test_the_sampler_asks_nvidia_smi_where_nvml_is_absent(tmp_path):
    if GpuSource().why_absent is None:
        pytest.skip("this machine has a GPU")
    out = tmp_path / "node.jsonl"
    process = start(out, "--hz", "20", "--json", PATH=stand_in(tmp_path, f"{GOOD}\n"))
    until(lambda: out.exists() and any(sample.gpus for sample in records(out)), "nvidia-smi's values are recorded")
    sampled(process, out, 2)
    ended(process)
    seen = [sample.gpus for sample in records(out) if sample.gpus]
    assert len(seen) == 1  # nvidia-smi printed one line, so one sample has values
    ((gpu,),) = seen
    assert (gpu.uuid, gpu.utilization_pct, gpu.memory_used_bytes, gpu.power_w) == ("GPU-a", 97, 2**30, 301.55)
    assert (gpu.temperature_c, gpu.sm_clock_mhz, gpu.memory_clock_mhz) == (61, 1980, 2619)
    assert (gpu.ecc_corrected, gpu.ecc_uncorrected) == (3, 0)
    assert gpu.throttled == ["power cap", "hardware thermal slowdown"]
    assert "--loop-ms=50" in (tmp_path / "arguments").read_text()
    number = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):  # the sampler ended its nvidia-smi
        os.kill(number, 0)


def test_a_value_that_nvidia_smi_does_not_have_is_no_number(said):
    sample = filled(said(f"{GOOD}\n{PARTS}\n"), lambda sample: sample.gpus)
    gpu = sample.gpus[1]
    assert (gpu.uuid, gpu.memory_used_bytes, gpu.temperature_c) == ("GPU-b", 2**31, 40)
    assert (gpu.utilization_pct, gpu.power_w, gpu.ecc_uncorrected, gpu.throttled) == (None, None, None, None)


def test_a_lost_gpu_is_recorded_and_reported(said):
    source = said(f"{GOOD}\n{LOST}\n")
    sample = filled(source, lambda sample: sample.gpus)
    assert [(gpu.uuid, gpu.lost) for gpu in sample.gpus] == [("GPU-a", False), ("GPU-c", True)]
    assert source.remarks == ["GPU-c was lost"]


@pytest.mark.parametrize(
    "hostile",
    [
        "GPU-x, 1, 2\n",
        "../../etc/passwd" + ", 1" * 9 + "\n",
        "GPU-\x1b[31m" + ", 1" * 9 + "\n",
        '"GPU-x' + ", 1" * 9 + "\n",
        "\x00\xff\udcfe\n".encode(errors="surrogateescape").decode(errors="surrogateescape") + "\n",
        "No devices were found\n",
        "GPU-" + "y" * 5000 + ", 1" * 9 + "\n",
        "z" * 200_000 + "\n",
    ],
    ids=["short", "path", "escape", "quote", "bytes", "words", "long name", "long line"],
)
def test_a_hostile_line_is_counted_and_the_next_line_is_read(said, hostile):
    source = said(f"{hostile}{GOOD}\n")
    sample = filled(source, lambda sample: sample.gpus)
    assert [gpu.uuid for gpu in sample.gpus] == ["GPU-a"]
    assert source.failures["line of nvidia-smi"] >= 1


@pytest.mark.parametrize("word", ["nan", "inf", "-5", "1e400", "9" * 400, "0x10", "1_0 0", ""])
def test_an_impossible_number_of_nvidia_smi_is_left_out(said, word):
    sample = filled(said(f"GPU-a, {word}, {word}, {word}, 61, 1, 1, {word}, {word}, zz\n"), lambda sample: sample.gpus)
    (gpu,) = sample.gpus
    assert (gpu.utilization_pct, gpu.memory_used_bytes, gpu.power_w, gpu.ecc_corrected, gpu.throttled) == (None,) * 5
    assert gpu.temperature_c == 61


def test_an_early_end_of_nvidia_smi_is_reported(said):
    source = said(f"{GOOD}\n", then="exit 9")
    assert filled(source, lambda sample: sample.gpus).gpus[0].uuid == "GPU-a"
    filled(source, lambda _: source.remarks)
    assert source.remarks == ["nvidia-smi ended with code 9"]


def test_a_missing_nvidia_smi_is_given_as_the_reason_for_no_gpu_samples(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SmiSource(2).why_absent == "nvidia-smi is not installed"
