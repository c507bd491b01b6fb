"""Complete a prompt, and write the tree of every step as a page and as a trace.

    python examples/draw_trees.py --output trees

`dyntree show` does the same from the command line. This is for an engine that you have already.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm import LLM, SamplingParams

from dyntree_plugin import pair
from dyntree_plugin.commands.show import page
from dyntree_plugin.commands.show.generation import save
from dyntree_plugin.commands.show.record import complete


def main(arguments: list[str] | None = None) -> None:
    own = pair.paths()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default=str(own["target"]))
    parser.add_argument("--draft", default=str(own["draft"]))
    parser.add_argument("--output", type=Path, default=Path("trees"))
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
        max_model_len=512,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
    )
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=given.max_tokens)
    generation = complete(llm, "def binary_search(items, wanted):\n", params)

    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "trees.html").write_text(page.render(generation), "utf-8")
    save(generation, given.output / "trees.json")
    for number, step in enumerate(generation.steps, start=1):
        text = "".join(map(generation.text, step.emitted))
        print(f"step {number}: {len(step.accepted)} of {len(step.tokens)} nodes: {text!r}")


if __name__ == "__main__":
    main()
