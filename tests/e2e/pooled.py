"""An engine with several drafts, or vLLM's chain of a head, that notes what each of them says. It
runs as a program, as engine_process.py does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

TOKENS = 20

Note = tuple[list[int], list[int], list[torch.Tensor]]


class Notes:
    """The texts and paths of nodes after which the drafts spoke, and what each of them said."""

    def __init__(self, states: Any) -> None:
        self._states = states
        self._contexts: list[list[int] | None] = []
        self._scratch: list[list[int]] = []
        self.found: list[Note] = []

    def roots(self, memory: Any, logits: list[torch.Tensor]) -> None:
        slots = memory.of_requests.slots[: len(logits[0])].tolist()
        ends = memory.root_positions[: len(slots)].tolist()
        tokens, lengths = self._states.all_token_ids.gpu, self._states.total_len.gpu
        self._contexts = [
            # Trees of a request that is still in its prompt are grown for nothing.
            tokens[slot, : end + 1].tolist() if lengths[slot] == end + 1 else None
            for slot, end in zip(slots, ends, strict=True)
        ]
        self._scratch = [[] for _ in slots]
        for number, context in enumerate(self._contexts):
            if context is not None:
                self.found.append((context, [], [each[number] for each in logits]))

    def nodes(self, rows: Any, logits: list[torch.Tensor]) -> None:
        width = len(rows.ids) // len(self._contexts)
        ids = rows.ids.view(-1, width).tolist()
        for scratch, of_request in zip(self._scratch, ids, strict=True):
            scratch.extend(of_request)
        for row, (bits, slot) in enumerate(zip(rows.ancestor_bits, rows.slots[0], strict=True)):
            context, scratch = self._contexts[row // width], self._scratch[row // width]
            if slot < 0 or context is None:
                continue  # no node
            path = [token for c, token in enumerate(scratch) if bits[c // 32] >> (c % 32) & 1]
            self.found.append((context, path, [each[row] for each in logits]))


def note_drafts(states: Any, source: Any) -> Notes:
    """Note what each model says before the step mixes it, or what the only one says."""
    notes = Notes(states)
    stock_roots, stock_forward = source.root_logits, source.forward
    models = getattr(source, "models", ())

    def root_logits(requests: int) -> torch.Tensor:
        logits: torch.Tensor = stock_roots(requests)
        of_models = [each.root_logits(requests) for each in models]
        notes.roots(source._memory, of_models or [logits])
        return logits

    def forward(rows: Any, *given: Any) -> torch.Tensor:
        # Models write the same keys and values again when the step calls them.
        of_models = [each.logits(rows) for each in models]
        logits: torch.Tensor = stock_forward(rows, *given)
        notes.nodes(rows, of_models or [logits])
        return logits

    source.root_logits, source.forward = root_logits, forward
    return notes


def note_chain(states: Any, speculator: Any) -> Notes:
    """Note what the head of vLLM's own chain says, unless a step ends within a prompt."""
    notes, logits = Notes(states), list[torch.Tensor]()
    stock_propose, stock_logits = speculator.propose, speculator.model.compute_logits

    def compute_logits(*given: Any) -> torch.Tensor:
        logits.append(stock_logits(*given))
        return logits[-1].clone()

    def propose(batch: Any, *given: Any, **named: Any) -> torch.Tensor:
        logits.clear()
        drafts: torch.Tensor = stock_propose(batch, *given, **named)
        num_sampled, num_rejected, last_sampled = given[4:7]
        for row, slot in enumerate(batch.idx_mapping.tolist()):
            if num_sampled[row] > 0:
                length = int(batch.seq_lens[row] - num_rejected[row])
                text = [*states.all_token_ids.gpu[slot, :length].tolist(), int(last_sampled[slot])]
                path = drafts[row].tolist()
                notes.found += [(text, path[:n], [each[row]]) for n, each in enumerate(logits)]
        return drafts

    speculator.propose, speculator.model.compute_logits = propose, compute_logits
    return notes


def main(job_path: str, results_path: str) -> None:
    from engine_process import read_metrics
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_path).read_text())["engine"]
    llm = LLM(
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        # Prompts are read in several chunks.
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,
        **job["arguments"],
    )
    runner: Any = llm.llm_engine.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
    drafter = getattr(runner.speculator, "drafter", None)
    if drafter is None:
        notes = note_chain(runner.req_states, runner.speculator)
    else:
        notes = note_drafts(runner.req_states, drafter.stages._source)
    own = {"max_tokens": TOKENS} | job.get("params", {})
    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **own)
    prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    torch.save(notes.found, job["notes"])
    found = {
        "groups": [group.layer_names for group in runner.kv_cache_config.kv_cache_groups],
        "drafts": sorted(runner.speculator.draft_attn_layer_names),
        "texts": [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs],
        "cached": sum(o.num_cached_tokens for o in outputs),
        "preemptions": read_metrics()["vllm:num_preemptions_total"],
    }
    Path(results_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
