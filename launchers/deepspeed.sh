#!/usr/bin/env bash
# DeepSpeed's launcher, on this host or on those of a hostfile ("host1 slots=8", a line each):
#   launchers/deepspeed.sh contrastive --config run.yaml --deepspeed ds_configs/zero2.json
#   HOSTFILE=hosts launchers/deepspeed.sh ...                 from one host, over ssh by pdsh
#   HOSTFILE=hosts LAUNCHER=openmpi launchers/deepspeed.sh ... from one host, by mpirun
#   HOSTFILE=hosts NODE_RANK=0 HEAD=host1 launchers/deepspeed.sh ...   on every host, without ssh
# Ranks meet at HEAD (default: the hostfile's first host). pdsh carries what environment.sh exports to
# other hosts only if ~/.deepspeed_env names it as well; mpirun is told to.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

where=()
if [ -n "${HOSTFILE:-}" ]; then
  head="${HEAD:-$(awk '/^[^#]/ { print $1; exit }' < "$HOSTFILE")}"
  where+=(--hostfile "$HOSTFILE" --master_addr "$head" --master_port "${PORT:-29500}")
  if [ -n "${NODE_RANK:-}" ]; then
    where+=(--no_ssh --node_rank "$NODE_RANK")
  elif [ "${LAUNCHER:-pdsh}" = openmpi ]; then
    # mpirun sets ranks, but not where they meet.
    export MASTER_ADDR="$head" MASTER_PORT="${PORT:-29500}"
    for name in MASTER_ADDR MASTER_PORT OMP_NUM_THREADS TOKENIZERS_PARALLELISM; do
      carried="${carried:-} -x $name"
    done
    where+=(--launcher openmpi --launcher_args "${carried# } ${MPIRUN_OPTIONS:-}")
  else
    # DeepSpeed hands these words to the shell of every host as they are, and pdsh replaces %.
    for word in "$PWD/." "$@"; do
      case "$word" in
        *[!A-Za-z0-9_@+=:,./\ -]* | *' '*/.)
          echo "deepspeed.sh: $word: pdsh would have a shell read it; put it into the --config file," \
            "run from a folder without spaces, or use LAUNCHER=openmpi or NODE_RANK" >&2
          exit 2 ;;
      esac
    done
    where+=(--launcher pdsh)
  fi
elif [ -n "${PROCESSES:-}" ]; then
  where+=(--num_gpus "$PROCESSES")
fi

exec deepspeed "${where[@]}" --module pixelrag "$@"
