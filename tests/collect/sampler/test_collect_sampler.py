"""The telemetry sampler runs on this machine, and its parsers read files of /proc as different kernels write them."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support_document_keys import wrong
from support_e2e import HANG_S, until
from support_sampler import start

from collect.sampler import host, loop
from collect.sampler.host import HostSource
from collect.sampler.nic import NicSource
from collect.sampler.source import TelemetrySource
from shardlab.runs.record import Sample, read_records

STAT = b"cpu  100 10 50 800 40 0 0 0 7 0\ncpu0 1 2 3 10 2 1 1 0 0 0\nintr 5\n"
MEMINFO = b"MemTotal:       2000 kB\nMemFree:  1 kB\nMemAvailable:   500 kB\n"
DISKSTATS = b" 8 0 sda 9 0 100 0 9 0 50 0 0 0 0\n 8 1 sda1 9 0 100 0 9 0 50 0 0 0 0\n 7 0 loop0 9 0 8 0 9 0 8 0 0 0 0\n"


def blank():
    return Sample(schema=1, t_s=0, wall_s=0, host="h", boot_id="b")


def test_telemetry_of_this_machine_is_plausible_and_has_the_requested_rate(tmp_path):
    out = tmp_path / "node.jsonl"
    process = start(out, "--hz", "10", "--json")
    until(lambda: process.poll() is not None or (out.exists() and len(read_records(out, Sample).records) >= 15), "15 samples")
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert wrong("collect sample", json.loads(said)) == []
    lines = read_records(out, Sample)
    assert not lines.is_truncated
    assert lines.corrupt == 0
    assert f'"samples": {len(lines.records)}' in said
    times = [sample.t_s for sample in lines.records]
    assert times == sorted(times)
    assert len(times) <= 10 * (times[-1] - times[0]) + 2
    first, last = lines.records[0], lines.records[-1]
    assert first.cpu_pct is None
    measured = [sample for sample in lines.records if sample.cpu_pct is not None]  # not if two samples are too close together
    assert measured
    assert all(0 <= share <= 100 for sample in measured for share in (sample.cpu_pct, *(sample.cores_pct or [])))
    assert 0 < last.memory_used_bytes < last.memory_total_bytes
    assert any(nic.kind == "loopback" for nic in last.nics)
    before = {nic.name: nic.tx_bytes for nic in first.nics}
    for nic in last.nics:  # an interface that is new in the last sample is accepted
        assert nic.tx_bytes >= before.get(nic.name, 0)


def test_the_schedule_does_not_drift_and_skips_what_it_missed(tmp_path, monkeypatch):
    now = [1000.0]
    # How many seconds each sample takes. The sampler has a tick every 0.1 s, so the third sample takes longer than two ticks.
    takes = iter([0.03, 0.09, 0.25, 0.03, 0.04, 0.03])

    class Slow(TelemetrySource):
        def fill(self, sample):
            now[0] += next(takes)

    def wait(_, seconds):
        now[0] += seconds
        return None if now[0] < 1000.65 else signal.SIGTERM

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0))
    monkeypatch.setattr(loop.signal, "sigtimedwait", wait)
    tally = loop.run_sampler(tmp_path / "node.jsonl", 10, None, [Slow()])
    times = [sample.t_s for sample in read_records(tmp_path / "node.jsonl", Sample).records]
    assert times == pytest.approx([1000.0, 1000.1, 1000.2, 1000.5, 1000.6, 1000.7])  # the last at SIGTERM
    assert (tally.samples, tally.missed) == (6, 2)


@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_the_sampler_ends_when_its_parent_ends(tmp_path, reaped):
    parent = subprocess.Popen(["sleep", "60"])
    process = start(tmp_path / "node.jsonl", "--hz", "10", "--parent", str(parent.pid))
    try:
        # After each sample the sampler checks that its parent is alive, so a second sample shows that a check passed.
        until(lambda: len(read_records(tmp_path / "node.jsonl", Sample).records) > 1, "it goes on while its parent lives")
        assert process.poll() is None
        parent.kill()
        if reaped:
            parent.wait()
        process.communicate(timeout=HANG_S)
        assert process.returncode == 0
    finally:
        parent.kill()
        parent.wait()
        process.kill()


def test_the_sampler_ends_at_once_if_its_parent_has_already_ended(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    process = start(tmp_path / "node.jsonl", "--parent", str(gone.pid))
    process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert len(read_records(tmp_path / "node.jsonl", Sample).records) == 1


def test_a_rate_that_would_disturb_is_refused(tmp_path):
    """The sampler refuses more than 50 samples per second."""
    process = start(tmp_path / "node.jsonl", "--hz", "51")
    _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 2
    assert "at most 50" in said
    assert not (tmp_path / "node.jsonl").exists()


def test_the_sampler_does_not_import_large_libraries():
    code = (
        "import sys; import collect.cli, collect.sampler.loop, collect.sampler.gpu, collect.sampler.nic, "
        "collect.sampler.host;import collect.sampler.nvidia_smi; print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"polars", "jinja2", "plotly", "torch", "numpy", "psutil"} & set(loaded)


def test_kernel_files_are_read_as_documented():
    assert host.parse_processor_ticks(STAT) == [(160, 1000), (8, 20)]
    assert host.parse_pressure_s(b"some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\nfull avg10=0.00 total=7\n") == 1.5
    assert host.parse_memory(MEMINFO) == (1500 * 1024, 2000 * 1024)
    assert host.parse_disk_bytes(DISKSTATS, frozenset([b"sda"])) == (100 * 512, 50 * 512)
    assert host.parse_disk_bytes(DISKSTATS, frozenset()) == (None, None)


def test_processors_are_busy_since_the_sample_before(tmp_path):
    for name, content in (("stat", STAT), ("meminfo", MEMINFO), ("diskstats", DISKSTATS)):
        (tmp_path / name).write_bytes(content)
    source = HostSource(tmp_path, tmp_path / "no")
    first, second, third = blank(), blank(), blank()
    source.fill(first)
    (tmp_path / "stat").write_bytes(b"cpu  130 10 50 870 40 0 0 0 7 0\ncpu0 2 2 3 13 2 1 1 0 0 0\n")
    source.fill(second)
    assert (first.cpu_pct, second.cpu_pct) == (None, 30.0)
    assert (first.cores_pct, second.cores_pct) == (None, [25.0])
    assert second.disk_read_bytes is None
    (tmp_path / "stat").write_bytes(b"cpu  130 10 50 880 40 0 0 0 7 0\ncpu0 2 2 3 13 2 1 1 0 0 0\ncpu1 9 9 9 9 9 9 9 9\n")
    source.fill(third)  # a processor was added, so percentages cannot be computed
    assert (third.cpu_pct, third.cores_pct) == (None, None)
    assert source.failures == {}


MOUNTS = b"""device proc mounted on /proc with fstype proc
device 10.0.0.1:/home mounted on /home with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2
\tbytes:\t10 20 30 40 500 600 7 8
device /dev/sda1 mounted on / with fstype ext4
\tbytes:\t1 1 1 1 1 1 1 1
device 10.0.0.1:/home mounted on /mnt with fstype nfs4 statvers=1.1
\tbytes:\t10 20 30 40 500 600 7 8
device 10.0.0.2:/data mounted on /data with fstype nfs statvers=1.1
\tbytes:\t0 0 0 0 1000 0 0 0
"""


def test_nfs_bytes_are_read_from_the_kernels_statistics(tmp_path):
    """The bytes of NFS mounts are read from a file, which the test writes in the format of the kernel's nfs_show_stats."""
    assert host.parse_nfs_bytes(MOUNTS) == (1500, 600)
    assert host.parse_nfs_bytes(MOUNTS[:44]) == (None, None)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountstats").write_bytes(MOUNTS)
    sample = blank()
    HostSource(tmp_path, tmp_path / "no").fill(sample)
    assert (sample.nfs_read_bytes, sample.nfs_write_bytes) == (1500, 600)


def test_a_source_that_fails_is_left_out_and_counted(tmp_path):
    (tmp_path / "stat").write_bytes(b"not what a kernel writes\n")
    (tmp_path / "meminfo").write_bytes(MEMINFO)
    source, sample = HostSource(tmp_path, tmp_path / "no"), blank()
    source.fill(sample)
    assert sample.cpu_pct is None
    assert sample.memory_total_bytes == 2000 * 1024
    assert source.failures == {"stat": 1}
    assert source.unsupported["diskstats"] == source.unsupported["pressure/io"] == 1


def test_network_interfaces_may_appear_and_disappear(tmp_path):
    def add(name, tx):
        folder = tmp_path / name / "statistics"
        folder.mkdir(parents=True)
        (tmp_path / name / "type").write_text("1\n")
        for counter in ("rx_bytes", "tx_bytes"):
            (folder / counter).write_text(f"{tx}\n")

    def seen():
        sample = blank()
        source.fill(sample)
        return {nic.name: nic.tx_bytes for nic in sample.nics or ()}

    add("eth0", 5)
    (tmp_path / "bonding_masters").write_text("")
    source = NicSource(tmp_path)
    assert seen() == {"eth0": 5}
    add("eth1", 6)
    assert seen() == {"eth0": 5, "eth1": 6}
    (tmp_path / "eth0").rename(tmp_path.parent / f"{tmp_path.name}-gone")
    assert seen() == {"eth1": 6}
    (tmp_path / "eth1" / "statistics" / "tx_bytes").write_text("broken")
    assert seen() == {}
    assert source.failures == {"eth1": 1}
    (tmp_path / "eth1" / "statistics" / "tx_bytes").write_text("8")
    assert seen() == {"eth1": 8}
    assert NicSource(tmp_path / "none").failures == {}


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_second_sample_opens_no_file():
    """A source keeps its files open, so the second sample opens no files."""
    before = open_files()
    source = NicSource()
    source.fill(blank())
    opened = open_files() - before
    source.fill(blank())
    assert open_files() - before == opened
