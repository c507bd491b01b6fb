"""Decode with a tiny model in vLLM's V1 or V2 CPU runner, and print the results as JSON.

Usage: decode.py {v1,v2} MODEL
"""

from __future__ import annotations

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

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402

PROMPTS = [list(range(3 + 7 * i, 15 + 32 * i)) for i in range(4)]


def engine(**options: Any) -> LLM:
    return LLM(
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


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=24, detokenize=False, ignore_eos=True, **options)


def decode(llm: LLM, prompts: list[list[int]], sampling_params: Any) -> list[list[int]]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, sampling_params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def compiled_signatures() -> dict[str, int]:
    """Return how many versions of each kernel numba has compiled or loaded."""
    from numba.core.dispatcher import Dispatcher

    prefixes = ("vllm_cpu_runner", "dyntree_kernels.cpu.gumbel")
    return {
        f"{name}.{attribute}": len(value.signatures)
        for name, module in list(sys.modules.items())
        if name.startswith(prefixes)
        for attribute, value in vars(module).items()
        if isinstance(value, Dispatcher) and not value.targetoptions.get("inline")
    }


def run_v2() -> dict[str, Any]:
    # The plugin does this for engines with a tree, because vLLM 0.32 refuses V2 without Triton.
    VllmConfig._validate_v2_model_runner = lambda self: None
    import vllm_cpu_runner

    vllm_cpu_runner.install()
    vllm_cpu_runner.warm_up()
    before = compiled_signatures()
    mixed = [
        sampling(temperature=0, logprobs=2, prompt_logprobs=1),
        sampling(temperature=0.8, seed=-5, repetition_penalty=1.2, frequency_penalty=0.3),
        sampling(temperature=1.0, seed=2**60, logit_bias={5: 9.0}),
        sampling(temperature=0.5, seed=77, top_p=0.9, min_p=0.05),
    ]
    llm = engine()
    results: dict[str, Any] = {
        "greedy": decode(llm, PROMPTS, sampling(temperature=0)),
        "mixed": decode(llm, PROMPTS, mixed),
        "alone": [decode(llm, [p], s)[0] for p, s in zip(PROMPTS, mixed, strict=True)],
    }
    chain = {"method": "draft_model", "model": MODEL, "num_speculative_tokens": 3}
    for drafts, rejection in (
        ("greedy", "standard"),
        ("probabilistic", "standard"),
        ("probabilistic", "block"),
    ):
        del llm
        methods = {"draft_sample_method": drafts, "rejection_sample_method": rejection}
        llm = engine(speculative_config=chain | methods)
        results[f"chain {drafts} {rejection}"] = decode(llm, PROMPTS, sampling(temperature=0))
        decode(llm, PROMPTS, sampling(temperature=1.0, seed=3, presence_penalty=0.1))
    after = compiled_signatures()
    results["compiled late"] = [name for name in after if after[name] != before.get(name)]
    return results


if __name__ == "__main__":
    found = run_v2() if RUNNER == "v2" else {
        "greedy": decode(engine(), PROMPTS, sampling(temperature=0))
    }  # fmt: skip
    sys.stdout.write("RESULTS " + json.dumps(found) + "\n")
