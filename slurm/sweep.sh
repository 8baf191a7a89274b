#!/usr/bin/env bash
# One run a task: sbatch --array=0-11%4 slurm/sweep.sh RUNS [key=value ...]; --dry-run among them prints task 0's run.
# RUNS is a file with a run on each line, quoted as in a shell, line 0 first, run_dir= among its keys:
#   configs/train/130m.yaml run_dir=runs/lr3 train.optim.learning_rate=3e-4
# or a folder of configurations, sorted by name; the run of lr3.yaml is then in runs/FOLDER/lr3. Of a study's folder, which
# prism sweep wrote, RUNS is STUDY/sweep.txt or STUDY/configs; its runs are in STUDY/runs.
#SBATCH --job-name=prism-sweep
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=prism-sweep-%A_%a.log
##SBATCH --account=my_account
##SBATCH --partition=my_partition

: "${PRISM_SETUP:=source .venv/bin/activate}"

runs=${1:-}
shift
task=${SLURM_ARRAY_TASK_ID:-0}
unset PRISM_RUN_DIR
PRISM_OVERRIDES=()
if [[ -d $runs ]]; then
    configs=("$runs"/*.yaml)
    PRISM_CONFIG=${configs[task]:-}
    [[ -f $PRISM_CONFIG ]] || { echo "error: task $task of $runs must have a .yaml file; it has ${#configs[@]}" >&2; exit 2; }
    PRISM_RUN_DIR=runs/$(basename "$runs")/$(basename "$PRISM_CONFIG" .yaml)
    if [[ -f $runs/../study.yaml ]]; then PRISM_RUN_DIR=$(dirname "$runs")/runs/$(basename "$PRISM_CONFIG" .yaml); fi
else
    [[ -f $runs ]] || { echo "error: RUNS=$runs must be a file with a run on each line, or a folder" >&2; exit 2; }
    line=$(sed -n "$((task + 1))p" "$runs")
    [[ -n $line ]] || { echo "error: line $task of $runs must hold a run; it has $(wc -l < "$runs")" >&2; exit 2; }
    mapfile -t words < <(xargs printf '%s\n' <<< "$line")
    PRISM_CONFIG=${words[0]}
    PRISM_OVERRIDES=("${words[@]:1}")
fi

# shellcheck source=slurm/body.sh
source "${PRISM_ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}/slurm/body.sh"
