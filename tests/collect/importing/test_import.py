"""`collect import`: logs in the layouts of other programs become runs. The logs are written here, with known values."""

import gzip
import json
import pickle
import struct
from datetime import UTC, datetime

import pytest
import support_collect as support
from support_document_keys import wrong

from collect.cli import main
from collect.importing import log_formats, log_rows
from collect.importing.log_values import LogClock, parse_number, parse_zone
from collect.reading import load
from shardlab.workspace.workspace import Workspace

START = datetime(2031, 6, 1, 10, 0, 0, tzinfo=UTC)
START_S = START.timestamp()
UUIDS = [f"GPU-{number:08d}-1111-2222-3333-444444444444" for number in range(2)]
MIB = 2**20

QUERY = """\
timestamp, index, uuid, utilization.gpu [%], memory.used [MiB], memory.total [MiB], power.draw [W], temperature.gpu, \
clocks.current.sm [MHz], clocks_event_reasons.active, ecc.errors.uncorrected.volatile.total
2031/06/01 10:00:00.010, 0, GPU-00000000-1111-2222-3333-444444444444, 90 %, 1000 MiB, 81559 MiB, 300.50 W, 55, 1980 MHz, \
0x0000000000000004, 0
2031/06/01 10:00:00.014, 1, GPU-00000001-1111-2222-3333-444444444444, [N/A], [Not Supported], 81559 MiB, [Unknown Error], N/A, \
ERR!, [N/A], [N/A]
2031/06/01 10:00:01.010, 0, GPU-00000000-1111-2222-3333-444444444444, 80 %, 2 GiB, 81559 MiB, 200 W, 56, 1980 MHz, \
0x0000000000000000, 0
Unable to determine the device handle for GPU 0000:65:00.0: GPU is lost.  Reboot the system to recover this GPU
2031/06/01 10:00:01.014, 1, GPU-00000001-1111-2222-3333-444444444444, [GPU is lost], [GPU is lost], 81559 MiB, 100 W, 1, \
1 MHz, [N/A], [N/A]
"""
DMON = """\
#Date       Time        gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk     fb   bar1
#YYYYMMDD   HH:MM:SS    Idx      W      C      C      %      %      %      %    MHz    MHz     MB     MB
 20310601   10:00:00      0    250     60      -     97     40      0      0   2619   1980  40000     12
 20310601   10:00:00      1      -     61      -      -      -      -      -   2619   1755  30000     12
 20310601   10:00:01      0    260     60      -     98     40      0      0   2619   1980  40000     12
#Date       Time        gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk     fb   bar1
#YYYYMMDD   HH:MM:SS    Idx      W      C      C      %      %      %      %    MHz    MHz     MB     MB
 20310601   10:00:01      1    240     61      -     50      -      -      -   2619   1755  30000     12
"""
PMON = """\
#Time        gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
#HH:MM:SS    Idx           #    C/G      %      %      %      %      %      %    name
 10:00:00       0       4242     C     98     40      -      -      -      -    python3
 10:00:00       0       4243     C      1      0      -      -      -      -    python3 train.py
 10:00:00       1          -     -      -      -      -      -      -      -    -
 10:00:01       0       4242     C     98     40      -      -      -      -    python3
 10:00:01       1        900     G      2      0      -      -      -      -    Xorg
"""
DCGMI = """\
#Entity   GPUTL  FBUSD    POWER      TOTEC      TMPTR   SMCLK
ID                         W         mJ          C
GPU 0     97     40000    250.125    1000000     60     1980
GPU 1     N/A    30000    N/A        N/A         61     1755
GPU 0     98     40000    251.125    1250000     60     1980
GPU 1     50     30000    240.000    N/A         61     1755
"""
EXPORTER = """\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="{0}",device="nvidia0",modelName="NVIDIA H100",Hostname="node-7"}} 97 {2}
DCGM_FI_DEV_GPU_UTIL{{gpu="1",UUID="{1}",device="nvidia1",modelName="NVIDIA H100",Hostname="node-7"}} NaN {2}
DCGM_FI_DEV_POWER_USAGE{{gpu="0",UUID="{0}",device="nvidia0",modelName="NVIDIA H100",Hostname="node-7"}} 250.5 {2}
DCGM_FI_DEV_FB_USED{{gpu="0",UUID="{0}",device="nvidia0",modelName="NVIDIA H100",Hostname="node-7"}} 40000 {2}
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{gpu="0",UUID="{0}",device="nvidia0",Hostname="node-7"}} 5000 {2}
DCGM_FI_DEV_XID_ERRORS{{gpu="1",UUID="{1}",device="nvidia1",modelName="NVIDIA H100",Hostname="node-7"}} 79 {2}
"""
SAR = """\
Linux 5.15.0-91-generic (node-3) \t06/01/2031 \t_x86_64_\t(64 CPU)

10:00:00 AM     CPU     %user     %nice   %system   %iowait    %steal     %idle
10:00:01 AM     all     10.00      0.00      5.00      5.00      0.00     80.00
10:00:01 AM       0     90.00      0.00      5.00      5.00      0.00      0.00
10:00:02 AM     all     50.00      0.00      0.00      0.00      0.00     50.00

10:00:00 AM kbmemfree   kbavail kbmemused  %memused kbbuffers  kbcached
10:00:01 AM      1000      5000      2000     50.00        10        20
10:00:02 AM      1000      5000      3000     50.00        10        20

10:00:00 AM     IFACE   rxpck/s   txpck/s    rxkB/s    txkB/s   rxcmp/s   txcmp/s  rxmcst/s   %ifutil
10:00:01 AM      eth0      1.00      1.00    100.00     50.00      0.00      0.00      0.00      0.00
10:00:02 AM      eth0      1.00      1.00    200.00     10.00      0.00      0.00      0.00      0.00
Average:         eth0      1.00      1.00    150.00     30.00      0.00      0.00      0.00      0.00
"""
SADF = """\
# hostname;interval;timestamp;CPU;%user;%nice;%system;%iowait;%steal;%idle
node-3;1;2031-06-01 10:00:01 UTC;-1;10.00;0.00;5.00;5.00;0.00;80.00
node-3;1;2031-06-01 10:00:02 UTC;-1;50,00;0,00;0,00;0,00;0,00;50,00
# hostname;interval;timestamp;IFACE;rxpck/s;txpck/s;rxkB/s;txkB/s;rxcmp/s;txcmp/s;rxmcst/s;%ifutil
node-3;1;2031-06-01 10:00:01 UTC;eth0;1.00;1.00;100.00;50.00;0.00;0.00;0.00;0.00
node-3;1;2031-06-01 10:00:02 UTC;eth0;1.00;1.00;200.00;10.00;0.00;0.00;0.00;0.00
"""
SADF_JSON = {
    "sysstat": {"hosts": [{
        "nodename": "node-3", "sysname": "Linux", "timezone": "UTC",
        "statistics": [
            {"timestamp": {"date": "2031-06-01", "time": f"10:00:0{second}", "utc": 1, "interval": 1},
             "cpu-load": [{"cpu": "all", "user": 1.0, "iowait": 5.0, "idle": idle}, {"cpu": "0", "idle": 0.0}],
             "memory": {"memfree": 1000, "memused": 2000 + 1000 * (second - 1)},
             "network": {"net-dev": [{"iface": "eth0", "rxkB": 100.0 * second, "txkB": 50.0}]}}
            for second, idle in ((1, 80.0), (2, 50.0))
        ],
    }]}
}  # fmt: skip
ETHTOOL = """\
Sun Jun  1 10:00:0{0} UTC 2031
NIC statistics:
     rx_packets: {0}
     rx_bytes: {0}000
     tx_bytes: 7
     rx_prio3_pause: 1
     rx_prio4_pause: {0}
     tx_bytes_phy: 99
     [0]: rx_ucast_packets: 5
"""
PSUTIL = """\
timestamp,cpu_percent,memory_used,net_bytes_sent,net_bytes_recv,disk_read_bytes
1938074400.5,12.5,1000000,100,200,5
1938074401.5,25.0,2000000,300,400,6
"""
TITAN = """\
[rank0]:[titan] 2031-06-01 09:59:50,000 - root - INFO - Starting job: llama3
[rank0]:[titan] 2031-06-01 10:00:00,500 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.25000  \x1b[38;2;180;60;0mgrad_norm:\
  1.5  \x1b[38;2;54;234;195mmemory:  2.00GiB(2.50%)  \x1b[34mtps: 1,000  \x1b[36mtflops: 1.00  \x1b[35mmfu: 0.10%\x1b[39m
[rank0]:[titan] 2031-06-01 10:00:20,500 - root - INFO - \x1b[31mstep: 11  \x1b[32mloss:  9.50000  \x1b[38;2;180;60;0mgrad_norm:\
  1.5  \x1b[38;2;54;234;195mmemory: 33.50GiB(42.23%)  \x1b[34mtps: 5,120  \x1b[36mtflops: 1.00  \x1b[35mmfu: 23.45%\x1b[39m
[rank0]:[titan] 2031-06-01 10:00:21,000 - root - INFO - \x1b[33mvalidate step: 11  \x1b[32mloss:  9.9  memory: 1GiB  tps: 5
"""
NANOTRON = """\
06/01 10:00:00 [INFO|DP=0|PP=0|TP=0|node-1]: iteration: 1 / 15000 | consumed_tokens: 1.05M | time_per_iteration_ms: 1.52K | \
tokens_per_sec: 690K | tokens_per_sec_per_gpu: 86.2K | global_batch_size: 1.05M | lm_loss: 10.9 | lr: 1e-05 | \
model_tflops_per_gpu: 200 | eta: 1 day, 2:00:00
[default0]:06/01 10:00:02 [INFO|DP=0|PP=0|TP=0|node-1]: iteration: 2 / 15000 | consumed_tokens: 2.1M | time_per_iteration_ms: \
500 | tokens_per_sec: 2.1M | tokens_per_sec_per_gpu: 262K | global_batch_size: 1.05M | lm_loss: 9.75 | lr: 2e-05
"""
MEGATRON = """\
 [2031-06-01 10:00:00] iteration        1/     100 | consumed samples:          256 | elapsed time per iteration (ms): 2000.5 |\
 throughput per GPU (TFLOP/s/GPU): 300.1 | global batch size:   256 | lm loss: 1.050000E+01 | grad norm: 2.0 |
 [2031-06-01 10:00:02] iteration        2/     100 | consumed samples:          512 | elapsed time per iteration (ms): 1500.0 |\
 learning rate: 1.0E-05 | global batch size:   256 | lm loss: 9.0E+00 |
"""


def imported(tmp_path, files, *options, code=0):
    """Import files (name -> content), and return the run as a report loads it."""
    paths = []
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        paths.append(str(path))
    workspace = tmp_path / "w"
    assert main(["import", *paths, *options, "--workspace", str(workspace)]) == code
    if code == 0:
        (cell,) = load.load_matrix(Workspace(workspace), None).cells
        return cell.runs[-1]
    return None


def gpus_of(run):
    """[(seconds since START, GPU, utilization, MiB, watts)] of the samples."""
    rows = run.samples.gpus.select("wall_s", "uuid", "utilization_pct", "memory_used_bytes", "power_w").rows()
    return [(round(at - START_S, 3), uuid, busy, used and used / MIB, watts) for at, uuid, busy, used, watts in rows]


def test_every_form_of_values_of_nvidia_smi_is_read_or_blank(tmp_path):
    run = imported(tmp_path, {"gpu.csv": QUERY})
    assert gpus_of(run) == [
        (0.01, UUIDS[0], 90, 1000, 300.5),
        (0.01, UUIDS[1], None, None, None),
        (1.01, UUIDS[0], 80, 2048, 200),
        (1.01, UUIDS[1], None, None, None),
    ]
    gpus = run.samples.gpus
    assert gpus["memory_total_bytes"].to_list() == [81559 * MIB] * 3 + [None]
    assert gpus["throttled"].to_list() == [["power cap"], None, [], None]
    assert gpus["lost"].to_list() == [False, False, False, True]
    assert gpus["sm_clock_mhz"].to_list() == [1980, None, 1980, None]
    assert run.run.imported[0].unread_lines == 1
    assert (run.cell.gpus, run.verdict.state, run.result.same_work.verdict) == (2, "imported", "not proven")


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ("timestamp, index, power.draw [W], memory.used [MiB]\n2031/06/01 10:00:00.000, 0, 250.00, 1000\n", ()),
        ("2031/06/01 10:00:00.000, 0, 250.00 W, 1000 MiB\n", ("--columns", "timestamp,index,power.draw,memory.used")),
        ("2031/06/01 10:00:00.000, 0, 250.00, 1000\n", ("--columns", "timestamp,index,power.draw,memory.used")),
        ("index, power.draw [W], memory.used [MiB]\n0, 250, 1000\n", ("--start", "2031-06-01T12:00:00+02:00")),
        ("﻿timestamp, index, power.draw [W], memory.used [MiB]\r\n2031/06/01 10:00:00.000, 0, 250.00 W, 1000 MiB\r\n", ()),
        ("timestamp, index, power.draw, memory.used\n2031/06/01 12:00:00, 0, 250 W, 1000\n".encode("utf-16"),
         ("--zone", "Europe/Berlin")),
    ],
)  # fmt: skip
def test_nvidia_smi_is_read_with_and_without_units_and_headings(tmp_path, content, options):
    assert gpus_of(imported(tmp_path, {"a.csv": content}, *options)) == [(0, "gpu0", None, 1000, 250)]


def test_dmon_is_read_and_a_dash_is_blank(tmp_path):
    run = imported(tmp_path, {"dmon.txt": DMON})
    assert gpus_of(run) == [
        (0, "gpu0", 97, 40000, 250), (0, "gpu1", None, 30000, None), (1, "gpu0", 98, 40000, 260), (1, "gpu1", 50, 30000, 240),
    ]  # fmt: skip
    assert run.samples.gpus["memory_clock_mhz"].to_list() == [2619] * 4
    assert run.samples.gpus["sm_clock_mhz"].to_list() == [1980, 1755, 1980, 1755]


def test_pmon_gives_the_number_of_computing_processes(tmp_path):
    run = imported(tmp_path, {"pmon.txt": PMON}, "--start", "2031-06-01T00:00:00Z")
    found = run.samples.gpus.select("wall_s", "uuid", "processes").rows()
    assert [(at - START_S, uuid, count) for at, uuid, count in found] == [
        (0, "gpu0", 2), (0, "gpu1", 0), (1, "gpu0", 1), (1, "gpu1", 0),
    ]  # fmt: skip


def test_dcgmi_has_no_times_so_they_are_asked_for(tmp_path, capsys):
    imported(tmp_path, {"dcgm.txt": DCGMI}, code=2)
    said = capsys.readouterr().err
    assert "no times" in said
    assert "--start TIME" in said
    assert not (tmp_path / "w").exists()
    run = imported(tmp_path, {"dcgm.txt": DCGMI}, "--start", "2031-06-01 10:00:00", "--every", "0.5")
    assert gpus_of(run) == [
        (0, "gpu0", 97, 40000, 250.125), (0, "gpu1", None, 30000, None), (0.5, "gpu0", 98, 40000, 251.125),
        (0.5, "gpu1", 50, 30000, 240),
    ]  # fmt: skip
    assert run.samples.gpus["energy_j"].to_list() == [1000, None, 1250, None]


def test_the_text_of_dcgm_exporter_is_read_with_its_hosts(tmp_path):
    text = "".join(EXPORTER.format(*UUIDS, round(1000 * (START_S + second))) for second in (0, 15))
    run = imported(tmp_path, {"metrics.prom": text})
    assert gpus_of(run) == [
        (0, UUIDS[0], 97, 40000, 250.5), (0, UUIDS[1], None, None, None), (15, UUIDS[0], 97, 40000, 250.5),
        (15, UUIDS[1], None, None, None),
    ]  # fmt: skip
    assert run.samples.gpus["xids"].to_list() == [None, [79], None, [79]]
    assert run.samples.gpus["energy_j"].to_list() == [5, None, 5, None]
    assert run.samples.gpus["host"].unique().to_list() == ["node-7"]


@pytest.mark.parametrize(("name", "content"), [("sar.txt", SAR), ("sadf.csv", SADF), ("sadf.json", json.dumps(SADF_JSON))])
def test_sar_and_sadf_give_processors_and_counters_of_interfaces(tmp_path, name, content):
    run = imported(tmp_path, {name: content}, "--gpus", "8")
    hosts = run.samples.hosts
    assert [(at - START_S, busy) for at, busy in hosts.select("wall_s", "cpu_pct").rows()] == [
        (1, 15),
        (2, 50 - 5 * ("json" in name)),
    ]
    if name != "sadf.csv":
        assert hosts["memory_used_bytes"].to_list() == [2000 * 1024, 3000 * 1024]
    nics = run.samples.nics.select("wall_s", "name", "kind", "rx_bytes").rows()
    assert [(at - START_S, *more) for at, *more in nics] == [(1, "eth0", "physical", 0), (2, "eth0", "physical", 200 * 1024)]
    assert hosts["host"].unique().to_list() == ["node-3"]
    assert run.run.imported[0].unread_lines == 0


def test_snapshots_of_ethtool_are_counters_at_their_times(tmp_path):
    run = imported(tmp_path, {"ethtool-ens5f0.log": ETHTOOL.format(1) + ETHTOOL.format(3)}, "--gpus", "8")
    columns = ("wall_s", "name", "rx_bytes", "tx_bytes", "rx_priority_pauses")
    assert [(at - START_S, *more) for at, *more in run.samples.nics.select(columns).rows()] == [
        (1, "ens5f0", 1000, 7, 2), (3, "ens5f0", 3000, 7, 4),
    ]  # fmt: skip


def test_values_of_psutil_are_read_by_their_names(tmp_path):
    run = imported(tmp_path, {"host.csv": PSUTIL}, "--gpus", "1")
    columns = ("wall_s", "cpu_pct", "memory_used_bytes", "disk_read_bytes")
    assert [(at - START_S, *more) for at, *more in run.samples.hosts.select(columns).rows()] == [
        (0.5, 12.5, 1_000_000, 5), (1.5, 25, 2_000_000, 6),
    ]  # fmt: skip
    assert run.samples.nics.select("rx_bytes", "tx_bytes").rows() == [(200, 100), (400, 300)]


def steps_of(run, *columns):
    return run.steps.select("step", "watched", *columns).rows()


def test_lines_of_torchtitan_are_steps_of_all_gpus(tmp_path):
    run = imported(tmp_path, {"log.txt": TITAN}, "--gpus", "8", "--strategy", "fsdp")
    # 5120 tokens per second and GPU, for 2 s (20 s for 10 steps), on 8 GPUs
    assert steps_of(run, "loss", "step_ms", "units") == [(1, True, 12.25, 0, 1), (11, False, 9.5, 2000, 81920)]
    assert run.steps["reserved_bytes"].to_list() == [2 * 2**30, int(33.5 * 2**30)]
    assert (run.result.unit, run.cell.strategy, run.run.imported[0].format) == ("tokens", "fsdp", "torchtitan")
    assert run.steps["wall_s"].to_list() == [START_S + 0.5, START_S + 20.5]


def test_lines_of_nanotron_are_steps(tmp_path):
    run = imported(tmp_path, {"log.txt": NANOTRON}, "--gpus", "8", "--start", "2031-01-01T00:00:00Z")
    assert steps_of(run, "loss", "step_ms", "units") == [(1, False, 10.9, 1520, 1_050_000), (2, False, 9.75, 500, 1_050_000)]
    assert run.steps["wall_s"].to_list() == [START_S, START_S + 2]


def test_lines_of_megatron_are_steps_without_units(tmp_path):
    run = imported(tmp_path, {"log.txt": MEGATRON}, "--gpus", "8")
    assert steps_of(run, "loss", "step_ms", "units") == [(1, False, 10.5, 2000.5, 1), (2, False, 9, 1500, 1)]
    assert run.result.unit == "steps"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("step,loss,step_time_ms,tokens\n1,3.5,100,500\n2,3.25,50,500\n",
         [(1, False, 3.5, 100, 500), (2, False, 3.25, 50, 500)]),
        ("Step;Train Loss;Step time (s);Samples\n1;3.5;0.1;16\n2;3.25;0.05;16\n",
         [(1, False, 3.5, 100, 16), (2, False, 3.25, 50, 16)]),
        ("iteration,train/loss,iter_time_s,tokens_per_sec\n1,3.5,0.1,5000\n2,nan,0.05,10000\n",
         [(1, False, 3.5, 100, 500), (2, False, None, 50, 500)]),
        ("step,loss\n1,3.5\n2,3.25\nnone,1\n3\n", [(1, True, 3.5, 0, 1), (2, True, 3.25, 0, 1)]),
        ("timestamp,step,loss,step_time\n1938074400,1,3.5,1.0\n1938074401,2,3.25,1.1\n1938074402,3,3.0,0.9\n",
         [(1, False, 3.5, 1000, 1), (2, False, 3.25, 1100, 1), (3, False, 3, 900, 1)]),
        ("timestamp,step,loss,step_time\n1938074400,1,3.5,1000\n1938074401,2,3.25,1000\n", [(1, False, 3.5, 1000, 1),
                                                                                           (2, False, 3.25, 1000, 1)]),
        ("timestamp,step,loss,step_time\n1938074400,1,3.5,7\n1938074401,2,3.25,7\n", [(1, True, 3.5, 0, 1),
                                                                                     (2, False, 3.25, 1000, 1)]),
    ],
)  # fmt: skip
def test_steps_as_csv_are_read_by_the_names_of_columns(tmp_path, content, expected):
    run = imported(tmp_path, {"steps.csv": content}, "--gpus", "2")
    assert steps_of(run, "loss", "step_ms", "units") == [pytest.approx(row) for row in expected]


def test_steps_as_json_lines_and_of_the_trainer_are_read(tmp_path):
    lines = [{"step": 1, "loss": 3.5, "step_ms": 100, "rank": rank, "_timestamp": START_S} for rank in (4, 6)]
    lines += [{"step": 2, "loss": 3.25, "step_ms": 80 + rank, "rank": rank, "_timestamp": START_S + 1} for rank in (4, 6)]
    text = '{"event": "start"}\n' + "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "loss"\n'
    run = imported(tmp_path, {"steps.jsonl": text})
    assert run.steps.select("rank", "step", "step_ms").rows() == [(0, 1, 100), (0, 2, 84), (1, 1, 100), (1, 2, 86)]
    assert (run.cell.gpus, run.world_steps["step_ms"].to_list(), run.world_steps["units"].to_list()) == (2, [100, 86], [1, 1])
    assert run.run.imported[0].unread_lines == 2
    state = {
        "log_history": [
            {"step": 10, "loss": 2.5, "learning_rate": 1e-4},
            {"step": 20, "loss": 2.0},
            {"step": 20, "eval_loss": 2},
        ]
    }
    (tmp_path / "b").mkdir()
    run = imported(tmp_path / "b", {"trainer_state.json": json.dumps(state, indent=2)}, "--gpus", "1")
    assert [row[0] for row in steps_of(run, "loss")] == [10, 20]


def test_event_files_of_tensorboard_are_read_without_its_figures(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto

    def framed(**fields):
        message = Event(**fields).SerializeToString()
        return struct.pack("<QI", len(message), 0) + message + bytes(4)

    tensor = TensorProto(dtype=1, tensor_content=struct.pack("<f", 3.25))
    content = framed(wall_time=START_S, file_version="brain.Event:2")
    content += framed(wall_time=START_S, step=1, summary=Summary(value=[Summary.Value(tag="train/loss", simple_value=3.5)]))
    content += framed(wall_time=START_S + 1, step=2, summary=Summary(value=[Summary.Value(tag="train/loss", tensor=tensor)]))
    content += framed(
        wall_time=START_S + 3, step=4, summary=Summary(value=[Summary.Value(tag="loss", simple_value=float("nan"))])
    )
    run = imported(tmp_path, {"events.out.tfevents.1": content + b"\xff\x00cut"}, "--gpus", "4")
    assert steps_of(run, "loss", "step_ms") == [(1, True, 3.5, 0), (2, False, 3.25, 1000), (4, False, None, 1000)]


def test_files_of_weights_and_biases_are_read(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import HistoryItem, HistoryRecord, HistoryStep, Record

    content = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    for step in range(1, 400):
        values = {"loss": 5 - step / 100, "_timestamp": START_S + step, "tokens_per_second": 2000, "note": "x" * 90}
        items = [HistoryItem(key=key, value_json=json.dumps(value)) for key, value in values.items()]
        message = Record(history=HistoryRecord(item=[*items, HistoryItem(key="grad", value_json="NaN")],
                                               step=HistoryStep(num=step))).SerializeToString()  # fmt: skip
        kind = 1
        while message or kind == 1:
            room = 32768 - len(content) % 32768
            if room < 7:
                content += bytes(room)
                continue
            part, message = message[: room - 7], message[room - 7 :]
            code = (2 if message else 1) if kind == 1 else (3 if message else 4)
            content += struct.pack("<IHB", 0, len(part), code) + part
            kind = 2
    run = imported(tmp_path, {"run-abc.wandb": content}, "--gpus", "4")
    assert steps_of(run, "loss", "units")[:3] == [(1, True, 4.99, 1), (2, False, 4.98, 2000), (3, False, 4.97, 2000)]
    assert run.steps.height == 399
    assert run.run.imported[0].unread_lines == 0


def test_a_snapshot_of_torch_becomes_a_run_that_the_figures_draw(tmp_path):
    blocks = [{"size": 512, "state": "active_allocated", "address": 1, "requested_size": 500, "frames": []}]
    taken = {
        "segments": [{"total_size": 2 * MIB, "address": 1, "blocks": blocks}],
        "device_traces": [[{"action": "alloc", "addr": 1, "size": 512}]],
    }
    run = imported(tmp_path, {"snapshot.pickle": pickle.dumps(taken)}, "--gpus", "1")
    assert (run.snapshot.reserved_bytes, run.snapshot.active_bytes) == (2 * MIB, 512)
    assert json.loads(gzip.decompress(run.folder.snapshot_file(0).read_bytes()))["segments"] == taken["segments"]


def test_an_imported_run_is_beside_ours_and_never_ranked(tmp_path, capsys):
    workspace = support.matrix(tmp_path / "w")
    (name,) = workspace.list_matrix_names()
    for file, content in (("gpu.csv", QUERY), ("log.txt", TITAN)):
        (tmp_path / file).write_text(content)
    files = [str(tmp_path / "gpu.csv"), str(tmp_path / "log.txt")]
    command = [*files, "--into", name, "--strategy", "ddp", "--name", "gpt2-tiny", "--workspace", str(workspace.path)]
    assert main(["import", *command]) == main(["import", *command]) == 0
    capsys.readouterr()
    assert main(["summarize", "--workspace", str(workspace.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = [row for row in document["rows"] if row["cell"]["imported"]]
    assert (row["n"], row["states"], row["same_work"]["verdict"], row["baseline"]) == (2, {"imported": 2}, "not proven", None)
    assert row["same_work"]["why"] == "imported from gpu.csv (nvidia-smi), log.txt (torchtitan)"
    assert row["cell"]["global_batch_size"] is row["cell"]["optimizer"] is None
    assert row["metrics"]["gpu_pct"]["value"] == 80  # of the sample after the first step
    assert row["id"] not in json.dumps(document["choices"])
    assert len(document["rows"]) > 1
    (remark,) = [remark for remark in document["remarks"] if "logs of other programs" in remark]
    assert f"{row['id']}-r2 (imported from gpu.csv (nvidia-smi), log.txt (torchtitan))" in remark
    page = (workspace.path / "report" / "index.html").read_text()
    assert "ddp ×2, imported" in page


def test_the_document_of_an_import_has_the_keys_that_are_described(tmp_path, capsys):
    (tmp_path / "gpu.csv").write_text(QUERY)
    command = ["import", str(tmp_path / "gpu.csv"), "--workspace", str(tmp_path / "w")]
    assert main(command) == 0
    row = capsys.readouterr().out.splitlines()[2]
    assert " ".join(row.split()) == "gpu.csv nvidia-smi 2 2031-06-01 10:00 UTC, 1 s 1"
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert wrong("collect import", document) == []
    assert (document["samples"], document["files"][0]["unread_lines"]) == (2, 1)


def test_times_without_a_zone_and_files_that_do_not_overlap_are_remarks(tmp_path, capsys):
    imported(tmp_path, {"gpu.csv": QUERY, "steps.jsonl": f'{{"step": 1, "loss": 1, "time": {START_S + 7200}}}\n'})
    said = capsys.readouterr().err
    assert "times in gpu.csv name no zone and were read as UTC (--zone)" in said
    assert "gpu.csv and steps.jsonl do not overlap in time" in said


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("some text\nof no program\n", (), "its format is not known"),
        ("", (), "its format is not known"),
        (b"\0\1\2", (), "its format is not known"),
        ("step,loss\nx,y\n", ("--gpus", "1"), "nothing was found in it as steps as CSV; 1 lines could not be read"),
        ("step,loss\n1,2\n", (), "--gpus: the logs do not show"),
        ("step,loss\n1,2\n", ("--gpus", "0"), "--gpus: found 0"),
        ("step,loss\n1,2\n", ("--gpus", "1", "--as", "csv"), "unknown format 'csv'"),
        ("step,loss\n1,2\n", ("--gpus", "1", "--strategy", "a b"), "--strategy: found 'a b'"),
        ("step,loss\n1,2\n", ("--gpus", "1", "--into", "../x"), "--into: found '../x'"),
        ("step,loss\n1,2\n", ("--gpus", "1", "--zone", "Mars/Base"), "--zone: 'Mars/Base' is no time zone"),
        ("step,loss\n1,2\n", ("--gpus", "1", "--start", "noon"), "--start: 'noon' is no time"),
        ("step,loss\n1,2\n", ("--gpus", "1", "--every", "0"), "--every: found 0"),
        ('{"sysstat": {"hosts": [3]}}', ("--gpus", "1"), "cannot be read as sadf -j"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_and_nothing_changes(tmp_path, capsys, content, options, said):
    imported(tmp_path, {"file.txt": content}, *options, code=2)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "w" / "runs").exists()


HOSTILE = (
    "step,loss,step_time_ms,tokens\n1,1e999,-5,-3\n2,NaN,1e400,9999999999999999999999\n-3,1,1,1\n1.5,1,1,1\n3,2.5,10,10\n"
    f"4,{'9' * 100_000},1,1\n5,\x1b[2J\x07,\x00,١\n"
)  # fmt: skip


def test_hostile_numbers_are_blank_and_lines_that_are_too_long_are_counted(tmp_path):
    run = imported(tmp_path, {"steps.csv": HOSTILE}, "--gpus", "1")
    assert steps_of(run, "loss", "step_ms", "units") == [
        (1, True, None, 0, 1), (2, True, None, 0, 1), (3, False, 2.5, 10, 10), (5, True, None, 0, 1),
    ]  # fmt: skip
    assert run.run.imported[0].unread_lines == 3


def test_hostile_names_become_no_paths(tmp_path):
    sar = SAR.replace("(node-3)", "(../../etc\x1b[31m)")
    run = imported(tmp_path, {"..sar .txt": sar}, "--gpus", "1")
    assert run.samples.hosts["host"].unique().to_list() == ["etc--31m"]
    assert {path.name for path in (tmp_path / "w" / "runs").iterdir()} == {run.run_id}


@pytest.mark.parametrize("name", sorted(log_formats.FORMATS))
def test_no_reader_fails_on_the_log_of_another_program(tmp_path, name, capsys):
    texts = (
        QUERY,
        DMON,
        PMON,
        DCGMI,
        EXPORTER,
        SAR,
        SADF,
        json.dumps(SADF_JSON),
        ETHTOOL,
        PSUTIL,
        TITAN,
        NANOTRON,
        HOSTILE,
        "\0{",
    )
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.log").write_text(text)
        command = ["import", str(tmp_path / f"{number}.log"), "--as", name, "--gpus", "1", "--workspace", str(tmp_path / "w")]
        assert main(command) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_collect_trace_names_a_log_that_is_no_trace(tmp_path, capsys):
    (tmp_path / "gpu.csv").write_text(QUERY)
    assert main(["trace", str(tmp_path / "gpu.csv")]) == 2
    assert "is a log of nvidia-smi --query-gpu (CSV), not a trace. `collect import " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,234", 1234), ("12,5", None), ("1,2345", None), ("", None), (".", None), ("-", None), ("5 %", 5), ("1 MiB", MIB),
     ("1 parsec", None), ("1e3", 1000), ("-.5", -0.5), (True, None), (float("nan"), None), (1e300, None), ("0x10", None)],
)  # fmt: skip
def test_numbers_are_read_with_their_units(text, number):
    assert parse_number(text) == number


@pytest.mark.parametrize(
    "text",
    ["1938074400", "1938074400000", "1938074400000000", "2031-06-01T10:00:00Z", "2031/06/01 12:00:00.000", "20310601 12:00:00",
     "2031-06-01 12:00:00,000", "2031-06-01 05:00:00-05:00", "Sun Jun  1 10:00:00 UTC 2031", "Sun Jun  1 10:00:00 AM UTC 2031"],
)  # fmt: skip
def test_times_are_read_in_their_zones(text):
    assert LogClock(parse_zone("Europe/Berlin"), None, 1.0).read_time(text) == START_S


def test_a_time_of_day_after_midnight_is_of_the_next_day():
    clock = LogClock(UTC, None, 1.0)
    assert clock.read_time("23:59:59") is None
    clock.set_date(2031, 5, 31)
    assert [clock.read_time(text) for text in ("11:59:59 PM", "12:00:00 AM", "12:00:01 AM")] == [
        START_S - 36001, START_S - 36000, START_S - 35999,
    ]  # fmt: skip


def test_a_step_that_was_repeated_after_a_restart_counts_once():
    rows = [log_rows.StepRow(step=step, loss=loss, step_ms=10.0) for step, loss in ((1, 3.0), (2, 2.0), (2, 1.0))]
    records, unit = log_rows.build_steps(rows, 1)
    assert [(record.step, record.loss) for record in records[0]] == [(1, 3), (2, 1)]
    assert unit == "steps"
