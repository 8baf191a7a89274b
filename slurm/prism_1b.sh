#!/usr/bin/env bash
# 1b: sbatch slurm/prism_1b.sh [key=value ...]; --dry-run instead prints what it would do.
#SBATCH --job-name=prism-1b
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=prism-1b-%j.log
##SBATCH --account=my_account
##SBATCH --partition=my_partition

: "${PRISM_CONFIG:=configs/train/1b.yaml}"
: "${PRISM_RUN_DIR:=runs/1b}"
: "${PRISM_SETUP:=source .venv/bin/activate}"
PRISM_OVERRIDES=(data.path=data/slimpajama)

# shellcheck source=slurm/body.sh
source "${PRISM_ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}/slurm/body.sh"
