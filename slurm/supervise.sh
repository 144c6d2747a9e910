# shellcheck shell=bash
# Part of nemo_specrl: functions for the batch scripts in this folder, to name bad input, and to
# decide what becomes of a job whose training has ended.
#
# `#SBATCH --requeue` alone does not help where a node dies. Ray and the training notice it within
# seconds and end; Slurm notices it minutes later (SlurmdTimeout), and by then the job has failed
# with the training's exit code. A GPU or a link that fails is not noticed by Slurm at all. So the
# batch script starts the training again after any failure, unless the training says by its exit code
# that it would fail the same way again (2), or starts no longer bring a new checkpoint: on the nodes
# that the job has where that can help (nemo_rl.sub; train.sbatch has ft_launcher for it), else by
# putting the job back into the queue, without nodes that are at fault.
#
# Variables that these functions read:
#   SCRIPT               name of the batch script, for its messages
#   STATE                folder on a disk that all nodes see, for what has to outlive a restart
#   OWN_FOLDERS          array of folders on each node that are removed when a start of the job is over
#   CHECKPOINTS          folder with the training's step_N; empty or missing: there is none yet
#   CHECKPOINT_AT_START  number of the newest one when this start began; empty: none
#   IN_JOB_RESTARTS      how often the training was started again within this start of the job
#   SPECRL_MAX_RESTARTS  how often a job starts again (default: 50)
#   SPECRL_MAX_STALLED   how often without a new checkpoint in between (default: 3)
#
# Exit code of a job that ends because of the limits: the training's own where it failed, else 75
# (EX_TEMPFAIL).

PROBE_SECONDS=15
PROBES_AT_ONCE=8
CONTROLLER_SECONDS=120

OWN_FOLDERS=() CHECKPOINTS='' CHECKPOINT_AT_START='' IN_JOB_RESTARTS=0

# What Slurm calls this job. The number alone may stand for a whole array.
JOB=${SLURM_JOB_ID:-}
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

say() { echo "$(date +%FT%T) $SCRIPT: $*" >&2; }

# No command of the scripts fails without a line.
set -E
trap 'say "line $LINENO of ${BASH_SOURCE[0]##*/}: exit code $? of: ${BASH_COMMAND%%$'"'\\\\n'"'*}"' ERR

# Name something wrong with the input; the script ends after all of its checks, if `wrong` is 1.
# shellcheck disable=SC2034 # read by the scripts
wrong=0
# shellcheck disable=SC2034
bad() {
    echo "$SCRIPT: $*" >&2
    wrong=1
}

# Name those of the variables $@ that are set, and not to a whole number. With more digits, bash would
# reckon with another number.
whole_numbers() {
    local name
    for name in "$@"; do
        [[ ${!name:-0} =~ ^(0|[1-9][0-9]{0,8})$ ]] ||
            bad "$name=${!name}: must be a whole number, of nine digits at most"
    done
}

# Name those of the variables $@ that are set, and not to the path of a folder. A ~ that the shell has
# not replaced, None and null are names of folders to other programs.
folders() {
    local name value
    for name in "$@"; do
        value=${!name:-}
        [[ -n $value ]] || continue
        if [[ $value == '~'* || ${value,,} == none || ${value,,} == null || $value == *[[:cntrl:]]* ]]; then
            bad "$name=$value: must be the path of a folder; without one, leave it out"
        fi
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

# Add Hugging Face's folders to `mounts` where the user has named them and the container would not
# see them. It would load each model anew, into a folder that is gone with the container.
mount_hugging_face() {
    local name folder
    for name in HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE; do
        folder=${!name:-}
        [[ -n $folder ]] || continue
        if [[ $folder != /* || $folder == *[,:]* || ! -d $folder ]]; then
            bad "$name=$folder: must be the absolute path of a folder, without , and : to be mounted"
        else
            mounted "$folder" "$mounts" || mounts+=,$folder:$folder
        fi
    done
}

# Make Ray ask everyone for a token of this job's own; its ports are open to the network. $1: file for
# it, on a disk that all nodes see. The user may have chosen otherwise.
want_ray_token() {
    [[ ${RAY_AUTH_MODE:-token} == token && -z ${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-} ]] || return 0
    rm -f "$1"
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$1")
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$1
}

# --- what Slurm knows of the job ------------------------------------------------------------------

# Field $1 of the job, as Slurm shows it; nothing where it does not answer at the third time.
job_field() {
    local shown=''
    for _ in 1 2 3; do
        if shown=$(scontrol show job "$JOB" 2>/dev/null); then break; fi
        sleep 2 || true
    done
    sed -n "s/^\(.* \)*$1=\([^ ]*\).*/\2/p;T;q" <<<"$shown"
}

# Whether Slurm has decided that this start of the job is over: cancelled, preempted or out of time.
ended_by_slurm() {
    local now
    now=$(job_field JobState)
    [[ -n $now && $now != RUNNING ]]
}

# When the job's time limit is reached, in seconds since 1970; nothing where there is none, and
# outside of a job.
end_time() {
    local end
    [[ -n $JOB ]] || return 0
    end=$(job_field EndTime)
    [[ $end == [0-9]* ]] || return 0 # Unknown
    date +%s --date="$end"
}

seconds_left() {
    local end
    end=$(end_time)
    [[ -z $end ]] || echo $((end - $(date +%s)))
}

# --- nodes and checkpoints ------------------------------------------------------------------------

# Run on a node: print what its GPUs or its InfiniBand report, if that is a fault. $1: folder in which
# the number of links that were up when the job began is kept.
# shellcheck disable=SC2016 # expanded on the node
HEALTH='
up=$(cat /sys/class/infiniband/*/ports/*/state 2>/dev/null | grep -c ACTIVE)
read -r before 2>/dev/null <"$1/links-$SLURMD_NODENAME" || echo "$up" >"$1/links-$SLURMD_NODENAME"
[ "$up" -ge "${before:-0}" ] || echo "$up of $before InfiniBand links are up"
command -v nvidia-smi >/dev/null || exit 0
shown=$(timeout 10 nvidia-smi -q 2>&1) || { echo "$shown" | grep -i -m 1 "lost\|handle\|error"; exit 0; }
echo "$shown" | grep "Recovery Action\|Remapping Failure" | grep -v -i -m 1 ": *\(none\|no\|n/a\)$" | xargs
exit 0'

# Start a process on node $1 within $2 seconds, which cleans up there and says what is at fault.
# shellcheck disable=SC2016 # expanded on the node
probe() {
    timeout -k 5 "$2" srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --mpi=none bash -c \
        'state=$1 health=$2 && shift 2 && rm -rf -- "$@"; bash -c "$health" health "$state"' \
        clean-up "${STATE:-/nonexistent}" "$HEALTH" "${OWN_FOLDERS[@]}" 2>/dev/null </dev/null
}

# Note in $STATE/suspects that node $1 failed: fault or silent, and what it says.
suspect() {
    [[ $2 == silent ]] || say "$1 reports a fault: ${*:3}"
    [[ -z ${STATE:-} ]] || echo "$*" >>"$STATE/suspects"
}

# Nodes to be left out: those that reported a fault, or did not answer twice.
excluded() {
    [[ ! -s $STATE/suspects ]] ||
        awk '{failures[$1] += $2 == "fault" ? 2 : 1}
            END {for (node in failures) if (failures[node] > 1) print node}' "$STATE/suspects" | sort | paste -sd, -
}

# Those of the job's nodes that start no process in time; the others clean up, and those at fault are
# suspects. How long that takes depends on Slurm's controller, too. This script's own node is alive, so
# that it tells how long.
dead_nodes() {
    local node own begun=$SECONDS allowed fault
    local -a names
    ! ended_by_slurm || return 0 # it starts no processes for this job any more
    mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    own=${SLURMD_NODENAME:-${names[0]}}
    if fault=$(probe "$own" "$CONTROLLER_SECONDS"); then
        [[ -z $fault ]] || suspect "$own" fault "$fault"
    else
        say "Slurm started no process on $own within $CONTROLLER_SECONDS s: which nodes answer is not known"
        return 0
    fi
    allowed=$((PROBE_SECONDS + 4 * (SECONDS - begun)))
    {
        local count=0
        for node in "${names[@]}"; do
            [[ $node != "$own" ]] || continue
            (
                if fault=$(probe "$node" "$allowed"); then
                    [[ -z $fault ]] || suspect "$node" fault "$fault"
                else
                    suspect "$node" silent
                    echo "$node"
                fi
            ) &
            ((++count % PROBES_AT_ONCE)) || wait
        done
        wait
    } | sort | paste -sd, -
}

newest_checkpoint() {
    [[ -n $CHECKPOINTS && -d $CHECKPOINTS ]] || return 0
    find "$CHECKPOINTS" -maxdepth 1 -name 'step_*' -printf '%f\n' | sed -n 's/^step_\([0-9]*\)$/\1/p' | sort -n | tail -n 1
}

# How many of the last restarts, without a gap, began at the checkpoint that is the newest now.
stalled_restarts() {
    local newest=$1 count=0 checkpoint
    [[ -f $STATE/restarts ]] || { echo 0; return; }
    while read -r _ checkpoint _; do
        if [[ $checkpoint == "${newest:-none}" ]]; then count=$((count + 1)); else count=0; fi
    done <"$STATE/restarts"
    echo "$count"
}

# --- what becomes of the job ----------------------------------------------------------------------

# Put the job back into the queue because of ${@:2}, unless a limit is reached; then it ends with
# exit code $1. Does not return.
start_again() {
    local code=$1 restarts=${SLURM_RESTART_COUNT:-0} newest stalled
    local most=${SPECRL_MAX_RESTARTS:-50} patience=${SPECRL_MAX_STALLED:-3} leave_out others
    shift
    if ended_by_slurm; then
        say "$*; Slurm is ending this job (state $(job_field JobState)), which decides whether it starts again"
        exit "$code"
    fi
    newest=$(newest_checkpoint)
    stalled=$(($(stalled_restarts "$newest") + IN_JOB_RESTARTS))
    if ((restarts >= most)); then
        say "$*; not started again: SPECRL_MAX_RESTARTS=$most is reached"
        exit "$code"
    elif ((stalled >= patience)) && [[ $newest == "$CHECKPOINT_AT_START" ]]; then
        say "$*; not started again: $stalled restarts have brought no checkpoint after" \
            "step ${newest:-0} (SPECRL_MAX_STALLED=$patience); look at the logs in $STATE"
        exit "$code"
    fi
    echo "$((restarts + 1)) ${newest:-none} $*" >>"$STATE/restarts"
    say "$*; starting again (restart $((restarts + 1)) of at most $most), from checkpoint" \
        "${newest:-none}"
    trap 'exit 75' TERM # which Slurm sends now
    leave_out=$(excluded)
    [[ -z $leave_out ]] || trap '' TERM # not before the nodes are left out
    if ! scontrol requeue "$JOB"; then
        say "Slurm does not take the job back; submit it again to go on"
        exit "$code"
    fi
    if [[ -n $leave_out ]]; then
        others=$(job_field ExcNodeList)
        [[ $others != '(null)' ]] || others=''
        if scontrol update "jobid=$JOB" "excnodelist=${others:+$others,}$leave_out"; then
            say "left out from now on: $leave_out; to take it back: scontrol update jobid=$JOB excnodelist="
        fi
        exit 75
    fi
    sleep 300 || true # Slurm ends this script
    exit "$code"
}

# Note that the training starts again on the nodes that the job has, because of ${*:2}. Fails where that
# cannot help: a node does not answer ($1) or is at fault, Slurm wants the nodes, the last start here
# brought no checkpoint, or a limit is reached.
tried_here=0
start_again_here() {
    local dead=$1 newest node leave_out
    shift
    newest=$(newest_checkpoint)
    leave_out=,$(excluded),
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        [[ $leave_out != *,$node,* ]] || return 1
    done
    if [[ -n $dead || $(job_field PreemptTime) == [0-9]* ]] || ended_by_slurm; then return 1; fi
    if [[ $newest == "$CHECKPOINT_AT_START" ]]; then
        ((!tried_here && $(stalled_restarts "$newest") < ${SPECRL_MAX_STALLED:-3})) || return 1
    fi
    tried_here=1 CHECKPOINT_AT_START=$newest
    echo "${SLURM_RESTART_COUNT:-0} ${newest:-none} $*" >>"$STATE/restarts"
    say "$*; starting again on the same nodes, from checkpoint ${newest:-none}"
}

# Decide what a training's end with exit code $1 means; $2: a word on what ended. Does not return.
end_with() {
    local code=$1 dead
    if ((code != 0)) && ended_by_slurm; then
        say "$2 ended with exit code $code, as Slurm ended this job: it was cancelled, preempted or out of time"
        exit "$code"
    fi
    dead=$(dead_nodes)
    if ((code == 2)); then # a restart would meet it again
        say "$2 ended with exit code 2, which is bad input or a full disk: not started again"
    elif ((code == 126 || code == 127)); then
        say "$2 ended with exit code $code: its program was not found or could not be run; not started again"
    elif ((code != 0)); then
        start_again "$code" "${dead:+no answer from $dead: }$2 ended with exit code $code"
    fi
    exit "$code"
}
