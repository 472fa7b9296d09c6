#!/usr/bin/env bash
# Ranks that are started again when one dies, on one node or on a number that may change.
#
#     bash 04_ddp_torchrun/launch/elastic.sh --checkpoint-every-steps 100
#     NNODES=1:4 RDZV_ENDPOINT=10.0.0.1:29400 bash 04_ddp_torchrun/launch/elastic.sh    on each
#
# When a rank dies or a node comes or goes, torchrun ends all ranks and starts as many as there can
# be; --resume auto lets them go on from the last checkpoint. So --run-dir must be on a disk that
# all nodes share, and the global batch must be divisible by every world size that may come up.
# Arguments go to train.py. Settings, the same on every node:
NNODES="${NNODES:-1}"                            # machines: 2, or from 1 to 4: 1:4
NPROC_PER_NODE="${NPROC_PER_NODE:-2}"            # ranks on this node: one for each GPU, or gpu
RDZV_ENDPOINT="${RDZV_ENDPOINT:-localhost:0}"    # a node and its port; 0: any free one, on one node
RDZV_ID="${RDZV_ID:-stage-04}"                   # tells jobs with the same endpoint apart
MAX_RESTARTS="${MAX_RESTARTS:-3}"                # then it gives up
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"   # threads of each rank: cores / ranks at most
SCRIPT="${SCRIPT:-04_ddp_torchrun/train.py}"     # or 05_amp_syncbn/train.py

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Else all attempts share one store, where a new one may read the old one's addresses and hang or
# fail: pytorch issue 135712, seen with torch 2.11 and 2.15.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" --max-restarts "$MAX_RESTARTS" \
    --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "$RDZV_ID" \
    "$SCRIPT" --resume auto "$@" &
agent=$!

# A job that must go gets SIGTERM first. torchrun answers it with status 1, its ranks with a
# checkpoint and status 0: hand it to the ranks. Before there are any, torchrun itself has to go.
trap 'pkill -TERM -P "$agent" || kill -TERM "$agent"' TERM
while kill -0 "$agent" 2> /dev/null; do wait "$agent" || true; done
wait "$agent" # its status is ours
