"""Rehearse steps before the first request, so that no request waits for a kernel to be compiled.

Made-up requests run through the code that serves: what the engine's plan runs is compiled, and the
rest is not. A kernel is compiled for the types and layouts of its arguments. These depend on what a
batch holds, and not on how much.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.worker.gpu.warmup import _warmup_block_counter

# vLLM shows only what is logged below the name of its package.
logger = init_logger("vllm.dyntree")
PROMPT = [0, 1]
STEPS = 4
"""Steps after the prompts."""


@torch.inference_mode()
def rehearse(worker: Any) -> None:
    """Serve a few requests of every kind, if possible two at a time; the KV cache must be there.

    Every rank calls it. If the context or the cache has no room for a few steps, nothing runs, and
    the first requests wait for kernels.
    """
    greedy, every = SamplingParams(temperature=0), SamplingParams.for_sampler_warmup()
    rare = SamplingParams(logprob_token_ids=[0], thinking_token_budget=1)
    params = [greedy, greedy, every, rare]
    rehearsal = _Rehearsal(worker)
    if (together := rehearsal.most(2)) == 0:
        logger.info_once("No room to rehearse steps: the first requests compile kernels.")
        return
    began = time.monotonic()
    logger.info_once("Rehearsing steps; the first start of a version compiles kernels for them.")
    for first in range(0, len(params), together):
        rehearsal.serve(params[first : first + together])
    if (zeroer := worker.model_runner.kv_block_zeroer) is not None:
        zeroer.zero_block_ids([0])  # Padding was written into it.
    logger.info_once("It took %.1f s to rehearse steps.", time.monotonic() - began)


class _Rehearsal:
    """Serves some requests as the scheduler would have it."""

    def __init__(self, worker: Any) -> None:
        self._worker, runner = worker, worker.model_runner
        self._runner = runner
        of_step = (runner.max_model_len - len(PROMPT) - 1) // STEPS
        self._drafts: int = max(0, min(runner.num_speculative_steps, of_step - 1))
        self._rows = self._drafts + 1
        self._fits: bool = of_step > 0
        self._computed: dict[str, int] = {}
        count, length = _warmup_block_counter(runner), len(PROMPT) + STEPS * self._rows
        groups = runner.kv_cache_config.kv_cache_groups
        self._blocks = [count(length, group.kv_cache_spec) for group in groups]

    def most(self, requests: int) -> int:
        """Return how many requests there may be at a time, ``requests`` at most."""
        runner, needed = self._runner, max(1, sum(self._blocks))
        fit = (runner.kv_cache_config.num_blocks - 1) // needed if self._fits else 0
        bounds = runner.max_num_reqs, max(1, runner.max_num_tokens // self._rows), fit
        return min(requests, *map(int, bounds))

    def serve(self, params: Sequence[SamplingParams]) -> None:
        self._runner.kv_connector.set_disabled(True)
        names = self._begin(params)
        first, last = names[:1], names[-1:]
        self._decode(names, drafted=names, grammar=True)
        self._decode(first, drafted=first)
        self._decode(names, drafted=last)
        self._decode(first, drafted=[])
        self._worker.execute_model(_scheduled({}, finished_req_ids={*names}))
        self._runner.kv_connector.set_disabled(False)

    def _begin(self, params: Sequence[SamplingParams]) -> list[str]:
        """Read the prompts; return the names of the requests."""
        requests, free = [], 1  # Block 0 belongs to nobody.
        for number, each in enumerate(params):
            blocks = []
            for count in self._blocks:
                blocks.append([*range(free, free + count)])
                free += count
            requests.append(
                NewRequestData(
                    req_id=f"_rehearsed_{number}_",
                    prompt_token_ids=PROMPT,
                    mm_features=[],
                    sampling_params=each,
                    pooling_params=None,
                    block_ids=tuple(blocks),
                    num_computed_tokens=0,
                    lora_request=None,
                    prefill_token_ids=PROMPT,
                )
            )
        self._computed = {each.req_id: len(PROMPT) for each in requests}
        self._step({**self._computed}, scheduled_new_reqs=requests)
        return [*self._computed]

    def _decode(
        self, names: Sequence[str], *, drafted: Sequence[str], grammar: bool = False
    ) -> None:
        """Run one decode step for requests ``names``; those in ``drafted`` carry drafts.
        ``grammar``: with one that allows every token."""
        cached = CachedRequestData(
            req_ids=[*names],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None for _ in names],
            num_computed_tokens=[self._computed[name] for name in names],
            num_output_tokens=[1 for _ in names],
        )
        rows = {name: self._rows if name in drafted else 1 for name in names}
        drafts = dict.fromkeys(drafted if self._drafts else (), [0] * self._drafts)
        allowed = None
        if grammar and self._runner.is_last_pp_rank:
            words = -(-self._runner.model_config.get_vocab_size() // 32)
            everything = np.full((len(names) * self._rows, words), -1, dtype=np.int32)
            allowed = GrammarOutput([*names], everything)
        self._step(rows, allowed, scheduled_cached_reqs=cached, scheduled_spec_decode_tokens=drafts)
        for name in names:
            self._computed[name] += rows[name]

    def _step(
        self, rows: dict[str, int], allowed: GrammarOutput | None = None, **scheduled: Any
    ) -> None:
        self._worker.execute_model(
            _scheduled(rows, num_spec_tokens_to_schedule=self._drafts, **scheduled)
        )
        self._worker.sample_tokens(allowed)


def _scheduled(rows: dict[str, int], **more: Any) -> SchedulerOutput:
    """Return what the scheduler says of a step over these ``rows`` by the names of requests."""
    return replace(
        SchedulerOutput.make_empty(),
        num_scheduled_tokens=rows,
        total_num_scheduled_tokens=sum(rows.values()),
        **more,
    )
