#!/usr/bin/env bash
# On a machine with a CUDA device: checks every kernel, then measures. About 8 minutes at most.
#
#   PYTHON   the Python to use; else .venv's, else python3
#   OUT      where results go; else benchmarks/results
#   LIMIT    seconds that all of it may take; 470
#   CHECKS   0 to measure alone, after a run whose checks have passed
#   FLASH_ATTENTION   module of flash_attn_varlen_func; else vLLM's where it is installed
set -uo pipefail
cd "$(dirname "$0")/.." || exit

python=${PYTHON:-}
if [[ -z $python ]]; then
    if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; else python=python3; fi
fi
out=${OUT:-benchmarks/results}
limit=${LIMIT:-470}
export PYTHONPATH=$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"

if ! gpu=$("$python" -c 'import torch
print(torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-"))' 2>/dev/null); then
    echo "make gpu-kernels needs a CUDA device, and $python sees none" >&2
    exit 1
fi
has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }
flash=${FLASH_ATTENTION:-flash_attn_interface}
if [[ -z ${FLASH_ATTENTION:-} ]] && has vllm; then flash=vllm.vllm_flash_attn; fi

if has flashinfer; then
    (timeout 150 "$python" -m dyntree_kernels.cuda.build --xqa ||
        echo "FlashInfer's XQA was not built; it is left out below") &
    timeout 150 "$python" -m dyntree_kernels.cuda.build ||
        echo "FlashInfer's kernel was not built; it is left out below"
    wait
fi

checks=0
if [[ ${CHECKS:-1} != 0 ]]; then
    echo "== correctness"
    # Most of the time is Triton's, which compiles on one core.
    workers=()
    if has xdist; then workers=(-n $(($(nproc) < 16 ? ($(nproc) + 1) / 2 : 8)) --dist load); fi
    # Without the project's addopts: they are strict about options of plugins that may be missing here.
    # A file that cannot be imported leaves the others their turn, and on SIGINT pytest writes what it
    # knows.
    timeout -s INT -k 20 220 "$python" -m pytest -q -o addopts= -p no:cacheprovider "${workers[@]}" \
        --continue-on-collection-errors --junitxml "$out/kernels-checks-$gpu.xml" \
        tests/kernels/device/check_*.py tests/kernels/test_xformers_attention.py 2>&1 |
        tee "$out/kernels-checks-$gpu.txt" | tail -40
    checks=${PIPESTATUS[0]}
fi

echo "== times"
left=$((limit - SECONDS)) # the parts after the shapes take about 80 s
timeout "$left" "$python" -m benchmarks.kernels --output "$out/kernels-$gpu.json" \
    --seconds $((left > 100 ? left - 90 : 10)) \
    --flash-attention "$flash" | tee "$out/kernels-$gpu.txt"
times=${PIPESTATUS[0]}
# The table of times of this GPU, named after it, which the package brings from then on.
table=$(sed -n 's/^attention: auto follows \(.*\) on this GPU$/\1/p' "$out/kernels-$gpu.txt")
[[ -z $table ]] || cp "$table" "$out/table-$(basename "$table")"

echo "checks exited with $checks, the benchmark with $times; results are in $out"
((checks == 0 && times == 0))
