"""Run whole steps of an engine on a GPU, and raise if a step waits for it.

test_waiting_on_a_gpu runs this: python steps_on_a_gpu.py '{"enforce_eager": …}' [waits]. The second
argument makes drafting wait. With "head": true, a head of random weights drafts.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from launches import speculation

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
PROMPTS = 6


def main(arguments: dict[str, Any], waits: bool) -> None:
    import torch
    from vllm import LLM

    from dyntree_plugin import pair

    drafts = speculation(arguments.pop("head", False))
    llm = LLM(
        model=str(pair.paths()["target"]),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 28,  # vLLM cannot measure memory that other processes free
        speculative_config=drafts | {"num_speculative_tokens": 16},
        additional_config={"dyntree": {}},
        **arguments,
    )
    prompts = pair.held_out_prompts(PROMPTS)
    work(llm, prompts, "rehearsed")
    runner: Any = llm.llm_engine.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
    if waits:
        propose = runner.speculator.propose

        def waiting(*args: Any, **kwargs: Any) -> torch.Tensor:
            drafts: torch.Tensor = propose(*args, **kwargs)
            drafts.sum().item()
            return drafts

        runner.speculator.propose = waiting
    torch.cuda.set_sync_debug_mode("error")
    steps = work(llm, prompts, "watched")
    torch.cuda.set_sync_debug_mode("default")
    sys.stdout.write(f"{steps} steps\n")


def work(llm: Any, prompts: list[str], name: str) -> int:
    """Serve plain, sampled and chained requests. The last one starts while others decode."""
    from vllm import SamplingParams

    engine, steps = llm.llm_engine, 0

    def ask(number: int) -> None:
        kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"repetition_penalty": 1.2}]
        kind = kinds[number % 3]
        temperature = 0.8 * (number % 2)
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=24, ignore_eos=True, **kind
        )
        engine.add_request(f"{name}-{number}", prompts[number], params)

    for number in range(PROMPTS - 1):
        ask(number)
    while engine.has_unfinished_requests():
        if steps == 3:
            ask(PROMPTS - 1)
        engine.step()
        steps += 1
    return steps


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:] == ["waits"])
