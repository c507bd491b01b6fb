"""Decide whether an earlier result from a GPU is still valid: same code, same machine.

python gpu_results.py machine       print four lines: the GPU's name in files, its memory in GiB,
                                    what names code and machine, and a note about the installation
python gpu_results.py whole FILE    exit with 0 if a result of `dyntree bench serve` is valid and
                                    complete
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from dyntree_plugin.commands.bench.chains import serves
from dyntree_plugin.commands.bench.results import read
from dyntree_plugin.provenance import provenance

_SAME = ("commit", "uncommitted", "packages", "python", "gpu", "cpu")


PARTS = {
    "FlashAttention 2": "vllm.vllm_flash_attn._vllm_fa2_C",
    "FlashAttention 3": "vllm.vllm_flash_attn._vllm_fa3_C",
    "FlashInfer": "flashinfer",
    "DeepGEMM": "vllm.third_party.deep_gemm",
}
"""Modules of a full installation of vLLM that change its speed or its rounding."""


def missing() -> Iterator[str]:
    """Yield the names of the `PARTS` that cannot be found.

    A package above one of them may raise any ImportError while it is looked for.
    """
    for name, module in PARTS.items():
        try:
            there = find_spec(module) is not None
        except ImportError:
            there = False
        if not there:
            yield name


def of_this(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a provenance that must be equal for results to be compared."""
    return {key: known.get(key) for key in _SAME}


def whole(file: Path) -> bool:
    """Return whether every engine has served every load of its own in every round."""
    if not file.exists():
        return False
    result = read(file)
    wanted = result.settings
    loads = product(wanted["sets"], wanted["temperatures"], wanted["batches"], result.engines)
    own = [load for load in loads if serves(load[-1], load[1])]
    rounds = [len(series.runs) for series in result.series]
    return (
        of_this(result.provenance) == of_this(provenance())
        and len(rounds) == len(own)
        and min(rounds) == wanted["rounds"]
    )


def machine() -> Iterator[str]:
    """Yield four lines on this machine, none if it has no GPU."""
    import torch

    if not torch.cuda.is_available():
        return
    yield torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
    yield str(torch.cuda.get_device_properties(0).total_memory >> 30)
    yield f"# {json.dumps(of_this(provenance()))}"
    lacks = ", ".join(missing())
    full = "vLLM is installed in full."
    note = f"This installation of vLLM lacks {lacks}: figures are close to a full one's, not equal."
    yield note if lacks else full


def main(asked: str, *files: str) -> None:
    if asked == "machine":
        print(*machine(), sep="\n")  # noqa: T201
        return
    sys.exit(not all(whole(Path(file)) for file in files))


if __name__ == "__main__":
    main(*sys.argv[1:])
