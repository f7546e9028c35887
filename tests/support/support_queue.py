"""A stand-in of Slurm: its commands as one program, whose queue is a folder and has limits.

The queue does nothing on its own. A call of squeue without --name is a look at the queue, and each look executes waiting tasks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from support_trust import make_own

from jobs import cli
from jobs.schedulers import slurm
from jobs.status import reconcile

COMMANDS = ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo")
CLUSTER = """\
schema: 1
name: c
provider: virtual
nodes: [{name: head, roles: [controller]}, {name: work1}]
slurm: {}
"""
MATRIX = """\
schema: 1
name: m
defaults:
  {workload: gpt2-tiny, strategy: single, gpus: 1, global_batch_size: 4, seq_len: 16, steps: 1, prove: "off", expect: [oom]}
axes: {seed: SEEDS}
"""
# The script of a run that ends at once with an out-of-memory error. The cell of the run expects this error.
SCRIPT = """\
#!/bin/bash
{% for option in options %}
#SBATCH {{ option }}
{% endfor %}
cd {{ folder | quote }}
mkdir claim 2>/dev/null || exit 0
echo '{"schema":1,"event":"exited","writer":"attempt","wall_s":'$(date +%s)',"host":"work1",
"data":{"code":1,"reason":"oom","why":"as asked"}}' | tr -d '\\n' >events.attempt.jsonl
echo >>events.attempt.jsonl
"""
PROGRAM = """\
#!{python} -S
import json, os, sys  # no others: tests start this program some thousand times

(here, name), words = os.path.split(sys.argv[0]), sys.argv[1:]


def read(path):
    with open(path) as file:
        return file.read()


def write(path, text, mode="w"):
    with open(path, mode) as file:
        file.write(text)


options = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
cluster = options.get("--clusters")
queue_file = f"{{here}}/queue.json" if cluster is None else f"{{here}}/queue.{{cluster}}.json"
rules, queue = json.loads(read(f"{{here}}/rules.json")), json.loads(read(queue_file))
if "--test-only" not in words:
    write(f"{{here}}/calls", json.dumps([name, *words]) + "\\n", "a")


def end(code, *lines):
    print(*lines, sep="\\n", file=sys.stderr if code else sys.stdout)
    write(queue_file, json.dumps(queue))
    sys.exit(code)


headers = [] if cluster is None else [f"CLUSTER: {{cluster}}"]
write(f"{{here}}/{{name}}.environment", json.dumps(dict(os.environ)))
if rules["away"] or name in rules["unreachable"]:
    end(1, f"{{name}}: error: Unable to contact slurm controller (connect failure)")
if "--test-only" in words:
    wrong = [says for part, says in rules["rejects"].items() if part in " ".join(words) + read(words[-1])]
    end(1 if wrong else 0, *(line for says in wrong[:1] for line in says.split("\\n")))
if name == "sinfo":
    end(0, *headers, *rules["node_states"])
if name == "sbatch":
    if os.path.basename(os.path.dirname(words[-1])) in rules["never"]:
        end(1, "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified")
    tasks = int(options["--array"].partition("%")[0].partition("-")[2]) + 1 if "--array" in options else 1
    if tasks > rules["largest_array"]:
        end(1, "sbatch: error: Batch job submission failed: Invalid job array specification")
    if len(queue["tasks"]) + tasks > rules["places"]:
        end(1, *rules["says"])
    queue["last"] += 1
    for task in range(tasks):
        number = f"{{queue['last']}}_{{task}}" if "--array" in options else str(queue["last"])
        queue["tasks"].append([number, options["--job-name"], words[-1], task])
    queue["most"] = max(queue["most"], len(queue["tasks"]))
    if rules["loses_answers"]:
        end(1, "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    number = str(queue["last"]) if cluster is None else f"{{queue['last']}};{{cluster}}"
    end(0, *(line.replace("NUMBER", number) for line in rules["answers"]))
if name == "scancel":
    queue["tasks"] = [task for task in queue["tasks"] if not {{task[0], task[0].split("_")[0]}} & set(words)]
    end(0)
if name == "squeue":
    wanted = options.get("--name")
    names = wanted.split(",") if wanted is not None else []
    if wanted is None:
        for _, _, script, task in queue["tasks"][: rules["ends"]]:
            arguments = ["bash", script], os.environ | {{"SLURM_ARRAY_TASK_ID": str(task)}}
            assert os.spawnvpe(os.P_WAIT, "bash", *arguments) == 0
        del queue["tasks"][: rules["ends"]]
        queue["looks"] += 1
        if queue["looks"] == rules["interrupts_at"]:
            os.kill(os.getppid(), 2)
    listed = [(id, job) for id, job, _, _ in queue["tasks"] if wanted is None or job in names]
    end(0, *headers, *(f"{{id}}|{{job}}|PENDING|1|N/A||{{rules['reason']}}" for id, job in listed))
if name == "scontrol" and sys.argv[-1] == "partition":
    end(0, *rules["partitions"])
if name == "scontrol":
    end(0, "ClusterName = c", f"MaxArraySize = {{rules['says_largest_array']}}", "MessageTimeout = 0 sec")
end(1, "Slurm accounting storage is disabled")
"""


class Queue:
    """A folder with stand-ins of Slurm's commands, which is put first in PATH.

    The rules, which `rule` sets:
    - places: how many tasks may wait. If there would be more, sbatch fails and prints the lines `says`.
    - largest_array: the largest array that sbatch accepts. says_largest_array: the limit in Slurm's configuration.
    - ends: how many tasks each look executes.
    - never: folders of runs whose script sbatch always rejects.
    - interrupts_at: the number of the look during which the calling process gets SIGINT.
    - away: whether no command reaches the controller. unreachable: the commands that do not reach it.
    - answers: the lines that sbatch prints, with NUMBER for the job id.
    - loses_answers: whether sbatch reports a timeout although Slurm has the job.
    - reason: the reason that Slurm gives for tasks that wait.
    - rejects: maps a part of a script or a command line to the error with which `sbatch --test-only` rejects it.
    - node_states: the lines that sinfo prints. partitions: the lines that `scontrol show partition` prints.
    """

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self.folder = folder
        folder.mkdir()
        for name in COMMANDS:
            (folder / name).write_text(PROGRAM.format(python=sys.executable))
            (folder / name).chmod(0o755)
        (folder / "queue.json").write_text(json.dumps({"last": 0, "most": 0, "looks": 0, "tasks": []}))
        self.rule()
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def rule(self, **given: Any) -> None:
        rules = {
            "places": 10**6,
            "says": [],
            "largest_array": 1001,
            "says_largest_array": 1001,
            "ends": 10**6,
            "never": [],
            "interrupts_at": 0,
            "away": False,
            "unreachable": [],
            "answers": ["NUMBER"],
            "loses_answers": False,
            "reason": "None",
            "rejects": {},
            "node_states": ["idle"],
            "partitions": [],
        }
        (self.folder / "rules.json").write_text(json.dumps(rules | given))

    def add_cluster(self, name: str) -> None:
        """Add a cluster to which commands with the option --clusters go. It numbers its own jobs, from 1."""
        (self.folder / f"queue.{name}.json").write_text(json.dumps({"last": 0, "most": 0, "looks": 0, "tasks": []}))

    def state(self, cluster: str | None = None) -> dict[str, Any]:
        """The state of a cluster: how many tasks wait, and others. cluster: None: the default cluster."""
        file = self.folder / ("queue.json" if cluster is None else f"queue.{cluster}.json")
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def add_job_of_user(self, number: int, name: str) -> None:
        """Let a job of the user, which is not a run, wait on the default cluster."""
        state = self.state()
        state["tasks"].append([str(number), name, "/bin/true", 0])
        (self.folder / "queue.json").write_text(json.dumps(state))

    def environment(self, name: str) -> dict[str, str]:
        """The environment variables of the last call of a command."""
        found: dict[str, str] = json.loads((self.folder / f"{name}.environment").read_text())
        return found

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call of a command."""
        log = self.folder / "calls"
        found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [words for command, *words in found if command == name]


class Study:
    def __init__(self, path, runs):
        self.workspace = make_own(path / "w")
        own = self.workspace.own_templates / slurm.SCHEDULER.TEMPLATE
        own.parent.mkdir(parents=True)
        own.write_text(SCRIPT)
        (self.workspace.path / "cluster.yaml").write_text(CLUSTER)
        self.matrix = self.workspace.path / "m.yaml"
        self.matrix.write_text(MATRIX.replace("SEEDS", str(list(range(runs)))))

    def jobs(self, verb, *words):
        more = ["--matrix", str(self.matrix)] if verb == "submit" else []
        return cli.main([verb, *more, *words, "--workspace", str(self.workspace.path)])

    def statuses(self):
        return reconcile.read_statuses(self.workspace, self.workspace.list_run_dirs())

    def states(self):
        return [folder.judge().state for folder in self.workspace.list_run_dirs()]

    def times_sent(self):
        """The set of the pairs (number of events `submitted`, number of events `exited`) of all runs."""
        return {
            (
                sum(event.event == "submitted" for event in folder.read_events()),
                sum(e.event == "exited" for e in folder.read_events()),
            )
            for folder in self.workspace.list_run_dirs()
        }
