"""Decode with a tiny model in vLLM's V1 or V2 CPU runner, and print the results as JSON.

Usage: decode.py {v1,v2} MODEL
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

RUNNER, MODEL = sys.argv[1:]
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": str(int(RUNNER == "v2")),
    "VLLM_PLUGINS": "",
}

import compilations  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402

PROMPTS = [list(range(3 + 7 * i, 15 + 32 * i)) for i in range(4)]


def engine(**options: Any) -> LLM:
    llm = LLM(
        MODEL,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=40,  # so that prompts are read in chunks
        block_size=32,
        **options,
    )
    if RUNNER == "v2":
        from dyntree_plugin.engine.start.rehearsal import rehearse

        rehearse(llm.llm_engine.model_executor.driver_worker.worker)
    return llm


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=24, detokenize=False, ignore_eos=True, **options)


def decode(llm: LLM, prompts: list[list[int]], sampling_params: Any) -> list[list[int]]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, sampling_params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def run_v2() -> dict[str, Any]:
    # The plugin does this for engines with a tree, because vLLM 0.32 refuses V2 without Triton.
    VllmConfig._validate_v2_model_runner = lambda self: None
    import vllm_cpu_runner

    vllm_cpu_runner.install()
    mixed = [
        sampling(temperature=0, logprobs=2, prompt_logprobs=1),
        sampling(temperature=0.8, seed=-5, repetition_penalty=1.2, frequency_penalty=0.3),
        sampling(temperature=1.0, seed=2**60, logit_bias={5: 9.0}),
        sampling(temperature=0.5, seed=77, top_p=0.9, min_p=0.05),
    ]
    llm = engine()
    rehearsed = compilations.versions()
    results: dict[str, Any] = {
        "greedy": decode(llm, PROMPTS, sampling(temperature=0)),
        "mixed": decode(llm, PROMPTS, mixed),
        "alone": [decode(llm, [p], s)[0] for p, s in zip(PROMPTS, mixed, strict=True)],
    }
    late = compilations.since(rehearsed)
    chain = {"method": "draft_model", "model": MODEL, "num_speculative_tokens": 3}
    for drafts, rejection in (
        ("greedy", "standard"),
        ("probabilistic", "standard"),
        ("probabilistic", "block"),
    ):
        del llm
        gc.collect()  # When an engine is freed it ends vLLM's groups of ranks, also another's.
        methods = {"draft_sample_method": drafts, "rejection_sample_method": rejection}
        llm = engine(speculative_config=chain | methods)
        rehearsed = compilations.versions()
        results[f"chain {drafts} {rejection}"] = decode(llm, PROMPTS, sampling(temperature=0))
        decode(llm, PROMPTS, sampling(temperature=1.0, seed=3, presence_penalty=0.1))
        late += compilations.since(rehearsed)
    return results | {"compiled late": late}


if __name__ == "__main__":
    found = run_v2() if RUNNER == "v2" else {
        "greedy": decode(engine(), PROMPTS, sampling(temperature=0))
    }  # fmt: skip
    sys.stdout.write("RESULTS " + json.dumps(found) + "\n")
