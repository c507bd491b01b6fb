"""Start engines one after the other in one process. It runs as a program, as engine_process.py
does.

The job names the engines in order: engines with trees, and a plain one of another model.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from engine_process import answered

BROKEN = "trees that leave their attention behind"


def start_in_turn(kinds: Sequence[str], plain: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return ``tokens`` and the layers' ``classes`` of each engine, or why vLLM ``refused`` to
    start it.

    Each of ``kinds`` is "trees", `BROKEN` or "plain". The last starts with the arguments ``plain``.
    """
    found = answered(__file__, {"kinds": kinds, "plain": plain}, {}, threads=1)
    engines: list[dict[str, Any]] = found["engines"]
    return engines


def run(arguments: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    llm = LLM(
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        **arguments,
    )
    layers = get_layers_from_vllm_config(llm.llm_engine.vllm_config, Attention).values()
    classes = {type(each.impl).__name__ for each in layers}
    classes |= {each.get_attn_backend().__name__ for each in layers}
    prompts = [{"prompt_token_ids": [*range(5 + at, 45 + at)]} for at in range(2)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "classes": sorted(classes),
    }


def main(job_path: str, results_path: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from workload import with_options

    job = json.loads(Path(job_path).read_text())["engine"]
    engines = []
    for kind in job["kinds"]:
        broken = mock.patch.object(AttentionBackendEnum, "clear_override")
        with broken if kind == BROKEN else nullcontext():
            try:
                engines.append(run(job["plain"] if kind == "plain" else with_options()))
            except ValueError as problem:
                engines.append({"refused": str(problem)})
        gc.collect()
    Path(results_path).write_text(json.dumps({"engines": engines}))


if __name__ == "__main__":
    main(*sys.argv[1:])
