#!/usr/bin/env bash
# Several hosts. Run the same line on each, within the rendezvous' timeout of 15 minutes:
#   HEAD=10.0.0.1 NODES=2 launchers/torchrun_many_nodes.sh rag --config rag.yaml
# HEAD is one of the hosts, reachable from all at PORT. NODES may be a range, 1:4: torchrun then goes
# on with the hosts that are left, the job resumes from its last checkpoint, and MAX_RESTARTS bounds
# how often. Keep the global batch: batch.per_device_batch_size is a rank's share of it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
: "${HEAD:?address of the host where the ranks meet}" "${NODES:?number of hosts, or least:most}"

exec torchrun \
  --nnodes "$NODES" \
  --nproc_per_node "${PROCESSES:-auto}" \
  --rdzv_backend c10d \
  --rdzv_endpoint "$HEAD:${PORT:-29500}" \
  --rdzv_id "${JOB_ID:-pixelrag}" \
  --rdzv_conf "join_timeout=900" \
  --max_restarts "${MAX_RESTARTS:-0}" ${TORCHRUN_OPTIONS:-} \
  -m pixelrag "$@"
