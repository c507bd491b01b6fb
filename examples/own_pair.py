"""Try another target and draft: folders, or names on Hugging Face.

    python examples/own_pair.py --target Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B

They must share their vocabulary. This checks it without loading weights:

    dyntree doctor -- TARGET --dyntree '{}' \\
        --speculative-config '{"method": "draft_model", "model": "DRAFT", ...}'
"""

from __future__ import annotations

import argparse

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

PROMPT = "def fibonacci(n):\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args(arguments)

    # The same number must mean the same token. dyntree compares tokenizers that are on this
    # machine; here they are downloaded if they are not.
    target, draft = (
        AutoTokenizer.from_pretrained(model).get_vocab() for model in (given.target, given.draft)
    )
    differing = [token for token, number in target.items() if draft.get(token) != number]
    if differing:
        raise SystemExit(f"{len(differing)} tokens differ, for example {differing[:5]}")

    llm = LLM(
        given.target,
        dtype=given.dtype,
        speculative_config={
            "method": "draft_model",
            "model": given.draft,
            "num_speculative_tokens": given.nodes,
        },
        additional_config={"dyntree": {"budget": "fixed"}},  # whole trees, even where none pays
        disable_log_stats=False,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
    )
    for temperature in (0.0, 1.0):
        before = accepted_and_trees(llm)
        params = SamplingParams(temperature=temperature, seed=7, max_tokens=given.max_tokens)
        text = llm.generate(PROMPT, params)[0].outputs[0].text
        accepted, trees = (b - a for a, b in zip(before, accepted_and_trees(llm), strict=True))
        print(
            f"{PROMPT}{text}\n\ntemperature {temperature}: "
            f"{accepted / max(trees, 1):.1f} of at most {given.nodes} nodes accepted per step\n"
        )


def accepted_and_trees(llm: LLM) -> tuple[int, int]:
    counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    names = ("num_accepted_tokens", "num_drafts")
    return tuple(counts.get(f"vllm:spec_decode_{name}", 0) for name in names)


if __name__ == "__main__":
    main()
