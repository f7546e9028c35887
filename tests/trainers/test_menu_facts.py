"""The facts that each strategy and workload of the menus states, and the sentences by which they refuse cells.

Golden files: golden/facts/strategies.txt, workloads.txt, refused_by_strategies.txt and
refused_by_workloads.txt. The menus need no torch.
"""

from pathlib import Path

import msgspec
import support_facts
import support_planner
from support_golden import same_as_golden

from shardlab.matrix.cell import Optimizer
from trainers import menu
from trainers.data import data_sets

# Cells with 1, 2 and 4 ranks: (ranks, servers, keys of the cell).
WORLDS = (
    (1, 0, {}), (2, 0, {}), (4, 0, {}), (2, 0, {"tp": 2}), (3, 0, {"tp": 3}), (2, 0, {"pp": 2}), (4, 0, {"tp": 2, "pp": 2}),
    (4, 0, {"pp": 4, "passes": 2}), (3, 1, {}), (8, 0, {"nnodes": 2}), (8, 0, {"tp": 2, "pp": 2, "passes": 4}),
)  # fmt: skip
KEYS = (
    {"precision": "fp16"}, {"precision": "bf16-pure"}, {"activation_checkpointing": "full"}, {"compile": True},
    {"max_grad_norm": 1.0}, {"epochs": 2, "steps": None}, {"passes": 3}, {"prove": "require"}, {"micro": 3},
)  # fmt: skip


def lines_of(title, judged):
    """A line for each text that is no None, with all the cells that have this text."""
    cells_of_text = {}
    for name, text in judged:
        if text is not None:
            cells_of_text.setdefault(str(text), []).append(name)
    return [f"{title} {', '.join(names)}: {text}" for text, names in cells_of_text.items()]


def option_values(option):
    """Values of an option: those allowed, and those at and beyond its bounds."""
    bounds = [(option.least, -1), (option.most, 1)]
    return [*option.choices, *(bound + way for bound, sign in bounds if bound is not None for way in (0, sign)), None]


def describe_strategy(strategy):
    lines = support_facts.describe(strategy.name, strategy, left_out=("name", "options"))
    lines += [f"  option {support_facts.format_fact(msgspec.structs.astuple(option))}" for option in strategy.options]
    lines += [f"  option {option.name}: {option.allowed}" for option in strategy.options]
    return [*lines, *(f"  {precision}: {strategy.refuse_precision(precision)}" for precision in strategy.reasons)]


def test_the_strategies_state_the_golden_facts():
    lines = [line for strategy in menu.load_strategies().values() for line in describe_strategy(strategy)]
    same_as_golden("facts/strategies.txt", "\n".join(lines) + "\n")


def test_the_workloads_and_data_sets_state_the_golden_facts():
    lines = []
    for workload in menu.load_workloads().values():
        lines += support_facts.describe(workload.name, workload, left_out=("name", "options"))
        lines += [f"  option {support_facts.format_fact(msgspec.structs.astuple(option))}" for option in workload.options]
        lines += [f"  option {option.name}: {option.allowed}" for option in workload.options]
    lines += [
        f"{name}: {support_facts.format_fact(getattr(data_sets, name))}"
        for name in ("IMAGE_DATA_SETS", "TOKEN_DATA_SETS", "SPLITS", "FOLDER_BY_DATA_SET")
    ]
    for options in ({"data": name} for name in (*data_sets.IMAGE_DATA_SETS, *data_sets.TOKEN_DATA_SETS)):
        path = data_sets.find_data_path(options | {"tokens_file": "my.tokens"}, Path("/data"))
        lines += [f"{options}: {path and tuple(map(str, path))}"]
    for tokens_file in ("my.tokens", "/elsewhere/my.tokens", "../my.tokens"):
        lines += [f"{tokens_file}: {data_sets.refuse_copy({'data': 'tokens', 'tokens_file': tokens_file})}"]
    same_as_golden("facts/workloads.txt", "\n".join(lines) + "\n")


def make_cell(strategy, ranks, servers, keys, workload="gpt2-tiny"):
    has_servers = menu.find_strategy(strategy).servers
    keys = {"servers": servers, "optimizer": Optimizer("sgd", 0.1)} | keys if has_servers else keys
    return support_planner.cell(workload, strategy, ranks, **keys)


def judge(strategy, cells):
    """The lines about cells: why each is refused, and the answers of the strategy about the others."""
    refused = {title: menu.refuse(cell) for title, cell in cells}
    runs = [(title, cell) for title, cell in cells if refused[title] is None]
    for name in ("unprovable", "other_work"):
        yield from lines_of(f"  {name}", ((title, getattr(strategy, name)(cell)) for title, cell in runs))
    periods = {title: str(strategy.communication_period(cell)) for title, cell in runs}
    yield from lines_of("  period", ((title, period) for title, period in periods.items() if period != "1"))
    yield from lines_of("  refuses", refused.items())


def test_the_strategies_refuse_cells_with_the_golden_sentences():
    lines = []
    for strategy in menu.load_strategies().values():
        worlds = [
            (f"{ranks}+{servers} {keys}", make_cell(strategy.name, ranks, servers, keys)) for ranks, servers, keys in WORLDS
        ]
        fitting = next((cell for _, cell in worlds if cell.gpus > 1 and menu.refuse(cell) is None), worlds[0][1])
        world = {"tp": fitting.tp, "pp": fitting.pp}
        cells = [(f"{keys}", make_cell(strategy.name, fitting.gpus, fitting.servers, world | keys)) for keys in KEYS]
        cells += [
            (workload, make_cell(strategy.name, fitting.gpus, fitting.servers, world, workload))
            for workload in ("resnet50-tiny", "vit-tiny", "llm-1.3b-tiny", "densenet121-tiny")
        ]
        options = [
            (f"{option.name}={value!r}", msgspec.structs.replace(fitting, options=fitting.options | {option.name: value}))
            for option in strategy.options
            for value in option_values(option)
        ]
        lines += [strategy.name, *judge(strategy, worlds), *judge(strategy, cells), *judge(strategy, options)]
    same_as_golden("facts/refused_by_strategies.txt", "\n".join(lines) + "\n")


def test_the_workloads_refuse_cells_with_the_golden_sentences():
    lines = []
    for workload in menu.load_workloads().values():
        single = support_planner.cell(workload.name, "single")
        cells = [(f"seq_len={size}", msgspec.structs.replace(single, seq_len=size)) for size in (None, 1, 65, 4096)]
        cells += [
            (f"{option.name}={value!r}", msgspec.structs.replace(single, options=single.options | {option.name: value}))
            for option in workload.options
            for value in option_values(option)
        ]
        cells += [(f"tp={size}", support_planner.cell(workload.name, "tp", size, tp=size)) for size in (2, 3, 5, 16, 64)]
        cells += [(f"pp={size}", support_planner.cell(workload.name, "pp-gpipe", size, pp=size)) for size in (2, 3, 12, 64)]
        lines += [workload.name, *lines_of("  refuses", ((title, menu.refuse(cell)) for title, cell in cells))]
    same_as_golden("facts/refused_by_workloads.txt", "\n".join(lines) + "\n")
