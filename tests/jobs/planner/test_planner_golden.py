"""The numbers that the planner computes: models, sharding, exchanges, memory, times, energy, rankings, and changes to a matrix.

Golden files: golden/planner/. A line is a fact with its name, and a range is a line with its low, likely and high number.
Numbers have six digits, because the last digits differ between platforms.
"""

import msgspec
import support_planner
from support_golden import same_as_golden

from jobs.adaptation.adapt import adapt_matrix
from jobs.planner import (
    advice_text,
    advise,
    cell_schedule,
    device_profile,
    exchanges,
    gpu,
    link,
    memory,
    model_facts,
    planner_table,
    predict,
    scale_out,
    sharding,
    step_time,
)
from jobs.planner.calibration import MeasuredRatio, build_calibration
from jobs.planner.machine import NO_GPU_MACHINE, PlannedMachine
from jobs.planning.resolve import Capacity
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.hardware import gpu_models
from shardlab.matrix import matrix
from shardlab.matrix.cell import Optimizer
from shardlab.runs.prediction import PredictedRange
from shardlab.runs.rehearsed import MemoryByCategory, NotRehearsed, Rehearsed, RehearsedCollective, RehearsedRank
from shardlab.terminal.console import Output
from trainers import menu
from trainers.model.precision import ALL

cell = support_planner.cell
SGD = Optimizer("sgd", 0.1, momentum=0.9)
UNFUSED = Optimizer("adam", 0.001, fused=False)
NODES = {"nnodes": 2}
QUANTIZED = {"quantized_weights": True, "quantized_gradients": True}
CELLS = {
    "single": cell("gpt2", "single", micro=4),
    "single of a network": cell("resnet50", "single", micro=32, optimizer=SGD),
    "ddp": cell("gpt2-large", "ddp", 8, micro=4, passes=2, precision="bf16"),
    "ddp, fp16": cell("gpt2-large", "ddp", 8, micro=4, precision="fp16", max_grad_norm=1.0),
    "ddp of a network": cell("resnet50", "ddp", 4, micro=32, optimizer=SGD, precision="bf16-autocast"),
    "ddp, two nodes": cell("vit-b-32", "ddp", 16, micro=16, precision="bf16-pure", **NODES),
    "ddp, compiled": cell("llm-1.3b", "ddp", 2, micro=2, precision="bf16", compile=True, activation_checkpointing="full"),
    "ddp, small buckets": cell("gpt2", "ddp", 4, options={"bucket_cap_mb": 1, "gradient_as_bucket_view": False}),
    "ddp-powersgd": cell("gpt2", "ddp-powersgd", 4, micro=2),
    "local-sgd": cell("gpt2", "local-sgd", 4, micro=2),
    "fsdp1-full-shard": cell("gpt2-large", "fsdp1-full-shard", 8, micro=2, precision="bf16"),
    "fsdp1-shard-grad-op": cell("gpt2-large", "fsdp1-shard-grad-op", 8, micro=2, passes=4, precision="bf16"),
    "fsdp1-no-shard": cell("gpt2-large", "fsdp1-no-shard", 4, micro=2),
    "fsdp1-hybrid-shard": cell("vit-b-32", "fsdp1-hybrid-shard", 16, micro=8, precision="bf16", **NODES),
    "fsdp1-hybrid-shard-zero2": cell("vit-b-32", "fsdp1-hybrid-shard-zero2", 16, micro=8, optimizer=UNFUSED, **NODES),
    "fsdp2": cell("llm-7b", "fsdp2", 8, micro=1, precision="bf16", activation_checkpointing="full"),
    "fsdp2, segments": cell("llm-1.3b", "fsdp2", 8, micro=2, passes=2, activation_checkpointing="segments-4"),
    "fsdp2, every third": cell("llm-1.3b", "fsdp2", 8, micro=2, precision="bf16-pure", activation_checkpointing="every-3"),
    "fsdp2, offloaded": cell("llm-1.3b", "fsdp2", 4, micro=2, options={"offload": "cpu", "prefetch": 2}),
    "fsdp2 of a network": cell("convnext-large", "fsdp2", 4, micro=16, activation_checkpointing="full"),
    "fsdp2-zero2": cell("gpt2-large", "fsdp2-zero2", 8, micro=2, passes=2, precision="tf32"),
    "fsdp2-hsdp": cell("llm-1.3b", "fsdp2-hsdp", 16, micro=2, precision="bf16", **NODES),
    "fsdp2-hsdp-zero2": cell("llm-1.3b", "fsdp2-hsdp-zero2", 16, micro=2, precision="bf16", options={"replicas": 4}, **NODES),
    "tp": cell("llm-1.3b", "tp", 4, tp=4, micro=2, precision="bf16"),
    "tp, sequence": cell("llm-7b", "tp", 8, tp=8, micro=1, precision="bf16", options={"sequence_parallel": True}),
    "tp-fsdp2": cell("llm-7b", "tp-fsdp2", 8, tp=2, micro=1, precision="bf16", activation_checkpointing="full"),
    "tp-pp": cell("llm-7b", "tp-pp", 8, tp=4, pp=2, micro=1, passes=8, precision="bf16"),
    "pp-fsdp2": cell("llm-7b", "pp-fsdp2", 8, pp=4, micro=1, passes=8, precision="bf16"),
    "tp-pp-fsdp2": cell("llm-7b", "tp-pp-fsdp2", 16, tp=2, pp=4, micro=1, passes=16, precision="bf16", **NODES),
    "pp-gpipe": cell("gpt2-large", "pp-gpipe", 4, pp=4, micro=2, passes=8),
    "pp-1f1b": cell("gpt2-large", "pp-1f1b", 4, pp=4, micro=2, passes=8, activation_checkpointing="full"),
    "pp-interleaved": cell("gpt2-large", "pp-interleaved", 2, pp=2, micro=2, passes=4, precision="bf16"),
    "ps-sync": cell("resnet50", "ps-sync", 4, servers=1, micro=8, optimizer=SGD),
    "ps-async": cell("gpt2-tiny", "ps-async", 4, servers=1, micro=8, optimizer=SGD),
    "ps-ssp": cell("gpt2-tiny", "ps-ssp", 4, servers=2, micro=8, optimizer=SGD),
    "zero0": cell("gpt2-large", "zero0", 4, micro=2, precision="bf16"),
    "zero1": cell("gpt2-large", "zero1", 8, micro=2, passes=2, precision="fp16"),
    "zero2": cell("gpt2-large", "zero2", 8, micro=2, precision="bf16", options={"overlap_comm": True}),
    "zero2, offloaded": cell("llm-1.3b", "zero2", 8, precision="bf16", options={"offload_optimizer": "cpu"}),
    "zero3": cell("llm-7b", "zero3", 8, micro=1, precision="bf16", activation_checkpointing="full"),
    "zero3, two levels": cell("llm-7b", "zero3", 16, precision="bf16", options={"hpz_partition_size": 8}, **NODES),
    "zero3, quantized": cell("llm-1.3b", "zero3", 16, options=QUANTIZED, **NODES),
    "zero3, offloaded": cell("llm-7b", "zero3", 8, options={"offload_param": "cpu", "offload_optimizer": "cpu"}),
    "limited": cell("gpt2-large", "ddp", 2, micro=8, memory_limit_gib=20, warmup_steps=3, steps=500),
    "epochs": cell("resnet50", "ddp", 4, micro=64, optimizer=SGD, steps=None, epochs=90, options={"data": "imagenet"}),
    "on a CPU": cell("gpt2-tiny", "ddp", 2, micro=8, launcher="fork"),
}  # fmt: skip


def test_every_cell_can_run_and_every_strategy_has_a_cell():
    assert {name: why for name, planned in CELLS.items() if (why := menu.refuse(planned)) is not None} == {}
    assert {planned.strategy for planned in CELLS.values()} == set(menu.load_strategies())


def make_machine(name, inside=None, between=None, price=None):
    model = gpu.must_find_gpu_model(name)
    links = (inside and link.find_link(inside, model)) or link.make_data_sheet_link(model)
    return PlannedMachine(
        True, name, model, gpu.find_gpu_memory(model, None), links, between and link.find_link(between, model), price
    )


MACHINES = {
    "a100": make_machine("a100-sxm4-80gb", between="infiniband-hdr", price=2.5),
    "h100": make_machine("h100-80gb-hbm3", inside="nvlink", between="ethernet-100"),
    "v100": make_machine("v100-pcie-16gb", inside="pcie-3", between="ethernet-10"),
}


def flatten(value, name=""):
    """The lines of a value of structs, dictionaries and sequences: (name of the number, number as text)."""
    if isinstance(value, PredictedRange):
        yield name, " ".join(map(number_text, msgspec.structs.astuple(value)))
    elif isinstance(value, msgspec.Struct):
        yield from flatten(msgspec.structs.asdict(value), name)
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from flatten(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(entry, msgspec.Struct) for entry in value):
        for number, entry in enumerate(value, 1):
            yield f"{name}.{number}", ", ".join(f"{key} {text}" for key, text in flatten(entry))
    elif isinstance(value, list | tuple):
        yield name, " ".join(map(number_text, value)) or "none"
    else:
        yield name, number_text(value)


def number_text(value):
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def describe(title, facts, left_out=()):
    """A line for each number of a value: the title, the name of the number, and the number. None and `none` are left out."""
    lines = [(name, text) for name, text in flatten(facts) if text not in ("None", "none")]
    return [f"{title} {name}: {text}" if name else f"{title}: {text}" for name, text in lines if not name.startswith(left_out)]


def write_golden(name, lines):
    same_as_golden(f"planner/{name}.txt", "\n".join(lines) + "\n")


def test_the_facts_of_all_models_have_their_golden_numbers():
    lines = []
    for workload in menu.load_workloads():
        for precision in ("fp32", "bf16", "bf16-autocast", "bf16-pure"):
            options = [{}, {"gelu": "unfused"}] if "gelu" in cell(workload).options else [{}]
            for given in options:
                facts = model_facts.find_model_facts(cell(workload, "single", precision=precision, options=given))
                lines += describe(f"{workload}, {precision}{', unfused' * bool(given)}", facts)
    for workload in ("gpt2", "vit-b-32", "llm-1.3b"):
        option = menu.find_workload(workload).blocks
        lines += describe(
            f"{workload} with 5 blocks", model_facts.find_model_facts(cell(workload, "single", options={option: 5}))
        )
    write_golden("models", lines)


def test_gpus_and_links_have_their_golden_numbers():
    lines = []
    for model in gpu_models.load_gpu_models():
        lines += describe(model.name, model, left_out=("name",))
        for precision in ALL:
            lines += describe(f"{model.name}, {precision}", device_profile.find_rates(model, precision))
        lines += describe(f"{model.name}, link", link.make_data_sheet_link(model))
        lines += describe(f"{model.name}, capacity", gpu.find_gpu_memory(model, None))
    for name in link.read_link_entries():
        lines += describe(name, link.read_link_entries()[name])
        lines += describe(f"{name} of an a100", link.find_link(name, gpu.find_gpu_model("a100")))
    lines += describe("terms of memory", memory.read_memory_terms())
    for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"):
        for ranks in (2, 8, 48):
            seconds = [step_time.predict_faster_s(op, size, ranks, 5e-6, 2e10) for size in (1e3, 1e6, 1e9)]
            lines.append(f"{op} over {ranks} ranks: {' '.join(map(number_text, seconds))}")
    write_golden("machines", lines)


def test_sharding_exchanges_and_memory_have_their_golden_numbers():
    lines = []
    for name, planned in CELLS.items():
        facts = model_facts.find_model_facts(planned)
        lines += describe(name, sharding.divide_model(planned, facts.parameters))
        lines += [
            f"{name}, exchange .{number}: op {term.op}, payload_bytes {term.payload_bytes:.6g}, calls {term.calls}, "
            f"ranks {term.ranks}, axis {term.axis}, hides_in {term.hides_in}"
            for number, term in enumerate(exchanges.list_exchanges(planned) or (), 1)
        ]
        lines += describe(f"{name}, sent bytes", exchanges.sum_sent_bytes(planned))
        for where, on_gpu in (("on a GPU", True), ("on a CPU", False)):
            found = memory.predict_memory(planned, on_gpu=on_gpu)
            lines += describe(f"{name}, memory {where}", {**found.bytes_by_category, "complete": found.is_complete})
        lines += describe(f"{name}, memory of one item", memory.predict_memory(planned, micro_batch=1).total_bytes)
        if planned.pp > 1:
            lines += describe(f"{name}, schedule", cell_schedule.make_schedule(planned))
    write_golden("cells", lines)


def test_predictions_on_three_machines_have_their_golden_numbers():
    lines = []
    for machine_name, machine in MACHINES.items():
        for name, planned in CELLS.items():
            title = f"{name} on {machine_name},"
            step = step_time.predict_step_time(planned, machine)
            lines += describe(f"{title} part", step.parts_s) if step else [f"{title} no time"]
            lines += describe(f"{title} communication", step.communication_s) if step else []
            lines += describe(
                title, predict.predict_run(planned, machine), left_out=("schema", "memory_by", "exchanges", "gpu")
            )
    write_golden("predictions", lines)


def make_answer(planned):
    """The answer of a rehearsal with two kinds of ranks."""
    mib = 2**20
    kept = MemoryByCategory(300 * mib, 0, 0, 600 * mib, 0, 0, 20 * mib, 0)
    peak = MemoryByCategory(300 * mib, 50 * mib, 300 * mib, 600 * mib, 0, 1500 * mib, 20 * mib, 70 * mib)
    small = MemoryByCategory(200 * mib, 0, 200 * mib, 400 * mib, 0, 900 * mib, 10 * mib, 30 * mib)
    calls = (RehearsedCollective("all_reduce", 64 * mib, 4, 12.0), RehearsedCollective("send", 8 * mib, 2, 4.0))
    ranks = (
        RehearsedRank(0, 2, peak.total, peak, kept, calls, 4e12),
        RehearsedRank(1, 2, small.total, small, kept, (*calls, RehearsedCollective("all_to_all", 16 * mib, 4, 1.5)), 3e12),
    )
    depths, error_from = (2, 4), "the runs of study 4"
    return Rehearsed(1, planned.hash(), 4, ranks, "fake_tensors", "cpu", depths, 3.5, error_from, ("It has no dropout.",), 2.5)


def test_predictions_from_runs_and_rehearsals_have_their_golden_numbers():
    planned, machine, lines = CELLS["ddp of a network"], MACHINES["a100"], []
    ratios = [
        MeasuredRatio(planned, "a100-sxm4-80gb", 1.25, 0.875, 310.0),
        MeasuredRatio(planned, "a100-sxm4-80gb", 1.5, 1.0, 290.0),
        MeasuredRatio(CELLS["single of a network"], "a100-sxm4-80gb", 2.0, None),
    ]
    calibration = build_calibration(ratios[:2], fallback=build_calibration(ratios[2:], "result(s) in docs/results"))
    for name in ("ddp of a network", "single of a network", "ddp"):
        lines += describe(f"{name}, calibrated", predict.predict_run(CELLS[name], machine, calibration=calibration))
    lines += describe("occupied", predict.predict_run(planned, machine, occupied_gpus=8, recorded_s=1800.0))
    lines += describe("on a CPU", predict.predict_run(planned, NO_GPU_MACHINE))
    lines += describe("rehearsed", predict.predict_run(planned, machine, rehearsal=make_answer(planned)))
    lines += describe("rehearsed, on a CPU", predict.predict_run(planned, NO_GPU_MACHINE, rehearsal=make_answer(planned)))
    lines += describe(
        "not rehearsed", predict.predict_run(planned, machine, rehearsal=NotRehearsed(1, "", "It has servers.", 0.1))
    )
    unknown = msgspec.structs.replace(machine, gpu_model=None, gpu_memory_bytes=None, link_between_nodes=None)
    lines += describe("unknown GPU", predict.predict_run(planned, unknown))
    lines += describe(
        "unknown network",
        predict.predict_run(CELLS["zero3, two levels"], msgspec.structs.replace(machine, link_between_nodes=None)),
    )
    write_golden("corrected", lines)


def test_the_advice_for_three_machines_is_the_golden_text(capsys):
    out = Output()
    asked = [(name, workload, 8, 1) for name in ("a100", "h100") for workload in ("gpt2-large", "llm-7b", "resnet50")]
    asked += [("v100", "gpt2-large", 4, 1), ("a100", "llm-7b", 16, 2), ("h100", "vit-b-32", 1, 1)]
    for machine_name, workload, gpus, nodes in asked:
        precision = "fp16" if machine_name == "v100" else "bf16"
        question = support_planner.make_question(workload, MACHINES[machine_name], gpus, nodes=nodes, precision=precision)
        report = advise.rank_strategies(question, advise.list_alternatives(question))
        advice_text.print_advice(out, question, report, is_default_batch=True)
        out.print_line("\n".join(describe("fact", advise.make_rule_values(question))))
    write_golden("advice", capsys.readouterr().out.splitlines())


def scale(planned, numbers, machine):
    """Yields the predictions of a cell on those numbers of GPUs on which it can run."""
    for count in numbers:
        larger = scale_out.scale_cell(planned, count, 8)
        if larger is not None and menu.refuse(larger) is None:
            yield scale_out.extrapolate_to_gpus(planned, count, 8, machine)


def test_tables_of_predictions_and_of_other_numbers_of_gpus_are_the_golden_text(capsys):
    out, predictions = Output(), {}
    for machine_name, machine in MACHINES.items():
        predictions = {name: predict.predict_run(planned, machine) for name, planned in CELLS.items()}
        table = planner_table.make_predictions_table(predictions, {})
        for heading, *texts in list(zip(table.headings, *table.texts, strict=True))[1:]:
            out.print_line(f"{machine_name}, {heading}: {' | '.join(texts)}")
        for sentence in planner_table.describe_sums(predictions, dict.fromkeys(CELLS, 2)):
            out.print_line(sentence)
    numbers = (1, 2, 4, 8, 16, 24, 64, 512)
    for machine in (MACHINES["a100"], MACHINES["v100"]):
        scaled = {name: list(scale(planned, numbers, machine)) for name, planned in CELLS.items()}
        planner_table.print_scale_out(out, scaled)
    for name, planned in CELLS.items():
        if planned.pp > 1:
            described = cell_schedule.describe_schedule(cell_schedule.make_schedule(planned), predictions[name])
            out.print_line("\n".join(described))
    write_golden("tables", capsys.readouterr().out.splitlines())


def test_the_shipped_matrices_are_adapted_with_the_golden_changes():
    lines = []
    for name, nodes, gpus in (("paper1", 1, 2), ("paper1", 2, 2), ("paper3", 1, 1), ("paper4", 1, 2), ("paper5", 2, 4)):
        study = matrix.load_matrix(matrix.find_matrix_file(name))
        found = adapt_matrix(study, Capacity(most_nodes=nodes, gpus_per_node=gpus, has_rank_tasks=False), OwnPlugins(), "small")
        lines.append(f"{name} on {nodes} x {gpus}")
        if found is not None:
            lines += [
                f"  {change.key}: {change.study} -> {change.here}: {change.why} ({change.cells} cells)"
                for change in found.changes
            ]
            lines += [f"  {key}: {entry}" for key in ("exclude", "include") for entry in found.file_content.get(key, ())]
    write_golden("adapted", lines)
