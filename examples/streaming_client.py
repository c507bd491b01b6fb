"""Stream a completion from a server with trees, with the OpenAI client.

Start the server first. Clients need to know nothing of trees:

    dyntree serve TARGET --port 8000 --dyntree '{}' --speculative-config \\
        '{"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 16}'
    python examples/streaming_client.py --base-url http://localhost:8000/v1

`dyntree pair` prints a TARGET and a DRAFT that come with dyntree.
"""

from __future__ import annotations

import argparse

from openai import OpenAI


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--prompt", default="def binary_search(items, wanted):\n")
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args(arguments)

    client = OpenAI(base_url=given.base_url, api_key="none")
    stream = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=given.prompt,
        max_tokens=given.max_tokens,
        temperature=0.8,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    print(given.prompt, end="")
    pieces = 0
    for event in stream:
        for choice in event.choices:  # the last event has none, but the usage
            pieces += 1
            print(choice.text, end="", flush=True)
        if event.usage is not None:
            tokens = event.usage.completion_tokens
            # A step emits its accepted path and the bonus token at once.
            print(f"\n\n{tokens} tokens in {pieces} pieces: {tokens / pieces:.1f} at a time")


if __name__ == "__main__":
    main()
