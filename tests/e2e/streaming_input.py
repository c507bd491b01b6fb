"""Sessions on an `AsyncLLM` that take their input in pieces, while other requests run.

As a program, this takes a job of engine_process.py. Each run is a session, and its requests are the
turns. It returns the tokens of every turn, and those of a separate request for the whole text up to
that turn.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_process import Request, copy_processes, run_of
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import utils
from vllm.v1.engine.async_llm import AsyncLLM

DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 64 << 20,
    # The separate requests must not find the sessions' blocks.
    "enable_prefix_caching": False,
}


async def session(llm: AsyncLLM, name: str, turns: list[Request]) -> list[list[int]]:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, **turns[0].params)

    async def pieces() -> AsyncIterator[StreamingInput]:
        for turn in turns:
            yield StreamingInput(prompt=TokensPrompt(prompt_token_ids=list(turn.prompt)))

    found: list[int] = []
    async for output in llm.generate(pieces(), params, name):
        found += output.outputs[0].token_ids
    length = len(found) // len(turns)
    return [found[at : at + length] for at in range(0, len(found), length)]


async def alone(llm: AsyncLLM, name: str, prompt: list[int], params: Any) -> list[int]:
    final = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **params)
    asked = llm.generate(TokensPrompt(prompt_token_ids=prompt), final, name)
    return [list(output.outputs[0].token_ids) async for output in asked][-1]


async def compared(llm: AsyncLLM, name: str, turns: list[Request]) -> list[Any]:
    streamed = await session(llm, name, turns)
    prompt: list[int] = []
    expected = []
    for number, (turn, tokens) in enumerate(zip(turns, streamed, strict=True)):
        prompt += turn.prompt
        expected.append(await alone(llm, f"{name} {number}", prompt, turn.params))
        prompt += tokens[:-1]  # vLLM drops the last token of a turn.
    return [streamed, expected]


async def work(job: dict[str, Any]) -> dict[str, Any]:
    copy_processes(utils)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**DEFAULTS | job["engine"]))
    try:
        encode = AutoTokenizer.from_pretrained(job["engine"]["model"]).encode
        sessions = {
            name: [replace(turn, prompt=encode(turn.prompt)) for turn in run_of(run).requests]
            for name, run in job["runs"].items()
        }
        found = await asyncio.gather(*(compared(llm, *each) for each in sessions.items()))
        return dict(zip(sessions, found, strict=True))
    finally:
        llm.shutdown()


if __name__ == "__main__":
    job, results = map(Path, sys.argv[1:])
    results.write_text(json.dumps(asyncio.run(work(json.loads(job.read_text())))))
