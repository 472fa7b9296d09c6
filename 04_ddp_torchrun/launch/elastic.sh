#!/usr/bin/env bash
# Restarts all ranks when one of them dies, on one node or on a number of nodes that may change.
#
#     bash 04_ddp_torchrun/launch/elastic.sh --checkpoint-every-steps 100
#     NNODES=1:4 RDZV_ENDPOINT=10.0.0.1:29400 bash 04_ddp_torchrun/launch/elastic.sh    on each
#
# When a rank dies, or a node joins or leaves, torchrun ends all ranks and starts as many as the
# nodes allow. --resume auto continues from the last checkpoint. So --run-dir must be on a disk that
# all nodes share, and every possible world size must divide the global batch.
# Arguments go to train.py. Settings, the same on every node:
NNODES="${NNODES:-1}"                            # machines: 2, or 1:4 for 1 to 4
NPROC_PER_NODE="${NPROC_PER_NODE:-2}"            # ranks on this node: one for each GPU, or gpu
RDZV_ENDPOINT="${RDZV_ENDPOINT:-localhost:0}"    # a node and its port; 0: any free one, on one node
RDZV_ID="${RDZV_ID:-survive}"                    # tells jobs with the same endpoint apart
MAX_RESTARTS="${MAX_RESTARTS:-3}"                # then it gives up
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"   # threads of each rank: cores / ranks at most
SCRIPT="${SCRIPT:-beyond/survive/train.py}"      # a stage would die at SIGTERM, and be restarted

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source 04_ddp_torchrun/launch/ranks.sh # run_ranks, and what Ctrl-C and SIGTERM do

# Without this, all attempts share one store. The ranks of a new attempt may read addresses that
# the old ones left there, and hang or fail: pytorch issue 135712, seen with torch 2.11 and 2.15.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

run_ranks torchrun \
    --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" --max-restarts "$MAX_RESTARTS" \
    --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "$RDZV_ID" \
    "$SCRIPT" --resume auto "$@"
