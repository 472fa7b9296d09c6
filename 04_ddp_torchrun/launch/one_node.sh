#!/usr/bin/env bash
# Starts all ranks on this machine.
#
#     NPROC_PER_NODE=4 bash 04_ddp_torchrun/launch/one_node.sh --epochs 3
#
# Arguments go to train.py. Paths in them count from the root of the repository. Settings:
NPROC_PER_NODE="${NPROC_PER_NODE:-2}"            # ranks to start: one for each GPU, or the word gpu
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"   # threads of each rank: cores / ranks at most
SCRIPT="${SCRIPT:-04_ddp_torchrun/train.py}"     # or 05_amp_syncbn/train.py, beyond/survive/train.py
# CUDA_VISIBLE_DEVICES=0,2 leaves these two GPUs visible, as 0 and 1: rank 1 takes GPU 2.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source 04_ddp_torchrun/launch/ranks.sh # run_ranks, and what Ctrl-C and SIGTERM do

# --standalone: one node, on a port that is free. --local-addr: without it, the ranks meet at the name
# of this machine, and wait for minutes where it cannot resolve its own name.
run_ranks torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node "$NPROC_PER_NODE" "$SCRIPT" "$@"
