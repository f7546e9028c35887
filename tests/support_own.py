"""Own models in tests: what `describe` says of a file, and a run of it by hand."""

import msgspec
from support_cells import CELL

from shardlab import files, own_workload, plugin_source
from trainers import menu
from trainers.describe import describe


def described(folder, text):
    """What `describe` says of the workload `mine` with this text."""
    file = folder / "workloads" / "mine.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return describe(file)


def cell_of(known, strategy, **keys):
    """A cell of this workload on two ranks, with default options."""
    options = {option.name: option.default for option in (*menu.strategy(strategy).options, *known.options)}
    keys = {"gpus": 2, "dp": 1, "seq_len": None, "workload_code": known.code, "options": options} | keys
    return msgspec.structs.replace(CELL, workload=known.name, strategy=strategy, **keys)


def run_dir_of(bench, folder, known, strategy, **keys):
    """The folder of a run of this workload, which `described` wrote to `folder`, with its code."""
    run_dir = bench.run_dir(strategy=strategy, **keys)
    run, options = run_dir.read_run(), cell_of(known, strategy).options
    cell = msgspec.structs.replace(run.cell, workload=known.name, seq_len=None, workload_code=known.code, options=options)
    files.write_json(run_dir.run_json, msgspec.structs.replace(run, cell=cell, cell_hash=cell.hash(), own_workload=known))
    plugin_source.write(run_dir.path / own_workload.FOLDER, plugin_source.read(folder / "workloads" / "mine.py"))
    return run_dir
