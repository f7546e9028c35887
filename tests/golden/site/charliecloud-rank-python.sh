#!/bin/bash
# The Python of ranks: starts the container and, in it, the interpreter of the image. The folders of the environment, of runs
# and of data sets have the same paths in the container; the node's disk is $TMPDIR there.
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
    unset PYTHONHOME    # of a module of the site, for another interpreter
    export SHARDLAB_CONTAINER=/project/torch.sif
    variables=(--unset-env='LD_*')    # of modules of the site
    [ -d /project/torch.sif ] && [ ! -f /project/torch.sif/ch/environment ] || variables+=(--set-env)    # the image's own
    export USER="${USER:-$(id -un)}"    # ch-run requires it
    export SHARDLAB_GIVEN_TMPDIR=/tmp    # ch-run mounts the node's $TMPDIR or /tmp there, and unsets TMPDIR
    exec ch-run "${variables[@]}" \
        --bind /scratch/alice/shardlab:/scratch/alice/shardlab \
        --bind /project/data:/project/data \
        --cd "$PWD" /project/torch.sif -- /scratch/alice/shardlab/python-0123456789ab/bin/rank-python "$@"
fi
for name in ${!SHARDLAB_GIVEN_@}; do
    export "${name#SHARDLAB_GIVEN_}=${!name}"
    unset "$name"    # a later start in the container gets what its parent sets
done
export PYTHONNOUSERSITE=1    # packages under $HOME are for another interpreter
export PIP_CACHE_DIR=/scratch/alice/shardlab/cache/pip
export XDG_CACHE_HOME=/scratch/alice/shardlab/cache
export TORCHINDUCTOR_CACHE_DIR=/scratch/alice/shardlab/cache/inductor
export TRITON_CACHE_DIR=/scratch/alice/shardlab/cache/triton
export TORCH_EXTENSIONS_DIR=/scratch/alice/shardlab/cache/torch_extensions
export CUDA_CACHE_PATH=/scratch/alice/shardlab/cache/cuda
export PYTHONPATH=/scratch/alice/shardlab/python-0123456789ab/source-ba9876543210
[ -z "${SHARDLAB_SOURCE:-}" ] || export PYTHONPATH="$SHARDLAB_SOURCE"    # a run uses the copy of its submission
exec python3 "$@"
