#!/usr/bin/env bash
# Starts the ranks of one node out of several. Run it on every node, at about the same time.
#
#     MASTER_ADDR=10.0.0.1 NODE_RANK=0 bash 04_ddp_torchrun/launch/two_nodes.sh    on 10.0.0.1
#     MASTER_ADDR=10.0.0.1 NODE_RANK=1 bash 04_ddp_torchrun/launch/two_nodes.sh    on the other
#
# Arguments go to train.py: the same on every node. Settings, the same everywhere but NODE_RANK:
NNODES="${NNODES:-2}"                            # machines
NODE_RANK="${NODE_RANK:-}"                       # number of this one: 0, 1, up to NNODES - 1
MASTER_ADDR="${MASTER_ADDR:-}"                   # of node 0, as every node can reach it
MASTER_PORT="${MASTER_PORT:-29500}"              # a free port of node 0, open to the others
NPROC_PER_NODE="${NPROC_PER_NODE:-1}"            # ranks on this node: one for each GPU, or gpu
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"   # threads of each rank: cores / ranks at most
SCRIPT="${SCRIPT:-04_ddp_torchrun/train.py}"     # or 05_amp_syncbn/train.py, beyond/survive/train.py
# CUDA_VISIBLE_DEVICES=0,2 leaves these two GPUs visible, as 0 and 1; it may differ between nodes.
# GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=eth0: the network that joins the nodes, if there are
# several. `ip route get ADDRESS-OF-THE-OTHER` names it after `dev`.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source 04_ddp_torchrun/launch/ranks.sh # run_ranks, and what Ctrl-C and SIGTERM do

if [ -z "$NODE_RANK" ] || [ -z "$MASTER_ADDR" ]; then
    echo "error: NODE_RANK and MASTER_ADDR have no default: set NODE_RANK to the number of this" \
        "node, from 0, and MASTER_ADDR to the address of node 0" >&2
    exit 2
fi

run_ranks torchrun \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$SCRIPT" "$@"
