#!/bin/bash
# The Python of ranks: starts the container and, in it, the interpreter of the image. The folders of the environment, of runs
# and of data sets have the same paths in the container; the node's disk is $TMPDIR there.
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
