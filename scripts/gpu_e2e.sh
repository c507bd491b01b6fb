#!/usr/bin/env bash
# On a machine with a CUDA device: trees in vLLM's engine, in parts of at most 8 minutes.
#
#   PART     first      for a new machine, at most 6 minutes: kernels on five shapes, the same tokens in
#                       bf16 with one tree, and no speculation, vLLM's chains and the tree at two batches
#            identity-bf16, identity-fp32
#                       the same tokens as vLLM without trees, with controls; in bf16 also with the
#                       cascade, FlashInfer and XQA
#            identity-bits
#                       with `exactness` bits: the same bits as without nodes, in other batches, with controls
#            tests      the tests for GPUs: no step waits for the device; the tokens of targets with the
#                       layers of Qwen3-Next and DeepSeek-V3, without trees and with them
#            launches   what a decode step starts on the device, by function; also with a target of
#                       random weights and Qwen3-Next's layers, by trees and by vLLM's chain
#            limits     what limits a step of Llama-3.1-8B's shape: host and device by stage, beside what is
#                       expected; one start for each of no speculation, the chain and all trees
#            speed-8b   no speculation, vLLM's chains and trees: Llama-3.1-8B with an EAGLE-3 head, whose
#                       chains draft within CUDA graphs. Weights are random, and drafts are accepted at
#                       given rates; so three starts serve all lengths and sizes
#            speed-mtp  the same with MiMo-7B and its module of multi-token prediction
#            speed-mla  the same with DeepSeek-V2-Lite, which has latent attention and experts, and an
#                       EAGLE-3 head; by its size, its engines take 110 GiB
#            speed-1b   no speculation, vLLM's chains, n-gram and trees, a target of Llama-3.2-1B's shape
#            speed-eagle3-1b   the same with an EAGLE-3 head, and without n-gram
#            speed-hybrid   the same with Mamba-2 in most layers, of Granite-4.0-H-1B's shape
#            offload    no speculation, a chain of 5 and a tree of 63, with all layers of a target of
#                       Llama-3.1-8B's shape in the host's memory: 3 times 14 GB of it
#   PYTHON   the Python to use; else .venv's, else python3
#   OUT      where results go; else benchmarks/results
#   LIMIT    seconds that all of it may take; 480, and 360 of the first part
#   MODELS   where grown targets and compiled code are kept; else the user's cache
#   DYNTREE_COMMIT   the commit that results name where there is no repository
#   CHAINS, DRAWN, BUDGETS   of speed and offload, separated by blanks: lengths of vLLM's chains with greedy
#            drafts, lengths of those with drawn ones (0: none), and nodes of trees. Drawn drafts are verified
#            one by one and as a block, above temperature 0
#   ARGS     of speed and offload: further arguments of `python -m benchmarks.serve`
#
# Results are written as soon as they are known. A part goes on where the files in OUT end, if they are
# of the same commit, packages and machine: engines that were judged, tests that passed and whole
# measurements are not run again. A measurement that lacks a round is made anew.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

part=${PART:-}
limit=${LIMIT:-480}
case $part in
    first) limit=${LIMIT:-360} ;;
    identity-bf16 | identity-fp32 | identity-bits | tests | launches | limits) ;;
    speed-8b | speed-mtp | speed-mla | speed-1b | speed-eagle3-1b | speed-hybrid | offload) ;;
    *)
        echo "make gpu-e2e needs PART=first, identity-bf16, identity-fp32, identity-bits, tests, launches, limits," \
            "speed-8b, speed-mtp, speed-mla, speed-1b, speed-eagle3-1b, speed-hybrid or offload; it was '$part'" >&2
        exit 2
        ;;
esac
python=${PYTHON:-}
if [[ -z $python ]]; then
    if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; else python=python3; fi
fi
out=${OUT:-benchmarks/results}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export XDG_CACHE_HOME=${MODELS:-${XDG_CACHE_HOME:-$HOME/.cache}}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$XDG_CACHE_HOME/triton}
carried=${PYTHONPATH:-}
export PYTHONPATH=$PWD:$PWD/kernels:$scratch${carried:+:$carried}
mkdir -p "$out" "$XDG_CACHE_HOME"

# Every model is made here or comes with the checkout.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
"$python" scripts/register.py "$scratch" || exit 1
# Without .pyc files every engine's process would compile the same sources.
IFS=: read -ra folders <<<"$carried"
for folder in "${folders[@]}"; do
    [[ ! -d $folder ]] || timeout 60 "$python" -m compileall -q -j 0 "$folder" >/dev/null
done
with_tests() { PYTHONPATH=$PWD/tests:$PWD/tests/e2e:$PYTHONPATH "$@"; }
# The GPU's name in files, its memory in GiB, code and machine, and a note for the results.
mapfile -t told < <(with_tests "$python" tests/e2e/gpu_results.py machine | tail -n 4)
if ((${#told[@]} != 4)); then
    echo "make gpu-e2e needs a CUDA device, and $python sees none" >&2
    exit 1
fi
gpu=${told[0]} memory=${told[1]} stamp=${told[2]} note=${told[3]}
has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }
stands() { [[ -f $1 && $(head -n 1 "$1") == "$stamp" ]]; }

doctor=$out/gpu-doctor-$gpu.txt
if ! stands "$doctor"; then
    { echo "$stamp" && timeout 120 "$python" -m dyntree_plugin.cli doctor; } | tee "$doctor"
fi
echo "$note"

# Type or bits, seconds, further arguments of the program.
identity() {
    local name=$1 seconds=$2 program=device_identity file=$out/gpu-identity-$1-$gpu code
    shift 2
    [[ $name != bits ]] || program=device_bits
    with_tests timeout -k 20 $((seconds + 20)) "$python" "tests/e2e/$program.py" \
        "$file.json" --note "$note" --seconds "$seconds" "$@" >"$file.txt" 2>"$file.log"
    code=$?
    ((code == 0 || code == 1)) || tail -n 40 "$file.log"
    cat "$file.txt"
    return $code
}

# A log that begins with the stamp, seconds, arguments of pytest. Without the project's addopts: they
# are strict about options of plugins that may be missing. On SIGINT pytest still writes what it knows.
checked() {
    local log=$1 seconds=$2 code
    shift 2
    stands "$log" || echo "$stamp" >"$log"
    PASSED_BEFORE=$log with_tests timeout -s INT -k 20 "$seconds" "$python" -m pytest -v -o addopts= \
        -p no:cacheprovider -p passed_before "$@" 2>&1 | tee -a "$log" | tail -n 20
    code=${PIPESTATUS[0]}
    # 5: nothing was left to run.
    ((code == 5)) && grep -q " PASSED" "$log" || return "$code"
}

gpu_tests() {
    local tests
    mapfile -t tests < <(grep -rlE 'mark\.gpu\b' tests --include='test_*.py')
    if ! has hypothesis; then
        grep -lE '^(from|import) hypothesis' "${tests[@]}" | sed 's/$/ is left out: no hypothesis/'
        mapfile -t tests < <(grep -LE '^(from|import) hypothesis' "${tests[@]}")
    fi
    checked "$out/gpu-tests-$gpu.txt" $((limit - SECONDS - 20)) -m gpu "${tests[@]}"
}

launches() {
    local file="$out/gpu-launches-$gpu.txt" code=0 config found
    stands "$file" || echo "$stamp" >"$file"
    for config in '{}' '{"head": true}' '{"hybrid": true}' '{"hybrid": true, "dyntree": null}'; do
        ! grep -qxF "== $config" "$file" || continue
        if found=$(with_tests timeout $((limit - SECONDS)) "$python" tests/engine/launches.py \
            "$config" 2>"${file%.txt}.log"); then
            printf '== %s\n%s\n' "$config" "$found" >>"$file"
        else
            code=1 && tail -n 40 "${file%.txt}.log"
        fi
    done
    cat "$file"
    return $code
}

declare -A depths=([7]=6 [15]=8 [31]=8 [63]=10)

# Further arguments of the engines that `speed` measures, and further engines.
offloading=
further=()

limits() {
    timeout -k 20 $((limit - SECONDS)) "$python" -m benchmarks.serve.limits \
        "$out/gpu-limits-$gpu.json" --note "$note" --seconds $((limit - SECONDS - 60)) 2>&1 |
        tee "$out/gpu-limits-$gpu.txt"
    return "${PIPESTATUS[0]}"
}

# Option that names the shape, shape, bytes of KV cache, lengths of greedy and of drawn chains,
# budgets of trees; then arguments of `benchmarks.serve`. All engines run side by side.
speed() {
    local shape=("$1" "$2") cache=$3 chains=${CHAINS:-$4} drawn=${DRAWN:-$5} budgets
    local name=serve-gpu-${part#speed-}-$gpu engines=("${further[@]}") length number code=0
    read -ra budgets <<<"${BUDGETS:-$6}"
    shift 6
    for length in $chains; do engines+=(--chain "$length"); done
    for length in ${drawn/#0/}; do
        engines+=(--chain "probabilistic:$length" --chain "block:$length")
    done
    # The last is cut to what pays, as it is by default; the others show what whole trees do.
    for number in "${!budgets[@]}"; do
        local kind=', "budget": "fixed"' budget=${budgets[$number]}
        ((number + 1 < ${#budgets[@]})) || kind=
        local depth=${depths[$budget]-8}
        engines+=(--dyntree "{\"node_budget\": $budget${depth:+, \"max_depth\": $depth}$kind}")
    done
    # vLLM wants its share of the memory free; what an engine takes is its weights and the cache.
    local arguments="{\"kv_cache_memory_bytes\": $cache, \"gpu_memory_utilization\": 0.05$offloading}"
    if [[ ! -f $out/$name.json ]] ||
        ! with_tests "$python" tests/e2e/gpu_results.py whole "$out/$name.json"; then
        # shellcheck disable=SC2086  # ARGS are several
        timeout -k 20 $((limit - SECONDS)) "$python" -m benchmarks.serve \
            "${shape[@]}" "$@" \
            --side-by-side $((1 + ${#engines[@]} / 2)) --time-limit $((limit - SECONDS - 30)) \
            --engine-arguments "$arguments" --note "$note" "${engines[@]}" --output "$out/$name.json" \
            ${ARGS:-} >"$out/$name.txt" 2>&1
        code=$?
        ((code == 0)) || tail -n 60 "$out/$name.txt"
    fi
    [[ ! -f $out/$name.json ]] || "$python" -m dyntree_plugin.commands.bench.overview "$out/$name.json"
    return $code
}

# An H200 has 140 GiB, an H100 80. On the smaller device fewer engines stand side by side.
if ((memory >= 100)); then
    of_1b=("1 2 3 5 8" "3 5 8" "7 15 31 63")
else
    of_1b=("1 3 5" "3 5" "15 31 63")
fi
# They share processes, each of which has 17 GB of weights and 5 GB of cache. Trees must differ in
# their nodes alone; the last two have the largest size, fixed and adaptive.
of_8b=("1 2 3 5 8" 0 "3 7 15 31 63 63")
of_mtp=("1 2 3 5" 0 "3 7 15 31 63 63")

loads=(--temperature 0 --temperature 1 --batch 1 --batch 4 --batch 16 --batch 64
    --num-prompts 4 --max-tokens 128 --rounds 3)
offloaded_loads=(--temperature 0 --batch 1 --num-prompts 2 --max-tokens 48 --rounds 2)
exact_loads=(--temperature 0 --batch 1 --batch 4 --batch 16 --batch 64
    --num-prompts 4 --max-tokens 192 --rounds 3)
few_loads=(--temperature 0 --batch 1 --batch 8 --num-prompts 8 --max-tokens 96 --rounds 3)

# Kernels and tokens at the same time; only what is measured has the device to itself.
first() {
    # Tokens take three starts of an engine: trees and no trees together, then the scores.
    local seconds=$((limit * 5 / 9 - SECONDS)) tokens grown kernels_code tokens_code code
    ((seconds >= 30)) || seconds=30
    timeout "$seconds" "$python" -c 'from pathlib import Path
from dyntree_plugin import pair
from benchmarks.serve.shapes import grown_target
grown_target("llama-1b", Path(pair.paths()["target"]))' &
    grown=$!
    identity bf16 "$seconds" --engine "no speculation" --engine "tree of 16" >"$scratch/tokens" &
    tokens=$!
    echo "== kernels"
    checked "$out/gpu-first-kernels-$gpu.txt" "$seconds" -k "served_shapes or TheWalk" \
        tests/kernels/device/check_attention.py tests/kernels/device/check_walk.py
    kernels_code=$?
    wait "$tokens"; tokens_code=$?
    echo "== tokens" && cat "$scratch/tokens"
    wait "$grown"
    echo "== speed"
    speed --target-shape llama-1b $((3 << 29)) "3 5" 0 15 "${few_loads[@]}"
    code=$?
    echo "kernels exited with $kernels_code, tokens with $tokens_code, speed with $code"
    ((kernels_code == 0 && tokens_code == 0 && code == 0))
}

# Every layer comes over the bus in every step; two have room on the device. Trees have the default
# depth, as forwards of the draft are cheap beside that.
offload() {
    depths[63]=
    offloading=', "offload_group_size": 1, "offload_num_in_group": 1, "offload_prefetch_step": 2'
    speed --target-shape llama-8b $((1 << 30)) 5 0 63 "${offloaded_loads[@]}"
}

case $part in
    first) first ;;
    identity-bf16) identity bf16 $((limit - SECONDS - 25)) --dtype bfloat16 ;;
    identity-fp32) identity fp32 $((limit - SECONDS - 25)) --dtype float32 ;;
    identity-bits) identity bits $((limit - SECONDS - 25)) ;;
    tests) gpu_tests ;;
    launches) launches ;;
    limits) limits ;;
    speed-8b)
        depths=([3]=3 [7]=7)
        speed --exact-shape llama-8b $((5 << 30)) "${of_8b[@]}" --method eagle3 "${exact_loads[@]}"
        ;;
    speed-mtp)
        depths=([3]=3 [7]=7)
        speed --exact-shape mimo-7b $((5 << 30)) "${of_mtp[@]}" --method mtp "${exact_loads[@]}"
        ;;
    speed-mla)
        if ((memory < 120)); then
            echo "speed-mla needs a GPU of 120 GiB, and this one has $memory" >&2
            exit 2
        fi
        depths=([3]=3 [7]=7)
        speed --exact-shape deepseek-v2-lite $((2 << 30)) "${of_8b[@]}" --method eagle3 "${exact_loads[@]}"
        ;;
    speed-1b)
        further=(--chain n-gram:8 --look-up 15)
        speed --target-shape llama-1b $((3 << 29)) "${of_1b[@]}" "${loads[@]}"
        ;;
    speed-eagle3-1b)
        speed --target-shape llama-1b $((3 << 29)) "${of_1b[@]}" --method eagle3 "${loads[@]}"
        ;;
    speed-hybrid) speed --target-shape granite-h-1b $((3 << 29)) "${of_1b[@]}" "${loads[@]}" ;;
    offload) offload ;;
esac
code=$?
echo "$part exited with $code; results are in $out"
exit $code
