"""Makes workloads that a file of the workspace defines, and run folders of such workloads, for tests."""

import msgspec
from support_cells import CELL

from shardlab.files import files, plugin_source
from shardlab.plugins.plugin_kind import WORKLOADS
from trainers import menu
from trainers.description.describe import describe_file


def described(folder, text):
    """Write the workload `mine` with this source text; returns what `describe` says about it."""
    file = folder / "workloads" / "mine.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return describe_file(file)


def cell_of(known, strategy, **keys):
    """A cell with a workload of the workspace on two ranks, with the default options of the workload."""
    options = {option.name: option.default for option in (*menu.find_strategy(strategy).options, *known.options)}
    keys = {"gpus": 2, "dp": 1, "seq_len": None, "workload_code": known.code, "options": options} | keys
    return msgspec.structs.replace(CELL, workload=known.name, strategy=strategy, **keys)


def run_dir_of(bench, folder, known, strategy, **keys):
    """Make the run folder of a run of a workload of the workspace, with a copy of the workload's code.

    folder: the folder to which `described` has written the workload before.
    """
    run_dir = bench.run_dir(strategy=strategy, **keys)
    run, options = run_dir.read_run(), cell_of(known, strategy).options
    cell = msgspec.structs.replace(run.cell, workload=known.name, seq_len=None, workload_code=known.code, options=options)
    files.write_json(run_dir.run_json, msgspec.structs.replace(run, cell=cell, cell_hash=cell.hash(), own_workload=known))
    plugin_source.write_plugin(run_dir.path / WORKLOADS.folder, plugin_source.read_plugin(folder / "workloads" / "mine.py"))
    return run_dir
