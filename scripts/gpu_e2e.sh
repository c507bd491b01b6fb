#!/usr/bin/env bash
# On a machine with a CUDA device: trees in vLLM's engine, in parts of at most 10 minutes.
#
#   PART     identity   the same tokens as vLLM without trees, with controls; and the tests for GPUs
#            launches   what a decode step starts on the device, by function
#            speed-1b   no speculation, vLLM's chains and trees, a target of Llama-3.2-1B's shape
#            speed-8b   the same with the shape of Llama-3.1-8B
#   PYTHON   the Python to use; else .venv's, else python3
#   OUT      where results go; else benchmarks/results
#   LIMIT    seconds that all of it may take; 570
#   MODELS   where grown targets and compiled code are kept; else the user's cache
#   DYNTREE_COMMIT   the commit that results name where there is no repository
#   CHAINS, BUDGETS   of speed: lengths of vLLM's chains, and nodes of trees, separated by blanks
#   ARGS     of speed: further arguments of `dyntree bench serve`
set -uo pipefail
cd "$(dirname "$0")/.." || exit

part=${PART:-}
case $part in
    identity | launches | speed-1b | speed-8b) ;;
    *)
        echo "make gpu-e2e needs PART=identity, PART=launches, PART=speed-1b or PART=speed-8b; it was '$part'" >&2
        exit 2
        ;;
esac
python=${PYTHON:-}
if [[ -z $python ]]; then
    if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; else python=python3; fi
fi
out=${OUT:-benchmarks/results}
limit=${LIMIT:-570}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export XDG_CACHE_HOME=${MODELS:-${XDG_CACHE_HOME:-$HOME/.cache}}
export PYTHONPATH=$PWD:$PWD/kernels:$scratch${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out" "$XDG_CACHE_HOME"

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "make gpu-e2e needs a CUDA device, and $python sees none" >&2
    exit 1
fi
"$python" scripts/register.py "$scratch" || exit 1
timeout 120 "$python" -m dyntree_plugin.cli doctor | tee "$out/gpu-doctor.txt"

# What a full installation of vLLM has and this one may not, for the notes of the results.
missing=$("$python" - <<'PYTHON'
import importlib.util as util

parts = {
    "FlashAttention 2": "vllm.vllm_flash_attn._vllm_fa2_C",
    "FlashAttention 3": "vllm.vllm_flash_attn._vllm_fa3_C",
    "FlashInfer": "flashinfer",
    "DeepGEMM": "vllm.third_party.deep_gemm",
}


def there(name):
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


print(", ".join(name for name, module in parts.items() if not there(module)))
PYTHON
)
if [[ -n $missing ]]; then
    note="This installation of vLLM lacks $missing: figures will be close to a full one's, not equal."
else
    note="vLLM is installed in full."
fi
echo "$note"

identity() {
    local report="$out/gpu-identity.json" code tests checks=0
    echo "== the same tokens"
    PYTHONPATH=$PWD/tests:$PWD/tests/e2e:$PYTHONPATH timeout $((limit - 120)) \
        "$python" tests/e2e/device_identity.py "$report" "$note" >"$scratch/identity.txt" \
        2>"$out/gpu-identity.log"
    code=$?
    ((code == 0 || code == 1)) || tail -n 40 "$out/gpu-identity.log"
    echo "== tests for GPUs: no step waits for the device"
    mapfile -t tests < <(grep -rlE 'mark\.gpu\b' tests --include='test_*.py')
    if ! "$python" -c 'import hypothesis' 2>/dev/null; then
        grep -lE '^(from|import) hypothesis' "${tests[@]}" | sed 's/$/ is left out: no hypothesis/'
        mapfile -t tests < <(grep -LE '^(from|import) hypothesis' "${tests[@]}")
    fi
    # Without the project's addopts: they are strict about options of plugins that may be missing.
    if ((${#tests[@]})); then
        timeout $((limit - SECONDS)) "$python" -m pytest -q -o addopts= -p no:cacheprovider \
            -m gpu --junitxml "$out/gpu-tests.xml" "${tests[@]}" 2>&1 |
            tee "$out/gpu-tests.txt" | tail -20
        checks=${PIPESTATUS[0]}
    fi
    tee "$out/gpu-identity.txt" <"$scratch/identity.txt"
    echo "identity exited with $code, the tests with $checks; results are in $out"
    ((code == 0 && checks == 0))
}

launches() {
    timeout "$limit" "$python" tests/engine/launches.py >"$out/gpu-launches.txt" \
        2>"$out/gpu-launches.log"
    local code=$?
    ((code == 0)) || tail -n 40 "$out/gpu-launches.log"
    cat "$out/gpu-launches.txt"
    echo "launches exited with $code; results are in $out"
    return $code
}

# Shape, bytes of KV cache, lengths of chains, budgets of trees. All engines run side by side.
speed() {
    local shape=$1 cache=$2 chains=${CHAINS:-$3} budgets=${BUDGETS:-$4}
    local name=serve-gpu-${part#speed-} engines=() length budget code
    for length in $chains; do engines+=(--chain "$length"); done
    # The last is cut to what pays, as it is by default; the others show what whole trees do.
    for budget in $budgets; do
        local kind=', "budget": "fixed"'
        [[ $budget != "${budgets##* }" ]] || kind=
        engines+=(--tree "{\"node_budget\": $budget, \"max_depth\": ${depths[$budget]:-8}$kind}")
    done
    # vLLM wants its share of the memory free; what an engine takes is its weights and the cache.
    local arguments="{\"kv_cache_memory_bytes\": $cache, \"gpu_memory_utilization\": 0.05}"
    # shellcheck disable=SC2086  # ARGS are several
    timeout $((limit - SECONDS)) "$python" -m dyntree_plugin.cli bench serve --target-shape "$shape" \
        --temperature 0 --temperature 1 --batch 1 --batch 4 --batch 16 --batch 64 \
        --requests 4 --max-tokens 128 --rounds 3 \
        --side-by-side $((1 + ${#engines[@]} / 2)) --time-limit $((limit - SECONDS - 30)) \
        --engine-arguments "$arguments" --note "$note" "${engines[@]}" --json "$out/$name.json" \
        ${ARGS:-} >"$out/$name.txt" 2>&1
    code=$?
    ((code == 0)) || tail -n 60 "$out/$name.txt"
    [[ ! -f $out/$name.json ]] || "$python" -m dyntree_plugin.commands.bench.overview "$out/$name.json"
    echo "$part exited with $code; results are in $out"
    return $code
}

declare -A depths=([8]=6 [16]=8 [32]=8 [64]=10)
case $part in
    identity) identity ;;
    launches) launches ;;
    speed-1b) speed llama-1b $((3 << 29)) "1 2 3 5 8" "8 16 32 64" ;;
    # With 14 GB of weights each, seven engines are what 140 GB hold.
    speed-8b) speed llama-8b $((7 << 29)) "2 3 5 8" "8 32" ;;
esac
