"""Print the tokens per step and the acceptance by depth of an offline engine.

python examples/metrics.py
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

from dyntree_plugin import pair


def main(arguments: list[str] | None = None) -> None:
    own = pair.paths()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default=str(own["target"]))
    parser.add_argument("--draft", default=str(own["draft"]))
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args(arguments)

    llm = LLM(
        given.target,
        speculative_config={
            "method": "draft_model",
            "model": given.draft,
            "num_speculative_tokens": 16,
        },
        additional_config={"dyntree": {"budget": "fixed"}},  # whole trees, even where none pays
        disable_log_stats=False,  # LLM() counts nothing by default
        max_model_len=512,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
    )
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=given.max_tokens)
    llm.generate(pair.held_out_prompts(given.num_prompts), params)

    found = llm.get_metrics()
    counts = {metric.name: metric.value for metric in found if hasattr(metric, "value")}
    drafts = counts["vllm:spec_decode_num_drafts"]
    accepted = counts["vllm:spec_decode_num_accepted_tokens"]
    nodes = counts["vllm:spec_decode_num_draft_tokens"]
    print(f"{drafts} trees of {nodes / drafts:.1f} nodes on average")
    print(f"{1 + accepted / drafts:.2f} tokens per step, the bonus token among them")
    for metric in found:
        if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            for depth, count in enumerate(metric.values[:8], start=1):
                print(f"accepted at depth {depth}: {count / drafts:4.0%} of the steps")
        elif metric.name == "vllm:dyntree_fallback_steps" and metric.value:
            print(f"chain or no tree, {metric.labels['reason']}: {metric.value} steps")


if __name__ == "__main__":
    main()
