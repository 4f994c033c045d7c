#!/usr/bin/env bash
# DeepSpeed's launcher, on this host or on those of a hostfile ("host1 slots=8", a line each):
#   launchers/deepspeed.sh contrastive --config run.yaml --deepspeed ds_configs/zero2.json
#   HOSTFILE=hosts launchers/deepspeed.sh ...                 from one host, over ssh by pdsh
#   HOSTFILE=hosts LAUNCHER=openmpi launchers/deepspeed.sh ... from one host, by mpirun
#   HOSTFILE=hosts NODE_RANK=0 HEAD=host1 launchers/deepspeed.sh ...   on every host, without ssh
# What environment.sh exports reaches other hosts only if ~/.deepspeed_env names it as well.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

where=()
if [ -n "${HOSTFILE:-}" ]; then
  where+=(--hostfile "$HOSTFILE" --master_port "${PORT:-29500}")
  if [ -n "${NODE_RANK:-}" ]; then
    where+=(--no_ssh --node_rank "$NODE_RANK" --master_addr "${HEAD:?address of the first host}")
  else
    where+=(--launcher "${LAUNCHER:-pdsh}")
  fi
elif [ -n "${PROCESSES:-}" ]; then
  where+=(--num_gpus "$PROCESSES")
fi

exec deepspeed "${where[@]}" --module pixelrag "$@"
