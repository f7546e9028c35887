#!/bin/bash
# The Python of shardlab at this site: loads the site's modules, then starts the interpreter of the environment.
# Everything that this process starts inherits the modules; they are loaded once.
if [ "${SHARDLAB_PYTHON:-}" != /scratch/alice/shardlab/python-0123456789ab/bin/python ]; then
    source /etc/profile > /dev/null 2>&1
    module load containers/1.3 || { echo "the module "containers/1.3" cannot be loaded on $(hostname)" >&2; exit 1; }
    export SHARDLAB_PYTHON=/scratch/alice/shardlab/python-0123456789ab/bin/python    # job scripts start this file, not the interpreter
fi
if [ "${SHARDLAB_CONTAINER:-}" != /project/torch.sif ]; then
    [[ "${TMPDIR:-}" == /* && -d "$TMPDIR" ]] || unset TMPDIR    # then /tmp is the node's disk
    # The variables of an image hide variables of the same name. The script in the container restores these from their copies.
    for name in OMP_NUM_THREADS CUDA_DEVICE_ORDER HF_HUB_OFFLINE TOKENIZERS_PARALLELISM MLFLOW_DISABLE_TELEMETRY \
        PYTHONSAFEPATH PYTHONUNBUFFERED TMPDIR ${!NCCL_@}; do
        [ -z "${!name+set}" ] || export "SHARDLAB_GIVEN_$name=${!name}"
    done
fi
export PIP_CACHE_DIR=/scratch/alice/shardlab/cache/pip
export XDG_CACHE_HOME=/scratch/alice/shardlab/cache
export TORCHINDUCTOR_CACHE_DIR=/scratch/alice/shardlab/cache/inductor
export TRITON_CACHE_DIR=/scratch/alice/shardlab/cache/triton
export TORCH_EXTENSIONS_DIR=/scratch/alice/shardlab/cache/torch_extensions
export CUDA_CACHE_PATH=/scratch/alice/shardlab/cache/cuda
export PYTHONPATH=/scratch/alice/shardlab/python-0123456789ab/source-ba9876543210
[ -z "${SHARDLAB_SOURCE:-}" ] || export PYTHONPATH="$SHARDLAB_SOURCE"    # a run uses the copy of its submission
exec /scratch/alice/shardlab/python-0123456789ab/venv/bin/python "$@"
