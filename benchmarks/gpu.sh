#!/usr/bin/env bash
# The first half hour on a GPU: ./benchmarks/gpu.sh [--out FOLDER] [--tiny] [--heads FOLDER] [--wheels FOLDER]
# [STEP…]
#
# Each step ends in a file of the output folder ($OUT, or build/gpu); a step whose file is there is skipped, so the same
# call goes on where the last one was cut off. A step that fails or runs past its limit leaves NAME.failed, and the
# others go on. Last comes summary.md: what failed, and the tables. --tiny runs all of it at small shapes, on a CPU if there is no GPU.
# --heads holds drafters that were trained for the embedded target before, as eagle1/drafter and eagle3/drafter:
# `real-size` races them.
#
# What a head's training takes alone, in eight minutes at most: gpu.sh training training-specforge training-speculators
#
# Targets are the one that ships with Outrider, grown into the shapes of real models (`outrider lab grow`), and so is the
# head that is trained for it first: texts and accepted drafts are real. Nothing is downloaded.
#
# It needs torch >= 2.11, transformers >= 5.17 and Python >= 3.11, of $PYTHON or python3; the checkout need not be
# installed. Packages that are missing can be brought as wheels (--wheels): pydantic with pydantic-core,
# annotated-types and typing-inspection for every step; datasets with dill and multiprocess for identity, decode,
# real-size and head, which needs gguf, too; pytest >= 9 for tests. Where one is missing, the other steps run.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-$root/build/gpu}
tiny="" wheels="" heads="" wanted=()
while [ $# -gt 0 ]; do
    case $1 in
        --out) out=$2 && shift ;;
        --wheels) wheels=$2 && shift ;;
        --heads) heads=$(cd "$2" && pwd) || exit 2 && shift ;;
        --tiny) tiny=1 ;;
        -*) echo "gpu.sh: unknown option $1 (known: --out, --tiny, --heads, --wheels)" >&2 && exit 2 ;;
        *) wanted+=("$1") ;;
    esac
    shift
done
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The folders of the checkout are the subpackages of `outrider`: a link under that name is as good as an installation.
ln -s "$root" "$work/outrider"
export PYTHONPATH=$work${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export HF_HUB_DISABLE_PROGRESS_BARS=1
if [ -n "$wheels" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$wheels"/*.whl || exit
    export PYTHONPATH=$work/site:$PYTHONPATH
fi
cd "$root" || exit

# step NAME SECONDS FILE COMMAND…: run COMMAND, which writes FILE.part, unless FILE is there.
step() {
    local name=$1 limit=$2 file=$out/$3 began=$SECONDS status
    shift 3
    if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
    if [ -e "$file" ]; then echo "· $name: there already" && return; fi
    rm -f "$out/$name.failed"
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    if [ $status -eq 0 ]; then
        if [ -e "$file.part" ]; then mv "$file.part" "$file"; else cp "$out/$name.log" "$file"; fi
        echo "· $name: done in $((SECONDS - began)) s"
    else
        [ $status -eq 124 ] && echo "ran past its limit of $limit s" >>"$out/$name.log"
        { echo "exit code $status"; grep -v '^[[:space:]]*$' "$out/$name.log" | tail -n 5; } >"$out/$name.failed"
        echo "· $name: FAILED ($status) after $((SECONDS - began)) s"
    fi
}
bench() { echo "$python -m benchmarks.$1"; }

llama=(--target embedded@8b) qwen=(--target embedded@qwen3-8b) floor=() numbers=(--dtypes bfloat16 float32)
context=(--context 1024 8192) lengths=(--lengths 1024 2048 4096) chunks=() suite=() repeats=() quick=(--limit 4) interpret=0
specforge=(--target embedded@tinyllama-1.1b --steps 7 --lengths 2048) # its published geometry
speculators=(--target embedded@qwen3-0.6b --lengths 2048 --rows 1)    # of speculators#1111, on an A100
few=() draft=(--draft-like 1b) learn=("output=$out/head")
if [ -n "$tiny" ]; then
    small=(hidden_size=512 num_hidden_layers=12 intermediate_size=1024 vocab_size=4352)
    llama+=(--shape "${small[@]}") qwen+=(--shape "${small[@]}") floor=(--bytes 1000000) numbers=(--dtypes float32)
    context=(--context 160) lengths=(--lengths 32 --rows 2) chunks=(--chunks 16 512) draft=()
    specforge+=(--shape "${small[@]}" --lengths 32 --rows 2) speculators+=(--shape "${small[@]}" --lengths 32)
    learn+=(training.max_steps=3 data.limit=8)
    suite=(--max-new-tokens 8) repeats=(--repeats 2) quick=(--quick --limit 2) interpret=1
    few=(--draft-vocab 2304 --limit 1 --max-new-tokens 8 --depths 2)
fi
runners=(--runners eager kernels "split attention")
real=(--draft-vocab 32000 --limit 4 --max-new-tokens 96 --repeats 1 --cost-turns 1 --depths 2 4 6 "${few[@]}")

# shellcheck disable=SC2046 # `bench` gives words
{
    step versions 60 versions.txt "$python" -c 'from outrider.common.runtime import versions; print(versions())'
    if "$python" -c 'import torch; raise SystemExit(torch.cuda.is_available())'; then
        TRITON_INTERPRET=$interpret step kernels 420 kernels.json \
            $(bench kernels) "${numbers[@]}" --out "$out/kernels.json.part"
    else
        step kernels 240 kernels.json $(bench kernels) "${numbers[@]}" --out "$out/kernels.json.part"
    fi
    step ceilings 90 ceilings.json $(bench ceilings) "${floor[@]}" --out "$out/ceilings.json.part"
    step passes-llama 300 passes-llama.json $(bench passes) "${llama[@]}" "${context[@]}" \
        "${repeats[@]}" "${floor[@]}" "${runners[@]}" --out "$out/passes-llama.json.part"
    step passes-qwen3 300 passes-qwen3.json $(bench passes) "${qwen[@]}" "${context[@]}" \
        "${repeats[@]}" "${floor[@]}" "${runners[@]}" --out "$out/passes-qwen3.json.part"
    step head 420 head.txt "$python" -m outrider.train embedded-eagle3 "${learn[@]}"
    # What was fastest there runs the decoder's passes: trying all ways again would take each step minutes.
    runner=(--runner "$("$python" -c '
import json, sys
runners = json.load(open(sys.argv[1]))["runners"]
print(min((n for n in runners if "passes" in runners[n]), key=lambda n: sum(p["seconds"] for p in runners[n]["passes"])))
' "$out/passes-llama.json" 2>/dev/null || echo eager)")
    head=(--untrained) # a head that learned nothing shows what its rounds cost
    [ -d "$out/head/drafter" ] && head=(--drafter "eagle3=$out/head/drafter")
    [ -n "$heads" ] && head=(--drafter "eagle3=$heads/eagle3/drafter")
    decoding=("${runner[@]}" "${head[@]}" "${draft[@]}" "${quick[@]}" --dtype bfloat16 --batch 1 --widths 0 7 63)
    if [ -n "$heads" ]; then
        step real-size 420 real-size.json $(bench real_size) "${llama[@]}" "${runner[@]}" "${real[@]}" --fusion eagle1 \
            --drafter "eagle1=$heads/eagle1/drafter" "eagle3=$heads/eagle3/drafter" ngram \
            --out "$out/real-size.json.part"
    fi
    step decode-llama 420 decode-llama.json $(bench decode) "${llama[@]}" "${context[@]:0:2}" "${decoding[@]}" \
        --out "$out/decode-llama.json.part"
    step training 240 training.json $(bench training) "${llama[@]}" "${lengths[@]}" "${chunks[@]}" \
        "${repeats[@]}" --out "$out/training.json.part"
    step training-specforge 120 training-specforge.json $(bench training) "${specforge[@]}" "${chunks[@]}" \
        "${repeats[@]}" --out "$out/training-specforge.json.part"
    step training-speculators 120 training-speculators.json $(bench training) "${speculators[@]}" "${chunks[@]}" \
        "${repeats[@]}" --out "$out/training-speculators.json.part"
    step decode-qwen3 420 decode-qwen3.json $(bench decode) "${qwen[@]}" "${context[@]:0:2}" "${decoding[@]}" \
        --out "$out/decode-qwen3.json.part"
    step tests 420 tests.txt "$python" -m pytest -q -n 4 -m gpu tests/targets/fast tests/targets/test_split_attention.py \
        tests/decode/test_static.py tests/decode/test_rng.py tests/lab/test_liger.py
    step identity 300 identity.json $(bench identity) --drafter ngram --suites code "${suite[@]}" \
        --out "$out/identity.json.part"
}
for file in "$out"/*.failed "$out"/*.log; do
    [ -e "$file" ] || continue
    name=$(basename "${file%.*}")
    case $file in
        *.failed) echo "**$name** failed: $(paste -sd ' ' "$file")" ;;
        *) grep -q '^|' "$file" && printf '\n## %s\n\n%s\n' "$name" "$(grep -E '^(\||$)' "$file" | cat -s | sed '/./,$!d')" ;;
    esac
done | tee "$out/summary.md"
