#!/bin/bash
#SBATCH --job-name=shardlab-prove
#SBATCH --output=/scratch/alice/shardlab/proofs/0/prove.log
#SBATCH --partition=gpu
#SBATCH --account=abc_g
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=20
#SBATCH --export=NONE
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gpus-per-node=a100:4
#SBATCH --no-requeue
# Proves that nodes of the type nodes with 64 CPUs and 4 GPUs a100 can train: each node writes what it finds to /scratch/alice/shardlab/proofs/0.
export PYTHONSAFEPATH=1
unset SLURM_EXPORT_ENV    # sbatch exports no variable of the submitting shell; srun exports those of this script
cd /scratch/alice/shardlab/proofs/0
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=0 /scratch/alice/shardlab/python-0123456789ab/bin/rank-python -m provision.checks._prove_node /scratch/alice/shardlab/proofs/0 "$head"
