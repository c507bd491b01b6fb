"""Compile the CPU kernels before the first request.

numba compiles a kernel for the types of the arguments at its first call, and the machine code is
kept on disk. So one call of each of vLLM's wrappers compiles everything. The inputs are as small as
possible, and have the runner's types.
"""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.sample import (
    bad_words,
    logit_bias,
    logprob,
    penalties,
    prompt_logprob,
    thinking_budget,
)
from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

from dyntree_kernels.cpu import gumbel
from vllm_cpu_runner.arrays import numpys
from vllm_cpu_runner.constraints import apply_grammar_bitmask
from vllm_cpu_runner.drafting import flatten_sampled, prepare_draft_prefill
from vllm_cpu_runner.recurrent import zero_kv_blocks
from vllm_cpu_runner.target_dependent import prepare_prefill

_CPU = torch.device("cpu")
_VOCAB = 8


def compile_kernels() -> None:
    """Compile the kernels, or load them from disk. Call it after ``install()``."""
    gumbel.warm_up()
    _block_tables()
    _inputs()
    _logits_processors()
    _logprobs()
    _drafting()
    _target_dependent()
    _rejection()
    _clearing()


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _token_ids() -> torch.Tensor:
    return torch.zeros(1, _VOCAB, dtype=torch.int32)


def _block_tables() -> None:
    for dtype in (torch.int32, torch.int64, torch.float32):
        writes = buffer_utils.StagedWriteTensor((1, 1), dtype, _CPU)
        writes.stage_write_elem(0, 1)
        writes.apply_write()
    tables = block_table.BlockTables([1, 1], 1, 1, [1, 1], _CPU)
    tables.append_block_ids(0, ([0], [0]), overwrite=True)
    tables.apply_staged_writes()
    tables.gather_block_tables(_int64(0), 1)
    tables.compute_slot_mappings(_int64(0), _int32(0, 1), _int64(0), 1)


def _inputs() -> None:
    requests, starts = _int64(0), _int32(0, 1)
    input_ids, computed, lengths, token_ids = _int32(0), _int32(0), _int32(1), _token_ids()
    lookahead = torch.zeros(1, 1, dtype=torch.int32)
    input_batch.prepare_prefill_inputs(
        input_ids, lookahead, requests, starts, token_ids, lengths, computed
    )
    input_batch.prepare_pos_seq_lens(requests, starts, computed, _int64(0), lengths)
    RopeState(1, 1, 1, 1, _CPU).prepare_positions(requests, starts, lengths, computed)
    drafts, last_sampled = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1).long()
    input_batch.combine_sampled_and_draft_tokens(
        input_ids, requests, last_sampled, starts, lengths, _int32(0), drafts, starts, 1
    )
    num_sampled, num_rejected = input_batch.get_num_sampled_and_rejected(
        _int32(1), lengths, starts, requests, _int32(1)
    )
    input_batch.expand_idx_mapping(requests, 1, starts, 1)
    input_batch.post_update_num_computed_tokens(requests, computed, starts)
    counts = torch.zeros(1, _VOCAB, dtype=torch.int32)
    input_batch.post_update(
        requests, computed, last_sampled, counts, drafts, num_sampled, num_rejected, starts,
        token_ids, _int32(1),
    )  # fmt: skip


def _logits_processors() -> None:
    logits, request, local = torch.zeros(1, _VOCAB), _int64(0), _int32(0)
    mask, counts = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, _VOCAB, dtype=torch.int32)
    zero, one, two = torch.zeros(1), _int32(1), torch.full((1,), 2.0)
    penalties.bincount(request, _token_ids(), one, _int32(2), mask, counts, 2)
    penalties.apply_penalties(logits, request, one, local, two, zero, zero, mask, counts)
    ids, amounts = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1)
    logit_bias.apply_logit_bias(
        logits, request, _int64(0), one, ids, one, ids, amounts, one, one, one, ids, True
    )
    offsets = _int32(0, 1).view(1, 2)
    bad_words.apply_bad_words(
        logits, request, ids, offsets, one, _token_ids(), one, one, one, local, 1
    )
    markers = (_int32(-1), _int32(-1), _int32(0), _int32(1), _int32(2), _int32(2))
    thinking_budget.apply_thinking_budget(
        logits, request, request, _int32(0), _token_ids(), one, one, local, *markers
    )
    padded = torch.zeros(2, _VOCAB + 1)  # a model's logits may be a slice of padded ones
    for rows in (logits, logits.bfloat16(), padded[:, :-1], padded.bfloat16()[:, :-1]):
        apply_grammar_bitmask(rows, _int32(0), _int32(0, 1), mask, MASK_STRIDE=1)


def _logprobs() -> None:
    state = logprob.LogprobTokenIdsState(1, _CPU)
    for num_topk in (0, 1):
        logprob.compute_topk_scores(
            torch.zeros(1, _VOCAB), num_topk, _int64(0), logprob_token_ids_state=state,
            expanded_idx_mapping=_int64(0), max_per_req_token_ids=1,
        )  # fmt: skip
    prompt_logprob.get_prompt_logprobs_token_ids(
        1, _int32(0, 1), _int64(0), _int32(0), _token_ids()
    )


def _drafting() -> None:
    requests, starts, one = _int64(0), _int32(0, 1), _int32(1)
    prepare_draft_prefill(
        *numpys(
            _int32(0), _int64(0), one.view(1, 1), requests, _int32(0, 0), _int64(0, 0), _int64(0),
            _int32(0, 0), _int32(0), starts, one, _int32(0),
        ),
        1, 1,
    )  # fmt: skip
    rejection_sampler.gather_draft_sampled(
        _int32(0), _int64(0), _int64(0), requests, _int32(0), one
    )
    flatten_sampled(*numpys(_int64(0), _int64(0).view(1, 1), one, starts))


def _target_dependent() -> None:
    buffers = input_batch.InputBuffers(1, 1, _CPU)
    requests, one, zero = _int64(0), _int32(1), _int32(0)
    prepare_prefill(
        _int64(0), torch.tensor(0), buffers.input_ids, buffers.positions, buffers.query_start_loc,
        buffers.seq_lens, _int32(0), _int64(0), requests, _int64(0).view(1, 1),
        _int32(0).view(1, 1), one, zero, _int32(0, 1), one, max_num_reqs=1,
    )  # fmt: skip
    drafted, hidden = _int64(0, 0).view(1, 2), torch.zeros(1, 1)
    shared = (buffers, _int64(0))
    speculator.prepare_decode_inputs(drafted[:, 0], one, zero, *shared, 1, 1)
    speculator.update_draft_inputs(
        _int64(0), torch.tensor(0), hidden, drafted, hidden, *shared, 1, 1, 2
    )


def _rejection() -> None:
    for draft_logits, rates, block in (
        (None, None, False),
        (torch.zeros(1, 1, _VOCAB), None, False),
        (None, torch.ones(1), False),
        (None, None, True),
    ):
        rejection_sampler_utils.rejection_sample(
            torch.zeros(2, _VOCAB), draft_logits, _int32(0, 0), _int32(0, 2), _int64(0, 1),
            _int64(0), _int64(0, 0), _int32(0, 1), torch.ones(1), _int64(0), 1, rates,
            use_block_verification=block,
        )  # fmt: skip


def _clearing() -> None:
    one = _int64(1)
    zero_kv_blocks(*numpys(one.to(torch.uint64), one, one, one[:0]))
