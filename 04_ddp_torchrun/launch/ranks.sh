# shellcheck shell=bash
# Sourced by one_node.sh, two_nodes.sh and elastic.sh: run torchrun, and end as its ranks do.
#
#     source 04_ddp_torchrun/launch/ranks.sh
#     run_ranks torchrun --standalone --nproc-per-node 2 train.py
#
# It is needed for two signals. torchrun gives each rank a session of its own, so the terminal's
# signals reach torchrun, but not the ranks.
PATIENCE="${PATIENCE:-5}" # seconds from Ctrl-C until what is left is killed

set -euo pipefail

children_of() { # from Linux itself: a small container has no pgrep
    cat /proc/"$1"/task/*/children 2> /dev/null || pgrep -P "$1" 2> /dev/null || true
}

# A cluster ends a job with SIGTERM, which torchrun would answer with status 1, whatever its ranks
# do. So the ranks receive it instead: a stage ends at once, beyond/survive/train.py with a checkpoint
# and status 0. If there are no ranks yet, torchrun receives it. Until the ranks have met, there is
# nothing to save, and the status is 143 or 1.
hand_sigterm_to_the_ranks() {
    [ -n "${!:-}" ] || exit 143 # torchrun has not been started
    local ranks
    ranks="$(children_of "$!")"
    # shellcheck disable=SC2086 # one word for each rank
    kill -TERM ${ranks:-"$!"} || true
}

# Ctrl-C is SIGINT to this script and to torchrun. bash starts a background job with SIGINT ignored,
# and torchrun handles it only from the moment when it starts ranks (PContext.start). So without ranks
# it gets SIGTERM, which ends it while it imports torch or waits for other nodes. With ranks, it
# passes SIGINT on, and each rank says in a traceback where it was. It may also wait inside C++, for
# the other nodes at the end, where no handler runs. So what is left after PATIENCE is killed.
end_now() {
    trap '' INT TERM
    [ -n "${!:-}" ] || exit 130 # torchrun has not been started
    local ranks
    ranks="$(children_of "$!")"
    [ -n "$ranks" ] || kill -TERM "$!" 2> /dev/null || true
    local deadline=$((SECONDS + PATIENCE))
    while kill -0 "$!" 2> /dev/null && [ "$SECONDS" -lt "$deadline" ]; do
        sleep 0.1
    done
    kill -STOP "$!" 2> /dev/null || true # it starts no more ranks
    for rank in $ranks $(children_of "$!"); do
        kill -KILL -- "$rank" "-$rank" 2> /dev/null || true # it, and its session: its loaders
    done
    kill -KILL "$!" 2> /dev/null || true
    exit 130
}

trap hand_sigterm_to_the_ranks TERM
trap end_now INT # in vain if SIGINT was ignored from the start, as by `&` in a script: use SIGTERM

run_ranks() {
    "$@" &
    while kill -0 "$!" 2> /dev/null; do
        wait "$!" || true # a signal ends this wait, too
    done
    wait "$!" # its status is ours
}
