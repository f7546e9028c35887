"""Sentences with sizes, numbers and units, each from its own function with known numbers.

Golden file: golden/sentences.txt. A line has the file of the function and the sentence.
"""

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import support_planner
from support_golden import same_as_golden

from collect.archiving import command as archive_command
from collect.explain import command as explain_command
from collect.explain.explanation import TimedWindow
from collect.explain.read_file import EventPlace
from collect.fetching import progress
from collect.findings.instrument_cost import InstrumentCost
from collect.loading.telemetry import Coverage
from collect.report import choice_text, report_start, summary_tables, terminal, verdict_text
from collect.timeline import command as timeline_command
from collect.verdicts import part_text, printed_number
from jobs.planner import planner_table
from jobs.planning import cell_differences, gpu_hours
from jobs.planning.gpu_hours import GpuHours
from jobs.scheduler import SchedulerFull
from jobs.slurm.share import AccountShare, parse_shares
from provision import clock
from provision.checks import all_reduce, compiled, judged_proof, network
from provision.checks.all_reduce import AllReduceReport
from provision.cloudlab.waiting import WaitingLinePrinter
from provision.command import display, init
from provision.fact import Unanswered
from provision.facts import wheels
from provision.facts.quotas import Quota
from provision.facts.room import FreeSpace
from provision.facts.shared_folders import SharedFolder
from provision.operation import RunCommand, Write
from provision.operations import space
from shardlab.cloudlab import cloudlab_manifest
from shardlab.cluster.lease import Lease
from shardlab.errors import ShardlabError
from shardlab.files import document, files, image_files, plugin_source
from shardlab.hardware.host import Host
from shardlab.hardware.nvml import Gpu
from shardlab.matrix import cell_sizes
from shardlab.remote.remote import CommandOutput
from shardlab.runs import lease_cutoff
from shardlab.runs.state import JudgedState
from shardlab.terminal import moments, notation
from shardlab.terminal.console import Output
from shardlab.workspace import archive

MIB, GIB = 2**20, 2**30
NOW = datetime(2031, 5, 2, 18, 0, tzinfo=UTC)
HOST = Host(
    schema=1, host="gpu1", boot_id="b", kernel="6.1", system="Debian 12", cpu_model="EPYC", cpus=64, cpus_allowed=32,
    memory_bytes=251 * GIB, gpu_driver="550.54", gpus=[Gpu(uuid="GPU-0", name="NVIDIA A100", memory_bytes=80 * GIB)] * 2,
    nics=[], python="3.12.3", packages={"torch": "2.9.0"},
)  # fmt: skip


def refusal(function, *arguments, **keys):
    """The text of the error that a function raises, without the folder of the test."""
    with pytest.raises((ShardlabError, Unanswered, OSError, ValueError)) as caught:
        function(*arguments, **keys)
    return str(caught.value)


def lease(**hours):
    return Lease(expires=NOW + timedelta(**hours), read=NOW - timedelta(minutes=90), source="portal")


def sentences_of_shardlab(folder):
    for seconds in (0.4, 59, 61, 3599, 3661, 86399, 90061, 864000):
        yield "shardlab/terminal/moments.py", moments.format_duration(seconds)
    yield "shardlab/terminal/moments.py", moments.format_time(NOW, UTC)
    for hours in (30, 2, -3):
        yield "shardlab/cluster/lease.py", lease(hours=hours).describe(NOW).partition(" (read")[2]
    ahead = msgspec.structs.replace(lease(hours=5), read=NOW + timedelta(hours=2))
    yield "shardlab/cluster/lease.py", ahead.describe(NOW).partition("so a clock")[2]
    yield (
        "shardlab/runs/lease_cutoff.py",
        lease_cutoff.judge_by_records(JudgedState("running", ""), lease(hours=-3), NOW - timedelta(hours=5), NOW).why.partition(
            ", and"
        )[2][:25],
    )
    yield "shardlab/files/files.py", refusal(files.read, write(folder / "long", 1235), 1234)
    yield "shardlab/files/document.py", refusal(document.load_document, write(folder / "long.yaml", document.MAX_BYTES + 1))
    yield (
        "shardlab/files/plugin_source.py",
        refusal(plugin_source.read_plugin_file, write(folder / "long.py", plugin_source.MOST_BYTES + 1)),
    )
    yield (
        "shardlab/workspace/archive.py",
        refusal(archive._check_free_space, folder / "a.zip", folder, 2**60).partition(", and ")[0],
    )
    yield (
        "shardlab/cloudlab/cloudlab_manifest.py",
        refusal(cloudlab_manifest._parse_root, "m.xml", b" " * (cloudlab_manifest.MOST_BYTES + 1)),
    )


def write(path, size):
    with path.open("wb") as new:
        new.truncate(size)
    return path


def report(**changes):
    fields = {"backend": "gloo", "ranks": 4, "bytes": 8 * MIB, "wrong": 0, "iterations": 10, "time_s": 0.004}
    return AllReduceReport(**(fields | changes))


def answer(code=0, stdout="", stderr=""):
    return CommandOutput(code, stdout, stderr)


def of_report(**changes):
    return answer(stdout=msgspec.json.encode(report(**changes)).decode())


def sentences_of_checks():
    for changes in ({}, {"wrong": 3}, {"backend": "nccl", "bytes": 512 * MIB, "time_s": 0.5}):
        yield "provision/checks/all_reduce.py", all_reduce.judge_all_reduce(of_report(**changes), cores=8).says
    slow = all_reduce.judge_all_reduce(answer(None), cores=8)
    yield "provision/checks/all_reduce.py", f"{slow.says} | {slow.advice}"
    yield "provision/checks/all_reduce.py", all_reduce.explain_failure(answer(None), 90.0)
    yield "provision/checks/judged_proof.py", judged_proof._describe_all_reduce(of_report(clock_spread_s=0.25), [])[0]
    for changes in ({"clock_spread_s": 3.25}, {"clock_spread_s": 0.5, "wrong": 7}):
        yield "provision/checks/judged_proof.py", judged_proof._check_all_reduce(of_report(**changes)).says
    yield "provision/checks/compiled.py", compiled.judge_compiled(answer(stdout='{"difference": 0.00325}')).says
    yield "provision/checks/compiled.py", compiled.judge_compiled(answer(None)).says
    sent = [{"eth0": 130 * 10**6, "eth1": 2 * 10**6}, {"eth0": 128 * 10**6, "eth1": 60 * 10**6}]
    for counts, controls in (
        (sent, ()), ([{"eth0": 2 * 10**8}] * 2, ()), ([{"eth0": 10**6}] * 2, ()), (sent, [("gpu1", "eth1"), ("gpu2", "eth1")]),
    ):  # fmt: skip
        outcome = network.judge_network([of_report()], ["eth0", "eth0"], counts, "; without gpu3", controls)
        yield "provision/checks/network.py", f"{outcome.passed}: {outcome.says}"
    for offset in (clock.NodeClockOffset(1.25, 0.0125), clock.NodeClockOffset(-0.5, 0.25)):
        yield "provision/clock.py", f"{offset} {offset.agrees} {offset.is_exact_enough}"


def sentences_of_provision(folder):
    yield "provision/command/display.py", display._describe_gpus(HOST)
    yield (
        "provision/command/display.py",
        display._describe_gpus(msgspec.structs.replace(HOST, gpus=None, gpu_why_absent="no NVML")),
    )
    for seconds in (59, 5400, 90061):
        yield "shardlab/matrix/cell_sizes.py", cell_sizes.format_seconds(seconds)
    quota = Quota("/scratch", 120 * GIB, 1000 * GIB, 40_000, 1_000_000)
    yield "provision/command/init.py", init._describe_quota(quota)
    yield "provision/command/init.py", init._describe_quota(msgspec.structs.replace(quota, used_bytes=None, most_files=None))
    yield "provision/command/init.py", init._describe_quota(msgspec.structs.replace(quota, most_bytes=None, used_files=None))
    shared = SharedFolder("SCRATCH", "/scratch/me", "lustre", 12_345 * GIB, 1_000_000)
    yield "provision/command/init.py", init._describe_folder(shared)
    yield "provision/command/init.py", init._describe_folder(SharedFolder("", "/home/me", "nfs", None, None))
    purposes = [("packages", GIB, 1000), ("the Python environment", 12 * GIB, 60_000)]
    yield "provision/operations/space.py", space._check_space("gpu1", FreeSpace(100 * GIB, 0, "/"), purposes)
    for room in (FreeSpace(int(2.5 * GIB), 0, "/"), FreeSpace(100 * GIB, 50_000, "/data")):
        yield "provision/operations/space.py", refusal(space._check_space, "gpu1", room, purposes)
    yield "provision/facts/wheels.py", refusal(wheels.parse, "torch-2.9.0+cu130-x\ntorch-2.9.0+cpu-x\n")
    yield "provision/facts/wheels.py", f"{wheels.parse('torch-2.9.0+cu130-x')} {wheels.parse('torch-2.9.0+cpu-x')}"
    yield "provision/operation.py", Write("a file", "/etc/x", b"12345", 0o600, "me:us").command
    yield "provision/operation.py", repr(RunCommand("a command", ["true"], 90.5))


def sentences_of_waiting(capsys, monkeypatch):
    seconds = iter([0.0, 1.0, 30.0, 65.0, 190.0])
    monkeypatch.setattr("provision.cloudlab.waiting.time.monotonic", lambda: next(seconds))
    lines = WaitingLinePrinter(Output())
    for text in ("two nodes boot", "two nodes boot", "one node boots", "one node boots"):
        lines.show(text)
    yield from (("provision/cloudlab/waiting.py", line) for line in capsys.readouterr().err.splitlines())


def sentences_of_jobs():
    yield "jobs/scheduler.py", str(SchedulerFull("slurm", "QOSMaxSubmitJobPerUserLimit", [None] * 12))
    for hours in (GpuHours(2.5, 0.0, 10.0), GpuHours(0.0, 99.95, 1234.5, 2, 12.25, 3.5), GpuHours(0.125, unknown=1)):
        yield "jobs/planning/gpu_hours.py", gpu_hours.describe_hours(hours)
        yield "jobs/planning/gpu_hours.py", gpu_hours.describe_retries(hours) or "no retries"
    cells = [support_planner.cell("gpt2", "ddp", gpus) for gpus in (8, 2)]
    times = [gpu_hours.RunTime(5400.0, "predictions", 6900), gpu_hours.RunTime(5400.0, "recorded times", 7200)]
    hours = [
        gpu_hours.CellHours(cell, time, cell.gpus, gpu_hours.MostRetries(1)) for cell, time in zip(cells, times, strict=True)
    ]
    yield "jobs/planning/gpu_hours.py", gpu_hours.describe_limits(hours[:1])
    yield "jobs/planning/gpu_hours.py", gpu_hours.describe_limits(hours)
    for bound in (10.25, 1.0):
        yield "jobs/planning/gpu_hours.py", refusal(gpu_hours.must_be_within_gpu_hours, bound, hours)
    unknown = [msgspec.structs.replace(hours[0], run_time=None)]
    yield "jobs/planning/gpu_hours.py", refusal(gpu_hours.must_be_within_gpu_hours, 5.0, unknown)
    for share in parse_shares("me|1|gres/gpu=6000,cpu=90000,gres/gpu:a100=600|gres/gpu=1500,cpu=1", "me"):
        yield "jobs/slurm/share.py", share.describe_remaining_hours()
    yield "jobs/slurm/share.py", AccountShare("me", "billing", 1234567.5, 2e6).describe_remaining_hours()
    for size in (0.0, 3 * MIB, GIB / 10, 12.34 * GIB, 4096 * GIB):
        yield "jobs/planner/planner_table.py", planner_table.format_size(size)
    for seconds in (0.0123, 1.5, 59.9, 75.0, 7200.0):
        yield "jobs/planner/planner_table.py", planner_table.format_duration(seconds)
    for value in (None, True, 0.25, 1e-5, [1, "a"], {"a": 1.5, "b": None}):
        yield "jobs/planning/cell_differences.py", cell_differences._format_value(value)


def sentences_of_collect_numbers():
    for value in (0.0, 1.0, 1234.5678, 0.00012345, 1e-9, 12.345, -5.55, 123456789.0, float("nan")):
        numbers = (notation.format_number(value), notation.format_number(value, 2), notation.format_spread(value))
        yield "shardlab/terminal/notation.py", " ".join((*numbers, notation.format_amount(value)))
    for sizes in ([], [1023.0], [1024.0, 5.0], [2.0**20], [2.0**30, -5.0]):
        yield "shardlab/terminal/notation.py", f"{notation.choose_unit(sizes)}"
    yield "shardlab/terminal/notation.py", notation.format_time(1_938_000_000.0)
    quantities = [
        (1.0, "calls"), (1234.0, "parameters"), (1234.5, "calls"), (58.25, "s"), (999.0, "bytes"), (1e3, "bytes"),
        (2.5e6, "bytes"), (3.25e9, "bytes"), (12.5, "%"), (1.5, ""),
    ]  # fmt: skip
    for value, unit in quantities:
        yield "collect/report/verdict_text.py", verdict_text.format_quantity(value, unit)
        yield "collect/report/choice_text.py", choice_text._format_quantity(value, unit)
        yield ("collect/report/report_start.py", " | ".join(report_start._format_measured(value, (-value, 2 * value), unit)))
        yield "collect/report/summary_tables.py", summary_tables._format_quantity(value, unit)
    yield "collect/report/verdict_text.py", verdict_text.format_interval(57.9, 58.5, "s")
    yield "collect/report/verdict_text.py", verdict_text.format_interval(9e5, 2e6, "bytes")
    yield "collect/report/choice_text.py", choice_text._format_range(512.0, 2048.0, "bytes")
    yield (
        "collect/report/choice_text.py",
        " ".join(choice_text._format_percent(value) for value in (0.123, 1.26, 9.96, 10.4, 1234.5)),
    )
    for pct in (99.0, 99.96, 12.34, 0.0):
        yield "collect/verdicts/part_text.py", part_text.format_share(pct)
    texts = [
        ("about 1.5 GB", None, "bytes"), ("2 MB", None, "bytes"), ("58.2 ms", None, "s"), ("90 min", None, "s"),
        ("3 kWh", None, "J"), ("0.92", None, "%"), ("1.3 B", None, "parameters"), ("12 tok/ms", None, "units/s"),
        ("3 to 4.5", "x", "x"), ("more than 2.5x", None, "x"), ("10 ± 0.5 %", None, "%"), ("1.2e3 us", None, "ms"),
        ("OOM", None, "s"), ("100 KiB", None, "bytes"), ("5 Gb", None, "bytes"), ("2 h", None, "s"),
        ("7 thousand", None, "calls"),
    ]  # fmt: skip
    for text, unit, metric_unit in texts:
        yield (
            "collect/verdicts/printed_number.py",
            f"{text}: {msgspec.to_builtins(printed_number.parse_number(text, unit, metric_unit))}",
        )
    for text, unit, metric_unit in (
        ("12 s", None, "bytes"),
        ("+3", None, "s"),
        ("5 to 3 s", None, "s"),
        ("many", None, "s"),
        ("1 s", "ms", "s"),
    ):
        yield "collect/verdicts/printed_number.py", refusal(printed_number.parse_number, text, unit, metric_unit)


def sentences_of_collect():
    for seconds in (5.4, 75.0, 3600.0, 7384.0):
        yield "collect/fetching/progress.py", progress._format_duration(seconds)
    now_s = [0.0]
    transfer = progress.TransferProgress(lambda text: None, read_clock=lambda: now_s[0])
    arrived = transfer.begin_transfer(300 * MIB)
    for now_s[0], size in ((0.0, 0), (10.0, 40 * MIB), (20.0, 90 * MIB)):
        arrived(size)
        yield "collect/fetching/progress.py", transfer.get_text()
    coverage = Coverage(
        run="r", host="gpu1", samples=20, clock_step_s=-2.25, clock_start_s=0.5, clock_end_s=-1.75, clock_within_s=0.01,
        sampler_ends=2, lost_gpus=["GPU-0"],
    )  # fmt: skip
    yield "collect/loading/telemetry.py", coverage.trouble
    yield "collect/loading/telemetry.py", Coverage(run="r", host="gpu1", samples=20, clock_step_s=3.0, sampler_ends=1).trouble
    for seconds in (None, 0.0123456, 1234.5):
        yield "collect/timeline/command.py", timeline_command._format_ms(seconds)
    cost = InstrumentCost(cell="c", instrument="profile", n=3, cost_s=1.2345, watched_steps=2, step_ratio=1.2345)
    yield "collect/report/terminal.py", terminal.describe_instrument_cost(cost, {"c": "ddp"})
    yield (
        "collect/report/terminal.py",
        terminal.describe_instrument_cost(msgspec.structs.replace(cost, watched_steps=1, step_ratio=None), {"c": "x"}),
    )
    window = TimedWindow(first_s=1_938_000_000.25, last_s=1_938_000_010.5)
    yield "collect/explain/command.py", explain_command._format_window(window)
    event = EventPlace(name="all_reduce", start_ns=1_234_567_890, duration_ns=1000)
    yield "collect/explain/command.py", explain_command._format_event(event)
    yield (
        "collect/archiving/command.py",
        refusal(archive_command.write_archive, None, None, None, 2.0**20 + 1, None, anonymize=False),
    )
    yield "collect/archiving/command.py", refusal(archive_command.write_archive, None, None, None, 0.0, None, anonymize=False)


def sentences_of_data_sets(folder):
    (folder / "data_batch_1.bin").write_bytes(bytes(3074))
    yield "shardlab/files/image_files.py", refusal(image_files.read_cifar10_records, folder / "data_batch_1.bin")
    for content in (b"\0\0\x08\x01\x7f\xff\xff\xff", b"\0\0\x08\x01\0\0\0\x05abc"):
        (folder / "labels").write_bytes(content)
        yield "shardlab/files/image_files.py", refusal(image_files.read_idx, folder / "labels", 1)


def test_sentences_with_numbers_are_the_golden_sentences(tmp_path, capsys, monkeypatch):
    def folder():
        return Path(tempfile.mkdtemp(dir=tmp_path))

    shardlab_folder, provision_folder, trainers_folder = folder(), folder(), folder()
    found = [
        *sentences_of_shardlab(shardlab_folder), *sentences_of_checks(), *sentences_of_provision(provision_folder),
        *sentences_of_waiting(capsys, monkeypatch), *sentences_of_jobs(), *sentences_of_collect_numbers(),
        *sentences_of_collect(), *sentences_of_data_sets(trainers_folder),
    ]  # fmt: skip
    lines = [f"{file}: {sentence}" for file, sentence in found]
    for path in (shardlab_folder, provision_folder, trainers_folder):
        lines = [line.replace(str(path), "FOLDER") for line in lines]
    same_as_golden("sentences.txt", "\n".join(lines) + "\n")
