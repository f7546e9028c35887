"""The facts that each launcher and scheduler states, and the commands with which launchers start runs of several shapes.

Golden file: golden/facts/jobs.txt.
"""

import shlex

import msgspec
import support_facts
from support_golden import run_of, same_as_golden

from jobs import launcher as launchers
from jobs.scheduler import find_scheduler
from shardlab import registry
from shardlab.runs.run import World
from shardlab.runs.trace_part import TRACE_STRATEGY

WORLDS = (World(1, 1, 1), World(1, 4, 4), World(2, 2, 4))


def describe_commands(launcher):
    for world in WORLDS:
        run = msgspec.structs.replace(run_of(launcher.name), world=world)
        shape = f"{world.nnodes} x {world.nproc_per_node}"
        yield f"  command {shape}: {shlex.join(launcher.make_node_argv(run, '/opt/python'))}"
        yield f"  task {shape}: {shlex.join(launcher.make_task_argv(run, '/opt/python'))}"
        for keys in ({}, {"overlap": True, "container_options": ["--container-image=x"]}):
            yield f"  srun {shape} {keys}: {shlex.join(launcher.make_srun_argv(run, '/opt/python', **keys))}"


def test_the_launchers_and_schedulers_state_the_golden_facts():
    lines = []
    for launcher in (*launchers.load_launchers().values(), launchers.find_launcher(TRACE_STRATEGY)):
        lines += [*support_facts.describe(launcher.name, launcher), *describe_commands(launcher)]
    for name in registry.list_plugin_names("jobs.schedulers"):
        module = find_scheduler(name)
        facts = {key: getattr(module, key) for key in ("NAME", "TEMPLATE", "TEMPLATES", "SCRIPT", "POLL_S")}
        lines += [name, *(f"  {key}: {support_facts.format_fact(fact)}" for key, fact in facts.items())]
    same_as_golden("facts/jobs.txt", "\n".join(lines) + "\n")
