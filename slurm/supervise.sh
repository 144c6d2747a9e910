# shellcheck shell=bash
# Functions for the batch scripts in this folder: to name bad input, and to decide what becomes of a
# job whose training has ended.
#
# `#SBATCH --requeue` alone does not help where a node dies. Ray and the training notice it within
# seconds and end; Slurm notices it minutes later (SlurmdTimeout), and by then the job has failed
# with the training's exit code. So the batch script asks each node whether it still answers.
#
# Variables that these functions read:
#   SCRIPT               name of the batch script, for its messages
#   STATE                folder on a disk that all nodes see, for what has to outlive a restart
#   CLEAN_UP             what each node has to do when a start of the job is over, for bash; may be empty
#   CHECKPOINTS          folder with the training's step_N; empty: progress is not known
#   SPECRL_MAX_RESTARTS  how often a job starts again (default: 50)
#   SPECRL_MAX_STALLED   how often without a new checkpoint in between (default: 5)
#
# Exit code of a job that ends because of the limits: 75 (EX_TEMPFAIL).

PROBE_SECONDS=15
PROBES_AT_ONCE=32

say() { echo "$(date +%FT%T) $SCRIPT: $*" >&2; }

# Name something wrong with the input; the script ends after all of its checks, if `wrong` is 1.
# shellcheck disable=SC2034 # read by the scripts
wrong=0
# shellcheck disable=SC2034
bad() {
    echo "$SCRIPT: $*" >&2
    wrong=1
}

# Name those of the variables $@ that are set, and not to a whole number.
whole_numbers() {
    local name
    for name in "$@"; do
        [[ ${!name:-0} =~ ^(0|[1-9][0-9]*)$ ]] || bad "$name=${!name}: must be a whole number"
    done
}

# Whether a container with the mounts $2 (SOURCE:TARGET[:FLAGS],...) sees path $1 under the same name.
mounted() {
    local entry parts target
    local -a entries
    IFS=, read -ra entries <<<"$2"
    for entry in "${entries[@]}"; do
        IFS=: read -ra parts <<<"$entry"
        target=${parts[1]:-${parts[0]}}
        [[ ${parts[0]%/} == "${target%/}" && $1/ == "${target%/}"/* ]] && return 0
    done
    return 1
}

# Make Ray ask everyone for a token of this job's own; its ports are open to the network. $1: file for
# it, on a disk that all nodes see. The user may have chosen otherwise.
want_ray_token() {
    [[ ${RAY_AUTH_MODE:-token} == token && -z ${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-} ]] || return 0
    rm -f "$1"
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$1")
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$1
}

# Those of the job's nodes that do not start a process within PROBE_SECONDS. The others clean up.
dead_nodes() {
    # shellcheck disable=SC2016 # expanded by the shell of each probe
    scontrol show hostnames "$SLURM_JOB_NODELIST" | xargs -P "$PROBES_AT_ONCE" -I NODE bash -c '
        timeout -k 5 "$1" srun --overlap --nodes=1 --ntasks=1 --nodelist="$2" --mpi=none \
            bash -c "$3; true" >/dev/null 2>&1 || echo "$2"' \
        probe "$PROBE_SECONDS" NODE "${CLEAN_UP:-true}" | sort | paste -sd, -
}

newest_checkpoint() {
    [[ -d $CHECKPOINTS ]] || return 0
    find "$CHECKPOINTS" -maxdepth 1 -name 'step_*' -printf '%f\n' | sed 's/^step_//' | sort -n | tail -n 1
}

# How many of the last restarts, without a gap, began at the checkpoint that is the newest now.
stalled_restarts() {
    local newest=$1 count=0 checkpoint
    [[ -n $CHECKPOINTS && -f $STATE/restarts ]] || { echo 0; return; }
    while read -r _ checkpoint _; do
        if [[ $checkpoint == "${newest:-none}" ]]; then count=$((count + 1)); else count=0; fi
    done <"$STATE/restarts"
    echo "$count"
}

# Put the job back into the queue because of $*, unless a limit is reached. Does not return.
start_again() {
    local restarts=${SLURM_RESTART_COUNT:-0} newest stalled
    local most=${SPECRL_MAX_RESTARTS:-50} patience=${SPECRL_MAX_STALLED:-5}
    newest=$(newest_checkpoint)
    stalled=$(stalled_restarts "$newest")
    if ((restarts >= most)); then
        say "$*; not started again: SPECRL_MAX_RESTARTS=$most is reached"
        exit 75
    elif ((stalled >= patience)); then
        say "$*; not started again: $stalled restarts have brought no checkpoint after" \
            "step ${newest:-0} (SPECRL_MAX_STALLED=$patience); look at the logs in $STATE"
        exit 75
    fi
    echo "$((restarts + 1)) ${newest:-none} $*" >>"$STATE/restarts"
    say "$*; starting again (restart $((restarts + 1)) of at most $most), from checkpoint" \
        "${newest:-none}"
    if ! scontrol requeue "$SLURM_JOB_ID"; then
        say "Slurm does not take the job back; submit it again to go on"
        exit 75
    fi
    sleep 300 # Slurm ends this script
    exit 75
}

# Decide what a training's end with exit code $1 means; $2: a word on what ended. Does not return.
end_with() {
    local dead
    dead=$(dead_nodes)
    if (($1 != 0)); then
        [[ -z $dead ]] || start_again "no answer from $dead"
        say "$2 ended with exit code $1, and all nodes answer: not started again"
    fi
    exit "$1"
}

# Seconds until the job's time limit; nothing where there is none, and outside of a job.
seconds_left() {
    local end
    [[ -n ${SLURM_JOB_ID:-} ]] || return 0
    # Of a job array's first task Slurm shows all others, too.
    end=$(scontrol show job --oneliner "$SLURM_JOB_ID" |
        sed -n "s/^JobId=$SLURM_JOB_ID .* EndTime=\([^ ]*\).*/\1/p")
    [[ $end == [0-9]* ]] || return 0 # Unknown
    echo $(($(date +%s --date="$end") - $(date +%s)))
}
