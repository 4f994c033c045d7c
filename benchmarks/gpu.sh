#!/usr/bin/env bash
# Every suite on this node's GPU, and their report, in under eight minutes.
#
#   benchmarks/gpu.sh [FOLDER]              results and report.html, report.md (default bench-gpu)
#   PROFILE=b200 benchmarks/gpu.sh          default: b200 on a B200, else h200
#   PIXELRAG="python -m pixelrag" ...       default: pixelrag
#
# A suite that is not done within its share of the time is ended; what it had measured stays, and
# the last lines say which suites those were.
set -uo pipefail

folder=${1:-bench-gpu}
profile=${PROFILE:-}
read -ra pixelrag <<< "${PIXELRAG:-pixelrag}"
# Suite, and seconds that it may take: 460 in all.
shares=${SHARES:-"attention 40 kd-chunk 100 packing 120 gradcache 80 engine 60 data 20 rag-refresh 40"}

if [ -z "$profile" ]; then
  name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
  if [ -z "$name" ]; then
    echo "gpu.sh: nvidia-smi shows no GPU; to rehearse on the CPU say PROFILE=cpu-smoke" >&2
    exit 2
  fi
  case $name in *B200*) profile=b200 ;; *) profile=h200 ;; esac
  echo "$name: profile $profile"
fi

mkdir -p "$folder" || exit 2
late=() failed=()
read -ra shares <<< "$shares"
for ((i = 0; i < ${#shares[@]}; i += 2)); do
  suite=${shares[i]} seconds=${shares[i + 1]}
  timeout --kill-after=5 "$seconds" "${pixelrag[@]}" bench "$suite" --profile "$profile" \
    --output "$folder" --run.rounds=5 --run.warmup=2
  case $? in
    0) ;;
    124 | 137) late+=("$suite ($seconds s)") ;;
    *) failed+=("$suite") ;;
  esac
done

shopt -s nullglob
results=("$folder"/*.jsonl)
if [ ${#results[@]} -gt 0 ]; then
  "${pixelrag[@]}" bench --report "${results[@]}" --output "$folder" || failed+=(report)
fi
[ ${#late[@]} -eq 0 ] || echo "gpu.sh: ended before they were done: ${late[*]}"
[ ${#failed[@]} -eq 0 ] || { echo "gpu.sh: failed: ${failed[*]}" >&2; exit 1; }
[ ${#results[@]} -gt 0 ] || { echo "gpu.sh: nothing was measured" >&2; exit 1; }
