#!/usr/bin/env bash
# 130m: sbatch slurm/prism_130m.sh [key=value ...]; --dry-run instead prints what it would do.
#SBATCH --job-name=prism-130m
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=prism-130m-%j.log
##SBATCH --account=my_account
##SBATCH --partition=my_partition

: "${PRISM_CONFIG:=configs/train/130m.yaml}"
: "${PRISM_RUN_DIR:=runs/130m}"
: "${PRISM_SETUP:=source .venv/bin/activate}"
PRISM_OVERRIDES=(data.path=data/slimpajama)

# shellcheck source=slurm/body.sh
source "${PRISM_ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}/slurm/body.sh"
