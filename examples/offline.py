"""Complete prompts offline, with a tree of draft tokens per step.

python examples/offline.py
python examples/offline.py --target TARGET --draft DRAFT --temperature 0.8
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

from dyntree_plugin import pair

PROMPTS = ["import argparse\n\ndef main():\n    parser = ", "class Stack:\n    def push(self"]


def main(arguments: list[str] | None = None) -> None:
    own = pair.paths()  # the small pair that comes with dyntree
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default=str(own["target"]))
    parser.add_argument("--draft", default=str(own["draft"]))
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args(arguments)

    llm = LLM(
        given.target,
        # At most 16 nodes per tree; the target verifies them in one forward pass.
        speculative_config={
            "method": "draft_model",
            "model": given.draft,
            "num_speculative_tokens": 16,
        },
        additional_config={"dyntree": {}},  # or options, such as {"max_depth": 6}
        max_model_len=512,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,  # starts sooner
    )
    # The text is the one that the target writes without a tree, with the same seed.
    params = SamplingParams(temperature=given.temperature, seed=7, max_tokens=given.max_tokens)
    for output in llm.generate(PROMPTS, params):
        print(output.prompt + output.outputs[0].text, end="\n\n")


if __name__ == "__main__":  # vLLM starts processes
    main()
