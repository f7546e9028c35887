#!/bin/bash
#SBATCH --job-name=shardlab-packages
#SBATCH --output=/scratch/alice/shardlab/python-0123456789ab/packages.log
#SBATCH --partition=gpu
#SBATCH --account=abc_g
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=15
#SBATCH --export=NONE
#SBATCH --cpus-per-task=2
#SBATCH --gpus-per-node=a100:1
# Lists the Python packages of the container in which ranks run.
set -eu
unset SLURM_EXPORT_ENV    # sbatch exports no variable of the submitting shell; srun exports those of this script
cd /scratch/alice/shardlab/python-0123456789ab
srun '--container-image=registry.example.org#lab/torch:2' --container-mounts=/scratch/alice/shardlab:/scratch/alice/shardlab,/project/data:/project/data --container-workdir=/scratch/alice/shardlab/python-0123456789ab /scratch/alice/shardlab/python-0123456789ab/bin/rank-python -c 'import sys
from importlib import metadata
print('"'"'python==%d.%d.%d'"'"' % sys.version_info[:3])
for package in metadata.distributions():
    print('"'"'%s==%s'"'"' % (package.metadata['"'"'Name'"'"'], package.version))
' > packages.new
mv packages.new packages.txt
