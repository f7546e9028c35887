#!/usr/bin/env bash
# run      ddp-gpt2-tiny-0123456789ab-r1
# what     gpt2-tiny under ddp, 2 rank(s) on 1 node(s), fp32
# matrix   m (repeat 1, attempt 1), rendered 2026-01-01T00:00:00+00:00 by shardlab 0.0.0
#
# The supervisor (jobs.supervisor.attempt) claims the run, starts the step below, enforces the time limit, and records how the run ended.
# A second start of this script finds the claim and exits with code 75. jobs.ssh.step starts one task on each of the nodes in
# SHARDLAB_NODES, which the queue sets; there, jobs.supervisor.step_task samples telemetry and replaces the variables that begin with
# $SHARDLAB_. All variables below go with the tasks.
set -euo pipefail
cd '/tmp/it'"'"'s "here"
; touch owned; $(touch owned) `touch owned` #'

export PYTHONSAFEPATH=1            # a file called jobs.py in this folder must not be imported
export SHARDLAB_SOURCE='/work space/.shardlab/source/0123456789ab'  # the copy of shardlab for this run, whatever is installed later
export PYTHONPATH="$SHARDLAB_SOURCE${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1           # one processor per rank: no rank is faster because it has more threads
export CUDA_DEVICE_ORDER=PCI_BUS_ID  # numbers GPUs as NVML and nvidia-smi do
export HF_HUB_OFFLINE=1            # nothing is downloaded during a measured run
export TOKENIZERS_PARALLELISM=false
export MLFLOW_DISABLE_TELEMETRY=true  # DeepSpeed imports mlflow if it is installed

exec '/opt/my env/bin/python3' -m jobs.supervisor.attempt . -- \
  '/opt/my env/bin/python3' \
  -m \
  jobs.ssh.step \
  . \
  -- \
  '/opt/my env/bin/python3' \
  -m \
  torch.distributed.run \
  --nnodes=1 \
  --nproc-per-node=2 \
  --rdzv-backend=c10d \
  --log-dir=log \
  --max-restarts=0 \
  '--rdzv-endpoint=$SHARDLAB_RENDEZVOUS' \
  '--rdzv-conf=is_host=$SHARDLAB_IS_FIRST' \
  '--local-addr=$SHARDLAB_ADDRESS' \
  '--rdzv-id=$SHARDLAB_RENDEZVOUS_ID' \
  -m \
  trainers \
  run \
  .
