#!/usr/bin/env bash
# A head trained for a minute on the embedded target, then measured: gpu_head.sh PYTHON FOLDER [TINY]. See gpu.sh.
set -euo pipefail
python=$1 folder=$2 tiny=${3:-}
settings=(output="$folder/head")
[ -n "$tiny" ] && settings+=(training.max_steps=3 data.limit=8)
"$python" -m outrider.train embedded-eagle3 "${settings[@]}"
few=()
[ -n "$tiny" ] && few=(--limit 2 --max-new-tokens 16 --deepest 2 --seeds 1)
"$python" -m benchmarks.shapes --drafter "$folder/head/drafter" "${few[@]}"
