#!/usr/bin/env bash
# One host, one process a device:
#   launchers/torchrun_one_node.sh contrastive --config run.yaml
#   PROCESSES=2 launchers/torchrun_one_node.sh distill --config distill.yaml
# A worker that dies is started again MAX_RESTARTS times; the job resumes from its last checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

exec torchrun --standalone \
  --nproc_per_node "${PROCESSES:-auto}" \
  --max_restarts "${MAX_RESTARTS:-0}" ${TORCHRUN_OPTIONS:-} \
  -m pixelrag "$@"
