#!/usr/bin/env bash
# Makes two machines of one: two network namespaces, joined by a virtual cable. Runs two_nodes.sh in
# each.
#
#     sudo env "PATH=$PATH" bash 04_ddp_torchrun/launch/two_nodes_here.sh --epochs 1
#     RATE=200mbit bash 04_ddp_torchrun/launch/two_nodes_here.sh python my_script.py    as root
#
# Arguments that begin with a flag go to train.py. Other arguments are a command, which runs in both
# namespaces with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT in its environment.
# It needs root and, on Debian and Ubuntu, the package iproute2. Settings, besides two_nodes.sh's:
RATE="${RATE:-}"     # of the cable, each way, as tc writes it: 1gbit, 200mbit; empty: no limit
GRACE="${GRACE:-10}" # seconds from SIGTERM to SIGKILL for what still runs inside at the end

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ "$(id -u)" != 0 ]; then
    echo "error: network namespaces need root, this is user $(id -un): try sudo" >&2
    exit 2
fi
if [ "$#" = 0 ] || [ "${1#-}" != "$1" ]; then
    set -- bash 04_ddp_torchrun/launch/two_nodes.sh "$@"
fi

names=("ddp-$$-0" "ddp-$$-1") # of this run: another one may be under way
nodes=()                      # the process of each

inside() { # every process in the namespaces
    for name in "${names[@]}"; do
        ip netns pids "$name" 2> /dev/null || true
    done
}

wait_until_empty() { # or until so many seconds have passed
    local deadline=$((SECONDS + $1))
    while [ -n "$(inside)" ] && [ "$SECONDS" -lt "$deadline" ]; do
        sleep 0.1
    done
}

remove() { # however the script ends: first, what runs inside may end by itself
    trap '' INT TERM # once is enough
    [ "${#nodes[@]}" = 0 ] || kill -TERM "${nodes[@]}" 2> /dev/null || true
    wait_until_empty "$GRACE"
    inside | xargs -r kill -KILL || true
    wait_until_empty 5 # a process that was killed still takes a moment to end
    for name in "${names[@]}"; do
        ip netns del "$name" 2> /dev/null || true # and the cable with it
    done
}
trap remove EXIT
trap 'exit 130' INT # in vain if SIGINT was ignored from the start, as by `&` in a script: use SIGTERM
trap 'exit 143' TERM

for name in "${names[@]}"; do
    ip netns add "$name"
done
ip link add link0 netns "${names[0]}" type veth peer name link0 netns "${names[1]}"
for node in 0 1; do
    ip -n "${names[node]}" link set lo up
    ip -n "${names[node]}" link set link0 up
    ip -n "${names[node]}" address add "10.77.0.$((node + 1))/24" dev link0
    # A bucket of tokens that fills at RATE. Two settings decide whether the cable has this rate.
    # The burst must hold several of the kernel's packets of 64 KB: with 64 KB, 10gbit gives 6. The
    # queue must hold all that a connection has sent, or packets are lost.
    [ -z "$RATE" ] || tc -n "${names[node]}" qdisc add dev link0 root \
        tbf rate "$RATE" burst 256kb limit 16mb
done

export NNODES=2 MASTER_ADDR=10.77.0.1 MASTER_PORT="${MASTER_PORT:-29500}"
export GLOO_SOCKET_IFNAME=link0 NCCL_SOCKET_IFNAME=link0 # the cable, not loopback
for node in 0 1; do
    NODE_RANK=$node ip netns exec "${names[node]}" "$@" &
    nodes+=("$!")
done
wait -n # the first to end; if it failed, so does this script, and `remove` ends the other
wait "${nodes[0]}"
wait "${nodes[1]}"
