#!/usr/bin/env bash
# The body of the batch scripts beside it, which set the variables and source it. `--dry-run` prints what it would do; any
# other argument is a key=value for the run. In a job it starts one step over the job's nodes and decides, when that
# ends, whether the job is to go on. Without SLURM it trains on this machine.
#
# A stop notice comes as USR1 to this shell (#SBATCH --signal=B:USR1@seconds); it goes on to srun, from there to worker.sh
# on every node, and from there to the ranks, which save and end. TERM (scancel, preemption, the time limit itself) SLURM
# sends to all of them; it has then decided about the job, and this script does not.
# shellcheck disable=SC2317,SC2329

notice_came=0 notice_waits=0 term_came=0 step_process=
trap on_notice USR1
trap on_term TERM INT

say() { echo "prism [$(date '+%F %T')] $*"; }
refuse() { echo "error: $*" >&2; exit 2; }
is_in_job() { [[ -n ${SLURM_JOB_ID:-} ]]; }
is_batch() { is_in_job && [[ ${ENVIRONMENT:-} == BATCH ]]; }

on_notice() {
    ((notice_came)) && return
    say "notice: SLURM will end this job soon; the run is told to save"
    notice_came=1 notice_waits=1
}

on_term() {
    ((term_came)) || say "TERM: the end is decided; the run saves if it can"
    term_came=1
    # Outside a batch job the signal may have reached this shell alone.
    is_batch || [[ -z $step_process ]] || kill -TERM "$step_process" 2> /dev/null
}

read_arguments() {
    dry_run=0
    overrides=("${PRISM_OVERRIDES[@]+"${PRISM_OVERRIDES[@]}"}")
    local argument
    for argument in "$@"; do
        case $argument in
            --dry-run) dry_run=1 ;;
            *=*) overrides+=("$argument") ;;
            *) refuse "$argument must be --dry-run or key=value" ;;
        esac
    done
    for argument in "${overrides[@]+"${overrides[@]}"}"; do
        if [[ $argument == run_dir=* ]]; then PRISM_RUN_DIR=${argument#run_dir=}; fi
    done
}

check_settings() {
    [[ $PRISM_LAUNCH == torchrun || $PRISM_LAUNCH == srun ]] ||
        refuse "PRISM_LAUNCH=$PRISM_LAUNCH must be torchrun or srun; unset it for torchrun"
    [[ $PRISM_LAUNCH == torchrun ]] || is_in_job ||
        refuse "PRISM_LAUNCH=srun must be inside a SLURM job; unset it to train on this machine alone"
    [[ -f $PRISM_ROOT/slurm/worker.sh ]] ||
        refuse "PRISM_ROOT=$PRISM_ROOT must be the project's folder; submit from there, or set it"
    [[ $PRISM_RENDEZVOUS_S =~ ^[1-9][0-9]*$ ]] ||
        refuse "PRISM_RENDEZVOUS_S=$PRISM_RENDEZVOUS_S must be a whole number of seconds; unset it for 300"
    cd "$PRISM_ROOT" || exit 2
    [[ -f ${PRISM_CONFIG:-} ]] ||
        refuse "PRISM_CONFIG=${PRISM_CONFIG:-} must be a YAML file, seen from PRISM_ROOT=$PRISM_ROOT; for example configs/train/1b.yaml"
    [[ -n ${PRISM_RUN_DIR:-} ]] || refuse "PRISM_RUN_DIR= must name the folder of the run; set it, or add run_dir=runs/name"
}

# Ranks of a node: one for each GPU of the job there; PRISM_RANKS_PER_NODE for nodes without GPUs.
count_ranks_per_node() {
    local gpus=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-}}
    gpus=${gpus##*:}
    if [[ -z $gpus ]] && ! is_in_job && command -v nvidia-smi > /dev/null; then gpus=$(nvidia-smi -L | grep -c ^GPU); fi
    [[ -n $gpus && $gpus != 0 ]] || gpus=1
    echo "${PRISM_RANKS_PER_NODE:-$gpus}"
}

# How often this job began anew, as SLURM counts it: sbatch hands the variable of a job that submits on to the new one.
read_restarts() {
    local restarts
    restarts=$(scontrol --oneliner show job "$SLURM_JOB_ID" | grep "^JobId=$SLURM_JOB_ID " | grep -o ' Restarts=[0-9]*')
    [[ -z $restarts ]] || export SLURM_RESTART_COUNT=${restarts#*=}
}

# Where rank 0 listens: the first node's address, since its name need not resolve, and a port of this start's own.
find_meeting_point() {
    local first
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MASTER_ADDR=$(scontrol show node "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
    MASTER_PORT=$((10000 + (7 * SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 20000))
    export MASTER_ADDR=${MASTER_ADDR:-$first} MASTER_PORT
}

# srun does not take the CPUs of a task over from sbatch: they are the node's, shared out to its tasks. Nor does it pass
# this shell's variables on in a job that was submitted with --export=NONE, unless told to.
build_step() {
    local tasks_a_node=1 cpus=${SLURM_CPUS_ON_NODE:-${SLURM_JOB_CPUS_PER_NODE:-1}}
    [[ $PRISM_LAUNCH == srun ]] && tasks_a_node=$ranks_per_node
    tasks=$((nodes * tasks_a_node))
    cpus=$((${cpus%%[^0-9]*} / tasks_a_node))
    unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
    step=(srun --nodes="$nodes" --ntasks="$tasks" --ntasks-per-node="$tasks_a_node" --cpus-per-task=$((cpus > 0 ? cpus : 1))
        --kill-on-bad-exit=1 --unbuffered --export=ALL "${PRISM_SRUN_OPTIONS[@]+"${PRISM_SRUN_OPTIONS[@]}"}")
}

# CPU threads of a rank, its share of the node: torchrun would otherwise give every rank of several one thread.
count_threads() {
    local cpus=${SLURM_CPUS_ON_NODE:-}
    cpus=$((${cpus:-$(nproc)} / ranks_per_node))
    echo $((cpus > 0 ? cpus : 1))
}

describe() {
    printf '%-12s%s\n' project "$PRISM_ROOT" config "$PRISM_CONFIG" "run folder" "$PRISM_RUN_DIR" \
        keys "$(printf '%q ' "${overrides[@]+"${overrides[@]}"}")" \
        ranks "$nodes nodes x $ranks_per_node, by $PRISM_LAUNCH" \
        setup "${PRISM_SETUP:-none}" \
        preflight "$( ((PRISM_PREFLIGHT)) && echo "every node, before training" || echo none)" \
        restarts "at most $PRISM_MAX_RESTARTS; ${SLURM_RESTART_COUNT:-0} so far" \
        command "$(printf '%q ' "${step[@]+"${step[@]}"}" bash slurm/worker.sh train "${run[@]}")"
}

count_listening() { find "$PRISM_MARKS" -name "*.listens" 2> /dev/null | wc -l; }

# The job's nodes on which no rank was started; nothing where that is all of them, since srun has then said why.
list_silent_nodes() {
    local all silent
    is_in_job || return 0
    all=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    silent=$(cat "$PRISM_MARKS"/*.starts 2> /dev/null | grep -vxFf - <(echo "$all"))
    [[ $silent == "$all" ]] || paste -sd, - <<< "$silent"
}

# After a step that failed.
name_silent_nodes() {
    [[ -z $silent_nodes ]] ||
        say "error: no rank had started on $silent_nodes when the step ended; look at \`sinfo -N -l\`, at PRISM_SETUP and at" \
            "PRISM_CONTAINER there, or leave a bad node out with sbatch --exclude=$silent_nodes"
}

# Once every task of the step listens: a USR1 before that would end it. A minute after the step's start they all do.
hand_on_notice() {
    (($(count_listening) >= tasks || SECONDS - step_began_s > 60)) || return 1
    kill -USR1 "$step_process" 2> /dev/null
    notice_waits=0
}

# Runs a step to its true end: a signal that this shell traps ends `wait` early.
run_step() {
    local code
    export PRISM_MARKS=$PRISM_RUN_DIR/slurm/.tasks_${SLURM_JOB_ID:-$$}
    if ! { rm -rf "$PRISM_MARKS" && mkdir -p "$PRISM_MARKS"; }; then return 1; fi
    step_began_s=$SECONDS
    "${step[@]+"${step[@]}"}" bash slurm/worker.sh "$@" &
    step_process=$!
    while kill -0 "$step_process" 2> /dev/null; do
        if ((notice_waits)) && [[ $1 == train ]]; then
            hand_on_notice || sleep 1
        else
            wait "$step_process"
        fi
    done
    wait "$step_process"
    code=$?
    step_process=
    silent_nodes=$(list_silent_nodes)
    rm -rf "$PRISM_MARKS"
    return "$code"
}

# The state in result.json, if the step, whose exit code is $1, has written one; a run that had finished before leaves the
# one it has.
read_status() {
    local result=$PRISM_RUN_DIR/result.json status
    [[ -f $result ]] || return 0
    status=$(sed -n 's/.*"status": *"\([a-z]*\)".*/\1/p' "$result")
    if [[ ! $stamp -nt $result || ($status == finished && $1 == 0) ]]; then echo "$status"; fi
}

read_error() { sed -n 's/.*"error": *"\(.*\)",\{0,1\}$/\1/p' "$PRISM_RUN_DIR/result.json" 2> /dev/null; }

# $1 is the step's exit code. A step that lost a node does not end before SLURM knows: srun waits for that.
finish() {
    local status
    status=$(read_status "$1")
    rm -f "$stamp"
    say "the step ended with code $1; the run is ${status:-without an ending of its own}"
    case $status in
        finished) exit 0 ;;
        preempted) go_on_or_stay ;;
        failed) say "error: $(read_error)" ;;
        *) name_silent_nodes ;;
    esac
    exit $(($1 == 0 ? 1 : $1))
}

# Back into the queue, if that is this script's to decide.
go_on_or_stay() {
    if ((term_came)); then
        say "stopped; whether it starts again is SLURM's to say"
    elif ! is_batch; then
        say "stopped; the same command goes on from here"
    elif ((${SLURM_RESTART_COUNT:-0} >= PRISM_MAX_RESTARTS)); then
        say "error: PRISM_MAX_RESTARTS=$PRISM_MAX_RESTARTS is reached; submit again to go on"
        exit 1
    else
        say "stopped; back into the queue"
        # The TERM that comes now is this script's own doing.
        term_came=1
        scontrol requeue "$SLURM_JOB_ID" ||
            { say "error: SLURM did not take job $SLURM_JOB_ID back, see above; submit again to go on"; exit 1; }
        sleep 60 &
        wait "$!"
    fi
    exit 75
}

check_restarts() {
    ((${SLURM_RESTART_COUNT:-0} <= PRISM_MAX_RESTARTS)) ||
        { say "error: PRISM_MAX_RESTARTS=$PRISM_MAX_RESTARTS is passed by SLURM's own restarts; submit again to go on"; exit 1; }
}

run_preflight() {
    local code=0
    run_step preflight "${run[@]}" || code=$?
    ((term_came)) && exit 143
    ((code == 0)) || { name_silent_nodes; say "error: a node failed the preflight; see above"; exit 1; }
}

: "${PRISM_LAUNCH:=torchrun}" "${PRISM_SETUP:=}" "${PRISM_MAX_RESTARTS:=20}" "${PRISM_GRACE_S:=240}"
: "${PRISM_RENDEZVOUS_S:=300}" "${PRISM_PREFLIGHT:=1}" "${PRISM_ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}"
read_arguments "$@"
check_settings
nodes=${SLURM_JOB_NUM_NODES:-1}
ranks_per_node=$(count_ranks_per_node)
run=("$PRISM_CONFIG" "${overrides[@]+"${overrides[@]}"}" "run_dir=$PRISM_RUN_DIR")
step=() tasks=1
if is_in_job; then read_restarts; build_step; fi
describe
((dry_run)) && exit 0

export PRISM_ROOT PRISM_LAUNCH PRISM_SETUP PRISM_GRACE_S PRISM_RENDEZVOUS_S PRISM_CONTAINER=${PRISM_CONTAINER:-}
export PRISM_RANKS_PER_NODE=$ranks_per_node
mkdir -p "$PRISM_RUN_DIR/slurm" || exit 1
stamp=$PRISM_RUN_DIR/slurm/.step_began_${SLURM_JOB_ID:-$$}
check_restarts
eval "$PRISM_SETUP" || refuse "PRISM_SETUP must run without an error; see above"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(count_threads)}
export OMP_NUM_THREADS
if is_in_job; then find_meeting_point; fi
if ((PRISM_PREFLIGHT)); then run_preflight; fi
if ((term_came)); then exit 143; fi
if ((notice_came)); then say "training does not begin"; go_on_or_stay; fi
say "training begins${SLURM_JOB_ID:+ in job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1))}"
touch "$stamp"
run_step train "${run[@]}"
finish "$?"
