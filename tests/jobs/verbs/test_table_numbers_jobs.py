"""Known numbers go through every column of the tables of `jobs` and `provision`. The expected texts are written by hand."""

from datetime import datetime, timedelta
from types import SimpleNamespace

import msgspec
import support_tables
from support_cells import CELL
from support_planner import make_question

from jobs.planner import advice_text, planner_table
from jobs.planner.advise import Advice, AdviceReport
from jobs.planner.machine import NO_GPU_MACHINE
from jobs.planner.scale_out import ScaledCell
from jobs.planning import gpu_hours
from jobs.planning.repeats import EstimatedCost
from jobs.slurm.share import AccountShare
from jobs.status.reconcile import Status
from jobs.verbs import menus, status_table, views
from provision.cloudlab import hardware
from provision.command import display
from provision.facts.addresses import ADDRESSES
from provision.facts.host import HOST
from provision.facts.torch import TORCH, Torch
from shardlab.hardware.host import Gpu, Host, Nic
from shardlab.plugins.plugin_kind import OwnWorkload
from shardlab.runs.prediction import PredictedRange, Prediction

GIB = 1_073_741_824
PREDICTION = Prediction(
    memory_bytes=PredictedRange(13.1 * GIB, 13.7 * GIB, 14.9 * GIB), fits="likely", largest_micro_batch=11,
    step_s=PredictedRange(0.0173, 0.0193, 0.0211), time_s=PredictedRange(6.07, 7.19, 8.93),
    gpu_hours=PredictedRange(2.03, 5.03, 7.01), energy_kwh=PredictedRange(0.503, 0.701, 0.907),
    cost=PredictedRange(11.13, 17.19, 19.23), bottleneck="compute", memory_from="rehearsal", formula_tensor_bytes=1.0,
)  # fmt: skip
PREDICTED = {
    "memory": "13.7 GiB", "memory from": "rehearsal", "fits": "likely", "largest micro": "11",
    "step": "19.3 ms (17.3 ms to 21.1 ms)", "time": "7.19 s (6.07 s to 8.93 s)", "GPU hours": "5.03", "kWh": "0.701",
    "cost": "17.19", "bottleneck": "compute",
}  # fmt: skip


def test_the_predictions_of_a_plan_show_the_known_number_in_every_column():
    table = planner_table.make_predictions_table({"cell": PREDICTION}, {"cell": "c1"})
    assert dict(zip(table.headings, table.texts[0], strict=True)) == {"#": "c1", "cell": "cell"} | PREDICTED
    # Three runs of the cell: every number times 3.
    assert planner_table.describe_sums({"cell": PREDICTION}, {"cell": 3}) == [
        "predicted: 21.6 s for all runs in sequence (18.2 s to 26.8 s).",
        "predicted: 15.1 GPU hours (6.09 to 21).",
        "predicted: 2.1 kWh of the GPUs (1.51 to 2.72).",
        "predicted: 51.57 by price_per_gpu_hour (33.39 to 57.69).",
    ]


def test_scale_out_and_advice_show_the_known_number_in_every_column():
    output = support_tables.PrintedTables()
    step, speedup = PredictedRange(0.113, 0.127, 0.131), PredictedRange(3.07, 3.37, 3.79)
    planner_table.print_scale_out(output, {"ddp": [ScaledCell(8, PREDICTION, step, speedup, "well")]})
    cell = msgspec.structs.replace(CELL, strategy="tp-pp", dp=3, tp=5, pp=7, micro_batch_size=13, seq_len=64)
    advised = Advice(cell, PREDICTION, 17.0, ("compute 9 %", "bubble 5 %"), PredictedRange(16.5, 17.0, 17.5), 3)
    other = msgspec.structs.replace(cell, strategy="tp", pp=1, activation_checkpointing="full", options={"sync": "every_pass"})
    slower = msgspec.structs.replace(advised, cell=other, group=4)
    question = make_question("gpt2-tiny", NO_GPU_MACHINE, seq_len=64)
    advice_text.print_advice(output, question, AdviceReport([advised, slower], {}, []))
    assert output.rows_of == {
        "scale-out, with the same batch per GPU": [
            {
                "cell": "ddp", "GPUs": "8", "memory": "13.7 GiB", "step": "127 ms (113 ms to 131 ms)",
                "speed-up": "3.37x (3.07x to 3.79x)", "trust": "well",
            }
        ],
        # 17 items a second, of 64 tokens each, are 1,088 tokens a second.
        advice_text.TABLE_TITLE: [
            {
                "": "1", "strategy": "tp-pp", "mesh": "dp=3 tp=5 pp=7", "batch": "13 x 2", "sync": "", "memory": "13.7 GiB",
                "tokens/s": "1,090", "slower by": "",
            },
            {
                "": "2", "strategy": "tp", "mesh": "dp=3 tp=5", "batch": "13 x 2 ckpt", "sync": "every_pass",
                "memory": "13.7 GiB", "tokens/s": "1,090", "slower by": "compute 9 %",
            },
        ],
    }  # fmt: skip


def test_a_plan_shows_the_known_number_in_every_column_of_a_cell():
    cell = msgspec.structs.replace(
        CELL, gpus=3, global_batch_size=210, micro_batch_size=14, gradient_accumulation_steps=5, steps=17, warmup_steps=4
    )
    assert {column.heading: str(column.text(cell)) for column in views.PLAN_COLUMNS} == {
        "cell": cell.name(), "workload": "gpt2-tiny", "strategy": "ddp", "launcher": "torchrun", "ranks": "3",
        "global batch": "210", "micro x passes": "14 x 5", "length": "17 steps + 4 warm-up",
    }  # fmt: skip


def test_the_hours_of_a_plan_show_the_known_numbers():
    assert views._format_cost(EstimatedCost(2, 1.75, 5.25), 3).startswith(
        "about 1h 45m in sequence, 5h 15m summed over ranks (or GPUs) for 2 of 3"
    )
    hours = gpu_hours.GpuHours(2.5, 1000.5, 10.25, 7, 3.125, 4.5)
    assert gpu_hours.describe_hours(hours) == (
        "1,013 GPU hours (2.5 by recorded times, 1,000 by the high end of predictions, 10.2 by time limits; 7 cell(s) "
        "have no known time)"
    )
    assert gpu_hours.describe_retries(hours) == (
        "about 1,021 GPU hours with all retries (3.12 by `retry` of the matrix, 4.5 by `slurm.requeue`)"
    )
    assert (
        AccountShare("abc", "gres/gpu:a100", 75.5, 101.0).describe_remaining_hours()
        == "75.5 of 101 GPU hours of the type a100 left"
    )


def test_the_table_of_status_shows_the_known_number_in_every_column():
    now = datetime.now().astimezone().replace(hour=12, minute=0, second=0, microsecond=0)
    run = Status(
        id="RUN", cell=None, state="running", why="trains", scheduler={"name": "slurm", "id": "7", "raw": "RUNNING"}, step=7,
        steps=31, throughput=12_347.4, unit="tokens", eta_s=95.0, started=now - timedelta(minutes=11), ended=None,
        duration_s=661.0, hosts=[], attempt=1, repeat=1, rehearsal=False, expected=False, resumed_from_step=5,
    )  # fmt: skip
    table = status_table.make_table([run])
    shown = dict(zip(table.headings, table.texts[0], strict=True))
    assert shown.pop("started").endswith("11:49:00")
    assert shown == {
        "run": "RUN", "state": "running", "scheduler": "RUNNING", "step": "7 of 31", "units/s": "12,347", "to go": "1m 35s",
        "ended": "", "took": "11m 01s", "why": "trains; resumed from step 5",
    }  # fmt: skip


def test_the_menus_show_flops_in_millions():
    assert menus._format_mflop(12_345_678.0) == "12.3"
    known = OwnWorkload(
        name="rings", summary="Rings.", file="rings.py", code="ab", parameters=24_709, unit="tokens",
        flops_per_unit=2_345_678.0, flops_source="", seq_len=64, optimizer=CELL.optimizer, options=(), block="Block",
        block_parameters=(5, 5, 7), tensor_degrees=(2, 5),
    )  # fmt: skip
    assert views._describe_model(known) == [
        "rings: Rings: 24,709 parameters, 3 blocks (Block), 2.3 MFLOP per token, in sequences of 64; tp: 1, 2, 5."
    ]


def test_the_facts_of_a_machine_show_the_known_number_in_every_row():
    gpu = Gpu(uuid="GPU-0", name="NVIDIA A100", memory_bytes=40 * GIB)
    host = Host(
        schema=1, host="node0", boot_id="", kernel="6.1.0", system="Debian 12", cpu_model="EPYC", cpus=31, cpus_allowed=7,
        memory_bytes=int(47.5 * GIB), gpus=[gpu, gpu, gpu], gpu_driver="580.95", gpu_why_absent=None,
        nics=[Nic("lo", "loopback"), Nic("eth0", "physical")], python="3.11.2", packages={},
    )  # fmt: skip
    answers = {HOST.name: host, ADDRESSES.name: {"eth0": ("10.0.0.7",)}, TORCH.name: Torch("2.13.0", backends=["gloo", "nccl"])}
    output = support_tables.PrintedTables()
    target = SimpleNamespace(node=SimpleNamespace(name="node0"), facts=SimpleNamespace(answers=answers))
    display.show_machines(output, [target])
    assert {row["what"]: row["found"] for row in output.rows_of["node0"]} == {
        "system": "Debian 12, kernel 6.1.0", "CPU": "EPYC, 7 of 31 usable", "memory": "47.5 GiB",
        "GPUs": "3 x NVIDIA A100 (40 GiB), driver 580.95", "NICs": "eth0 10.0.0.7", "Python": "3.11.2",
        "torch": "2.13.0 (gloo, nccl)",
    }  # fmt: skip


def test_the_catalogue_of_hardware_shows_each_value_under_its_heading():
    (shown,) = (
        row
        for row in (dict(zip(hardware.CATALOGUE_COLUMNS, row, strict=True)) for row in hardware.make_catalogue_rows())
        if row["type"] == "d8545"
    )
    assert shown.pop("source").startswith("CloudLab manual")
    assert "13.0" in shown.pop("torch for CUDA")
    assert shown == {
        "site": "wisc", "type": "d8545", "nodes": "4", "GPUs": "4", "GPU": "A100", "GiB": "40", "machine": "x86_64",
        "processors": "2 x AMD EPYC 7413", "GB": "512", "network": "2 x 25 Gbit/s BCM57414, 2 x 100 Gbit/s ConnectX-6",
        "disks": "1.6 TB NVMe, 2 x 480 GB SATA",
    }  # fmt: skip
