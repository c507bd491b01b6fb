"""Rows of trees get what vLLM's own processors give to the chain from the root to the row."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from path_checks import Batch, batch_of
from vllm import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsContext,
    LogitsProcessor,
)
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dyntree_kernels.cpu.paths import KERNELS
from dyntree_plugin.engine.sampling.parameters import TreeParameters
from dyntree_plugin.engine.sampling.processors import (
    ProcessorsOnTrees,
    custom_processors,
    read_paths,
)
from dyntree_plugin.engine.step import verify
from dyntree_plugin.engine.step.verify import TreeVerifier
from vllm_cpu_runner.long_lists import lift_limits

SLOTS, VOCABULARY, PROMPT, TOTAL, DEPTH = 6, 40, 9, 14, 12
CPU = torch.device("cpu")
PARAMETERS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "bad_words": {"words": [[7], [1, 2], [0, 3, 4], [2, 2, 1]]},
    "thinking_budget": {"thinking_token_budget": 2},
    "min_tokens": {"min_tokens": TOTAL - PROMPT + 2, "stop_token_ids": [3, 5]},
    "logits_processors": {"extra_args": {"apart": True}},
}


class Apart(LogitsProcessor):
    """Forbid the token of the row before, and count calls; for requests that ask for it."""

    def __init__(self) -> None:
        self.asking: set[int] = set()
        self.calls: list[LogitsContext] = []

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        asks = bool(sampling_params.extra_args)
        (self.asking.add if asks else self.asking.discard)(req_idx)
        return asks

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        self.calls.append(ctx)
        for row, local in enumerate(ctx.expanded_local_pos.tolist()):
            if int(ctx.expanded_idx_mapping[row]) in self.asking and local:
                assert ctx.expanded_local_pos[row - 1] == local - 1
                logits[row, ctx.input_ids[row - 1]] -= 7
        return logits


class Made(NamedTuple):
    sampler: Any
    custom: Apart


def made() -> Made:
    """Return a sampler of vLLM, with the same texts in its slots every time."""
    g = torch.Generator().manual_seed(1)
    prompt = UvaBackedTensor(SLOTS, dtype=torch.int32)
    prompt.np[:] = PROMPT
    prompt.copy_to_uva()
    tokens = StagedWriteTensor((SLOTS, 64), dtype=torch.int32, device=CPU)
    tokens.gpu[:] = torch.randint(5, (SLOTS, 64), generator=g)
    total = StagedWriteTensor(SLOTS, dtype=torch.int32, device=CPU)
    total.gpu[:] = TOTAL
    states: Any = SimpleNamespace(
        device=CPU, max_num_reqs=SLOTS, vocab_size=VOCABULARY, all_token_ids=tokens,
        prompt_len=prompt, prefill_len=prompt, total_len=total,
    )  # fmt: skip
    reasoning = SimpleNamespace(
        reasoning_start_token_ids=[1],
        reasoning_end_token_ids=[2, 3],
        natural_reasoning_end_token_ids=[2],
    )
    config: Any = SimpleNamespace(reasoning_config=reasoning)
    custom = Apart()
    sampler = Sampler(config, SLOTS, VOCABULARY, CPU, states, custom_logits_processors=[custom])
    return Made(sampler, custom)


def add(sampler: Any, params: list[dict[str, Any]]) -> None:
    for slot, own in enumerate(params):
        words = own.get("words")
        request = SamplingParams(**{k: v for k, v in own.items() if k != "words"})
        request.update_from_generation_config({}, 0)
        request._bad_words_token_ids = words
        sampler.add_request(slot, request)
    sampler.apply_staged_writes()


def on_trees(parents: torch.Tensor, params: list[dict[str, Any]], **options: Any) -> Made:
    """Return such a sampler whose processors read paths, and have long lists, as in the engine."""
    found = made()
    parameters = TreeParameters(found.sampler, KERNELS)
    custom = custom_processors(found.sampler)
    lift_limits(found.sampler, VOCABULARY, 1 << 10)
    trees: Any = SimpleNamespace(
        parents=parents, spare=SLOTS, shape=SimpleNamespace(max_depth=DEPTH)
    )
    wanted = {"unrolls": True} | options
    processors = ProcessorsOnTrees(
        found.sampler, parameters, custom, trees, KERNELS.paths_of, **wanted
    )
    read_paths(found.sampler, processors)
    add(found.sampler, params)
    return found


def context(batch: Batch) -> LogitsContext:
    """Describe the rows as the engine does, where a node's position is the root's plus depth."""
    requests = batch.slots[batch.local == 0]
    depth = torch.tensor([len(path) for path in batch.expected])
    return LogitsContext(
        expanded_idx_mapping=batch.slots,
        idx_mapping=requests,
        idx_mapping_np=requests.numpy(),
        expanded_local_pos=batch.local,
        input_ids=batch.ids,
        pos=TOTAL - 1 + depth,
        seq_lens_upper_bound_np=(requests * 0 + 64).numpy(),
    )


def run(sampler: Any, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
    """Return what the sampler makes of the logits before temperature."""
    logits = logits.clone()
    for each in sampler.logits_processors:
        logits = each.apply(logits, ctx)
    sampler.thinking_budget_state.apply(logits, ctx)
    return logits


def chains(batch: Batch) -> list[list[int]]:
    """Return the rows of each row's chain, by climbing."""
    found = []
    for row, (slot, local) in enumerate(
        zip(batch.slots.tolist(), batch.local.tolist(), strict=True)
    ):
        rows, node = [row], local - 1
        while node >= 0:
            node = int(batch.parents[slot, node])
            rows.append(row - local + 1 + node)
        found.append(rows[::-1])
    return found


def one_by_one(sampler: Any, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return what vLLM's processors give to the last row of each chain, alone in its batch."""
    ctx, found = context(batch), []
    for rows in chains(batch):
        own = ctx.expanded_idx_mapping[rows]
        chain = replace(
            ctx,
            expanded_idx_mapping=own,
            idx_mapping=own[:1],
            idx_mapping_np=own[:1].numpy(),
            expanded_local_pos=torch.arange(len(rows), dtype=torch.int32),
            input_ids=ctx.input_ids[rows],
            pos=TOTAL - 1 + torch.arange(len(rows)),
        )
        found.append(run(sampler, logits[rows], chain)[-1])
    return torch.stack(found)


def batch_and_logits(seed: int = 0) -> tuple[Batch, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    batch = batch_of(g, [11, 0, 7, 11, 3], 11)
    return batch, torch.randn(len(batch.slots), VOCABULARY, generator=g) * 3


def stock(params: list[dict[str, Any]]) -> Made:
    found = made()
    add(found.sampler, params)
    return found


@pytest.mark.parametrize("name", [*PARAMETERS, "all of them"])
def test_a_row_gets_what_the_end_of_its_chain_gets(name: str) -> None:
    everything = [*PARAMETERS.values(), PARAMETERS["penalties"] | PARAMETERS["thinking_budget"]]
    params = everything if name == "all of them" else [PARAMETERS[name]] * SLOTS
    differs = False
    for seed in range(4):
        batch, logits = batch_and_logits(seed)
        found = run(on_trees(batch.parents, params).sampler, logits, context(batch))
        expected = one_by_one(stock(params).sampler, logits, batch)
        assert torch.equal(found, expected)
        assert not torch.equal(found, logits)
        # Control: the rows before, or the place of a row for its depth, give something else.
        by_rows = replace(context(batch), pos=TOTAL - 1 + batch.local.long())
        differs |= not torch.equal(run(stock(params).sampler, logits, by_rows), expected)
    assert differs


def test_a_batch_without_drafts_goes_to_vllms_own_processors() -> None:
    params = [*PARAMETERS.values(), {}]
    g = torch.Generator().manual_seed(2)
    batch = batch_of(g, [0, 0, 0, 0, 0, 0], 11)
    logits = torch.randn(SLOTS, VOCABULARY, generator=g)
    ours = on_trees(torch.full((SLOTS, 0), -1), params)  # It would fail if it read the trees.
    found = run(ours.sampler, logits, context(batch))
    assert torch.equal(found, run(stock(params).sampler, logits, context(batch)))
    assert [len(ctx.input_ids) for ctx in ours.custom.calls] == [SLOTS]


def test_a_custom_processor_sees_whole_chains_in_one_call() -> None:
    batch, logits = batch_and_logits()
    ours = on_trees(batch.parents, [PARAMETERS["logits_processors"]] * SLOTS)
    found = run(ours.sampler, logits, context(batch))
    assert found.is_contiguous()
    (ctx,) = ours.custom.calls
    shape = (len(logits), DEPTH + 1)
    local = ctx.expanded_local_pos.view(shape)
    for row, chain in enumerate(chains(batch)):
        copies = DEPTH + 1 - len(chain)
        assert local[row].tolist() == [0] * copies + [*range(len(chain))]
        assert ctx.input_ids.view(shape)[row, copies:].tolist() == batch.ids[chain].tolist()
        assert set(ctx.input_ids.view(shape)[row, :copies].tolist()) <= {int(batch.ids[chain[0]])}
        assert torch.equal(ctx.pos.view(shape)[row], TOTAL - 1 + local[row])
        assert set(ctx.expanded_idx_mapping.view(shape)[row].tolist()) == {int(batch.slots[row])}
    assert torch.equal(ctx.idx_mapping, context(batch).idx_mapping)


ROWS = [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
"""Of three requests."""


def verifier(copies: int = 1, **sampler: Any) -> TreeVerifier:
    of_sampler: Any = SimpleNamespace(logprobs_mode="raw_logprobs", **sampler)
    nothing: Any = None
    ops, walk = SimpleNamespace(perturb=None), SimpleNamespace(reads_logits=False)
    given: Any = (of_sampler, nothing, nothing, ops, nothing)
    named: Any = {"walk": walk, "buffers": nothing, "keepers": nothing}
    return TreeVerifier(*given, **named, copies=copies)


@pytest.mark.parametrize(
    ("copies", "expected"), [(1, [[0, 1], [2]]), (2, [[0], [1], [2]]), (9, [[0], [1], [2]])]
)
def test_the_sampler_gets_fewer_rows_at_once_if_it_copies_them(
    copies: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.arange(9.0)[:, None].expand(-1, VOCABULARY)
    monkeypatch.setattr(verify, "MAX_CHUNK_BYTES", 4 * 5 * VOCABULARY)
    seen: list[list[list[int]]] = []

    def sample(part: torch.Tensor, *given: Any, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append([each.tolist() for each in (part[:, 0], *given)])
        return torch.zeros(len(part)), part

    made = verifier(copies, sample=sample)
    rows, requests = torch.arange(9), torch.arange(3)
    batch: Any = SimpleNamespace(
        num_tokens=9, num_reqs=3, positions=rows, input_ids=rows, expanded_idx_mapping=rows,
        idx_mapping=requests, idx_mapping_np=requests.numpy(), expanded_local_pos=rows,
        seq_lens_cpu_upper_bound=requests, cu_num_logits_np=np.array([0, 3, 5, 9]),
    )  # fmt: skip
    made._sample(logits, batch, False)
    for part, asked in zip(seen, expected, strict=True):
        of_rows = [row for request in asked for row in ROWS[request]]
        by_rows, by_requests = [part[n] for n in (0, 1, 4, 5, 6)], [part[n] for n in (2, 3, 7)]
        assert by_rows == [of_rows] * 5
        assert by_requests == [asked] * 3


@pytest.mark.parametrize(("rows_at_once", "expected"), [(9, [9]), (4, [4, 4, 1])])
def test_few_rows_are_copied_at_once_for_logprobs(
    rows_at_once: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row gets the scores of a row of its path; behind the path they mean nothing."""
    monkeypatch.setattr(verify, "MAX_CHUNK_BYTES", 4 * rows_at_once * VOCABULARY)
    seen: list[int] = []

    def scores(
        logits: torch.Tensor, _: int, tokens: torch.Tensor, cu: Any, __: Any, slots: torch.Tensor,
        *___: Any, **____: Any,
    ) -> LogprobsTensors:  # fmt: skip
        seen.append(len(logits))
        return LogprobsTensors(tokens[:, None], logits[:, :1], slots, cu)

    monkeypatch.setattr(verify, "compute_topk_scores", scores)
    logits = torch.arange(9.0)[:, None].expand(-1, VOCABULARY)
    bounds = np.array([0, 3, 5, 9])
    batch: Any = SimpleNamespace(
        num_reqs=3, cu_num_logits=torch.tensor(bounds), cu_num_logits_np=bounds,
        expanded_idx_mapping=torch.tensor([4, 4, 4, 2, 2, 0, 0, 0, 0]),
    )  # fmt: skip
    path = torch.tensor([[1, -1, -1], [-1, -1, -1], [0, 2, -1]])
    walked: Any = SimpleNamespace(path=path, tokens=torch.arange(12).view(3, 4))
    made = verifier(logprob_token_ids_state=None)
    found = made._logprobs(logits, batch, walked, 1, 0)
    assert seen == expected
    on_path = [0, 2, 3, 5, 6, 8]
    assert found.logprobs[[0, 1, 3, 5, 6, 7], 0].tolist() == on_path
    assert found.logprob_token_ids[:, 0].tolist() == [0, 1, 2, 4, 5, 8, 9, 10, 11]
    assert torch.equal(found.selected_token_ranks, batch.expanded_idx_mapping)
    assert found.cu_num_generated_tokens == bounds.tolist()
