"""Logprobs of prompts, in steps that also have rows of drafts."""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import LogprobsTensors


def leave_out_drafts(worker: Any) -> None:
    """Have vLLM's ``worker`` return logprobs of a prompt's own rows.

    vLLM fills up a request whose prompt has one token left with drafts that are none, and counts
    their rows as the prompt's, named by the tokens of an earlier request of its slot.
    """
    stock = worker.compute_prompt_logprobs

    def compute_prompt_logprobs(
        logits_fn: Any, hidden_states: Any, input_batch: Any, *states: Any
    ) -> dict[str, LogprobsTensors]:
        found: dict[str, LogprobsTensors] = stock(logits_fn, hidden_states, input_batch, *states)
        drafts = input_batch.num_draft_tokens_per_req
        if drafts is None:
            return found
        of_prompt = {}
        for name, (ids, logprobs, ranks, *_) in found.items():
            own = slice(len(ids) - int(drafts[input_batch.req_ids.index(name)]))
            if own.stop:
                of_prompt[name] = LogprobsTensors(ids[own], logprobs[own], ranks[own])
        return of_prompt

    worker.compute_prompt_logprobs = compute_prompt_logprobs
