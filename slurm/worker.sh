#!/usr/bin/env bash
# worker.sh VERB CONFIG key=value ...: one task of a step. It starts this node's ranks by torchrun, or is one rank under
# srun, and hands signals on to them: SLURM with proctrack/cgroup signals this shell alone, not what it starts.
# shellcheck disable=SC2317,SC2329

notice_waits=0 child=
trap 'notice_waits=1' USR1
trap 'hand_on_term' TERM

# The child's descendants, itself among them, that catch USR1: ranks do from the moment they can save. To others it is
# deadly, or lost.
list_ranks() {
    cat /proc/[0-9]*/status 2> /dev/null | awk -v root="$child" '
        /^Pid:/ { pid = $2 }
        /^PPid:/ { parent[pid] = $2 }
        /^SigCgt:/ { if (substr($2, length($2) - 2, 1) ~ /[2367abef]/) catches[pid] = 1 }
        END {
            for (one in catches) {
                for (above = one; above > 1 && above != root; above = parent[above]);
                if (above == root) print one
            }
        }'
}

hand_on() {
    local ranks
    mapfile -t ranks < <(list_ranks)
    ((${#ranks[@]})) && kill "-$1" "${ranks[@]}" 2> /dev/null
}

# Ranks that cannot save yet end with their launcher.
hand_on_term() {
    [[ -n $child ]] || exit 143
    hand_on TERM || kill -TERM "$child" 2> /dev/null
}

# Marks, which hold the node's name, tell the batch script who listens and who starts its ranks.
mark() {
    [[ -z ${PRISM_MARKS:-} ]] || echo "${SLURMD_NODENAME:-}" 2> /dev/null > "$PRISM_MARKS/${SLURM_PROCID:-0}.$1"
}

mark listens
eval "${PRISM_SETUP:-}" || { echo "error: PRISM_SETUP must run without an error; see above" >&2; exit 2; }

verb=$1
shift
# torchrun ends the other nodes' ranks, which may still be writing, on any exit code but 0. How the run ended is in
# result.json.
export PRISM_PREEMPTED_EXIT=0
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${PRISM_GRACE_S:-240}
command=(python -m launcher "$verb" "$@")
if [[ ${PRISM_LAUNCH:-torchrun} == torchrun && $verb == train ]]; then
    place=(--nnodes="${SLURM_JOB_NUM_NODES:-1}" --node-rank="${SLURM_NODEID:-0}" --nproc-per-node="$PRISM_RANKS_PER_NODE")
    if [[ -n ${MASTER_ADDR:-} ]]; then
        place+=(--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --rdzv-conf="timeout=$PRISM_RENDEZVOUS_S")
    else
        place+=(--standalone)
    fi
    command=(python -m torch.distributed.run "${place[@]}" -m launcher "$verb" "$@")
fi

# USR1 is ignored until the ranks catch it. PRISM_CONTAINER is split into words: it is a command such as apptainer exec.
mark starts
# shellcheck disable=SC2086
(trap '' USR1 && exec ${PRISM_CONTAINER:-} "${command[@]}") &
child=$!

# A signal ends `wait` early; a child that has ended is remembered with its code.
while kill -0 "$child" 2> /dev/null; do
    if ((notice_waits)); then
        if hand_on USR1; then notice_waits=0; else sleep 0.5; fi
    else
        wait "$child"
    fi
done
wait "$child"
exit "$?"
