"""The examples in the help of `jobs` and of its verbs."""

from __future__ import annotations

EXAMPLES = {
    "plan": "jobs plan --matrix quickstart",
    "render": "jobs render --matrix quickstart --out /tmp/scripts",
    "submit": "jobs submit --matrix quickstart --wait",
    "status": "jobs status --watch",
    "logs": "jobs logs 'ddp-gpt2-tiny-*-r1' --rank 1 --follow",
    "cancel": "jobs cancel --where \"strategy == 'ddp'\"",
    "retry": "jobs retry --only failed,node_fail",
    "advise": "jobs advise --workload gpt2-large --gpus 8 --gpu a100 --link nvlink",
    "trace": "jobs trace /scratch/alice/traces --cluster cluster.yaml --wait",
    "matrices": "jobs matrices",
    "strategies": "jobs strategies --json",
    "workloads": "jobs workloads",
    "launchers": "jobs launchers",
}
EPILOG = """example:
  jobs submit --matrix quickstart --wait

`jobs` is also a builtin command of your shell. Each of these lines runs this program instead:
  env jobs status        shardlab jobs status
  eval "$(shardlab shell-init)"     after this line, `jobs status` runs this program too
"""
