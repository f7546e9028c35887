#!/usr/bin/env bash
# run      ddp-gpt2-tiny-0123456789ab-r1
# what     gpt2-tiny under ddp, 2 rank(s), fp32
# matrix   m (repeat 1, attempt 1), rendered 2026-01-01T00:00:00+00:00 by shardlab 0.0.0
#
# The supervisor (jobs.supervisor.attempt) claims the run, starts the telemetry sampler and the ranks, enforces the time limit, and
# records how the run ended. A second start of this script finds the claim and exits with code 75.
set -euo pipefail
cd '/tmp/it'"'"'s "here"
; touch owned; $(touch owned) `touch owned` #'

export PYTHONSAFEPATH=1            # a file called jobs.py in this folder must not be imported
export SHARDLAB_SOURCE='/work space/.shardlab/source/0123456789ab'  # the copy of shardlab for this run, whatever is installed later
export PYTHONPATH="$SHARDLAB_SOURCE${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1           # one processor per rank: no rank is faster because it has more threads
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"  # all ranks are on this machine, so its name need not resolve
export CUDA_DEVICE_ORDER=PCI_BUS_ID  # numbers GPUs as NVML and nvidia-smi do
export HF_HUB_OFFLINE=1            # nothing is downloaded during a measured run
export TOKENIZERS_PARALLELISM=false
export MLFLOW_DISABLE_TELEMETRY=true  # DeepSpeed imports mlflow if it is installed

exec '/opt/my env/bin/python3' -m jobs.supervisor.attempt . -- \
  '/opt/my env/bin/python3' \
  -m \
  trainers \
  run \
  .
