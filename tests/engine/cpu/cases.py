"""Calls of vLLM's kernel wrappers on fixed inputs, to run with and without Triton.

Run as a program, it evaluates every case with Triton's interpreter and saves the results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

Results = dict[str, torch.Tensor]

CASES: dict[str, Callable[[], Results]] = {}
TOLERANCES: dict[str, float] = {}
CPU = torch.device("cpu")


def case(*parameters: object, tolerance: float = 0.0) -> Callable[..., Callable[..., Results]]:
    """Register a case once per parameter; its random inputs depend on nothing but its name."""

    def register(function: Callable[..., Results]) -> Callable[..., Results]:
        for parameter in parameters or (None,):
            name = function.__name__ + ("" if parameter is None else f"[{parameter}]")

            def run(name: str = name, parameter: object = parameter) -> Results:
                torch.manual_seed(sum(name.encode()))
                return function() if parameter is None else function(parameter)

            CASES[name] = run
            TOLERANCES[name] = tolerance
        return function

    return register


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def random_ids(vocab: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocab, shape, dtype=torch.int32)


# Requests of states 3, 0, 2: a decode with two drafts, a chunk of a prompt, a prompt's last chunk.
REQUESTS = int64(3, 0, 2)
STARTS = int32(0, 3, 10, 12)
COMPUTED = int32(4, 0, 6, 20)
PREFILL = int32(12, 0, 8, 15)
CU_LOGITS = int32(0, 3, 4, 5)


@case(torch.int32, torch.int64, torch.float32)
def staged_writes(dtype: torch.dtype) -> Results:
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    table = StagedWriteTensor((5, 1500), dtype, CPU)
    for row, start, length in ((4, 7, 1100), (0, 0, 3), (4, 9, 2), (2, 1499, 1)):
        table.stage_write(row, start, torch.randint(99, (length,)).tolist())
    table.apply_write()
    flat = StagedWriteTensor(6, dtype, CPU)
    flat.stage_write_elem(5, 42)
    flat.stage_write_elem(0, 43)
    flat.apply_write()
    return {"table": table.gpu, "flat": flat.gpu}


@case(1, 2)
def block_tables(groups: int) -> Results:
    from vllm.v1.worker.gpu.block_table import BlockTables

    widths, sizes = [9, 1200][:groups], [16, 4][:groups]
    tables = BlockTables(sizes, 4, 40, widths, CPU)
    for request, blocks in ((3, 2), (0, 1), (2, 1)):
        ids = tuple(torch.randint(1, 50, (blocks * 4,)).tolist() for _ in range(groups))
        tables.append_block_ids(request, ids, overwrite=True)
    tables.append_block_ids(3, tuple([60 + g] for g in range(groups)), overwrite=False)
    tables.apply_staged_writes()
    positions = torch.cat([torch.arange(20, 23), torch.arange(4, 11), torch.arange(6, 8)])
    gathered = tables.gather_block_tables(REQUESTS, 3)
    slots = tables.compute_slot_mappings(REQUESTS, STARTS, positions, 40).clone()
    padded = tables.compute_slot_mappings(int64(-1, 2), int32(0, 4, 6), positions, 40).clone()
    none = tables.compute_slot_mappings(int64(), int32(0), positions, 40).clone()
    out = {f"gathered{i}": table for i, table in enumerate(gathered)}
    return out | {"slots": slots, "padded": padded, "none": none}


@case()
def slot_mapping_of_a_disabled_group() -> Results:
    from vllm.v1.worker.gpu.block_table import BlockTables

    tables = BlockTables([4, 4], 1, 10, [3, 3], CPU, slot_mapping_enabled=[False, True])
    tables.append_block_ids(0, ([5, 6], [7, 8]), overwrite=True)
    tables.apply_staged_writes()
    return {"slots": tables.compute_slot_mappings(int64(0), int32(0, 6), torch.arange(6), 10)}


@case(1, 3)
def prefill_inputs(lookahead: int) -> Results:
    from vllm.v1.worker.gpu.input_batch import prepare_prefill_inputs

    input_ids, next_tokens = torch.full((20,), -7, dtype=torch.int32), random_ids(9, lookahead, 4)
    token_ids = random_ids(500, 4, 30)
    prepare_prefill_inputs(input_ids, next_tokens, REQUESTS, STARTS, token_ids, PREFILL, COMPUTED)
    return {"input_ids": input_ids, "next": next_tokens}


@case()
def positions_and_lengths() -> Results:
    from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens

    positions, lengths = torch.full((20,), -7), torch.full((6,), -7, dtype=torch.int32)
    prepare_pos_seq_lens(REQUESTS, STARTS, COMPUTED, positions, lengths)
    return {"positions": positions, "lengths": lengths}


@case(0, 1)
def combine_sampled_and_drafts(new_tokens: int) -> Results:
    from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens

    input_ids = torch.full((20,), -7, dtype=torch.int32)
    # The last request's two rows straddle its prompt, as after a resumption.
    starts, lengths = int32(0, 3, 10, 12), int32(23, 11, 9)
    cu_logits = int32(0, 3, 4, 6) if new_tokens else int32(0, 2, 3, 5)
    indices = combine_sampled_and_draft_tokens(
        input_ids,
        REQUESTS,
        torch.randint(500, (4, 1)),
        starts,
        lengths,
        PREFILL,
        torch.randint(500, (4, 2)),
        cu_logits,
        int(cu_logits[-1]),
        new_tokens,
    )
    return {"input_ids": input_ids, "indices": indices}


@case()
def sampled_and_rejected() -> Results:
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected

    sampled, rejected = get_num_sampled_and_rejected(
        int32(2, 1, 1), int32(23, 11, 8), CU_LOGITS, REQUESTS, PREFILL
    )
    return {"sampled": sampled, "rejected": rejected}


@case("full", "no counts", "no query", "empty")
def after_sampling(variant: str) -> Results:
    from vllm.v1.worker.gpu.input_batch import post_update, post_update_num_computed_tokens

    requests = int64() if variant == "empty" else int64(3, -1, 2)
    computed, last_sampled = COMPUTED.clone(), torch.randint(30, (4, 1))
    counts = None if variant == "no counts" else random_ids(3, 4, 30)
    token_ids, lengths = random_ids(30, 4, 40), int32(12, 1, 8, 23)
    post_update(
        requests,
        computed,
        last_sampled,
        counts,
        torch.tensor([[7, 7, 9], [1, 2, 3], [4, 0, 0]]),
        int32(3, 2, 0),
        int32(0, 1, 2),
        None if variant == "no query" else STARTS,
        token_ids,
        lengths,
    )
    advanced = COMPUTED.clone()
    post_update_num_computed_tokens(REQUESTS, advanced, STARTS)
    out = {"computed": computed, "last": last_sampled, "ids": token_ids, "lengths": lengths}
    return out | {"advanced": advanced} | ({} if counts is None else {"counts": counts})


@case()
def expanded_requests() -> Results:
    from vllm.v1.worker.gpu.input_batch import expand_idx_mapping

    expanded, local = expand_idx_mapping(int64(3, 0, -1), 6, int32(0, 3, 3, 6), 3)
    return {"expanded": expanded, "local": local}


SEEDS = int64(5, -(2**62), 2**63 - 1, -1)
TEMPERATURES = torch.tensor([0.0, 0.7, 1.3, 1.0])
ROWS = int64(0, 1, 2, 3, 2, 1, 0)
POSITIONS = int64(0, 3, 2**20, 9, 3, 2**33 + 1, 1)


@case(512, 1500, 5)
def temperature(vocab: int) -> Results:
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

    logits = torch.randn(7, vocab) * 5
    apply_temperature(logits, ROWS, TEMPERATURES)
    return {"logits": logits}


@case((512, False), (1500, False), (1500, True), (3, False))
def gumbel(parameters: tuple[int, bool]) -> Results:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    vocab, use_fp64 = parameters
    out = {}
    for trial in range(3):
        logits = torch.randn(7, vocab) * 3
        logits[:, 1::2] = float("-inf") if trial == 2 else logits[:, 1::2]
        for drafting in (False, True):
            for scale in (False, True):
                out[f"{trial} {drafting} {scale}"] = gumbel_sample(
                    logits, ROWS, TEMPERATURES, SEEDS, POSITIONS, scale, drafting, use_fp64=use_fp64
                )
    return out


@case("scalar", "per token")
def gumbel_with_logits_cache(column: str) -> Results:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    logits, cache = torch.randn(4, 1100).bfloat16(), torch.zeros(4, 3, 1104).bfloat16()
    sampled = gumbel_sample(
        logits,
        int64(1, 3, -1, 0),
        TEMPERATURES,
        SEEDS,
        POSITIONS[:4],
        True,
        True,
        logits_cache=cache,
        logits_cache_col=torch.tensor(2) if column == "scalar" else int64(0, 1, 2, 0),
    )
    return {"sampled": sampled, "cache": cache}


@case(1500, 7)
def min_p(vocab: int) -> Results:
    from vllm.v1.worker.gpu.sample.min_p import apply_min_p

    logits = torch.randn(4, vocab) * 4
    apply_min_p(logits, int64(2, 0, 1, 2), torch.tensor([0.0, 0.3, 1.0]))
    return {"logits": logits}


@case((0, 0), (3, 0), (0, 4), (5, 4), tolerance=3e-6)
def topk_scores(counts: tuple[int, int]) -> Results:
    from vllm.v1.worker.gpu.sample.logprob import LogprobTokenIdsState, compute_topk_scores

    num_topk, num_custom = counts
    state = LogprobTokenIdsState(3, CPU)
    state.num_token_ids.np[1] = num_custom
    state.token_ids.stage_write(1, 0, list(range(num_custom)))
    state.apply_staged_writes()
    logits = torch.randn(5, 1500) * 6
    logits[0, 10:] = float("-inf")
    scores = compute_topk_scores(
        logits,
        num_topk,
        int64(3, 3, 1499, 0, 700),
        logprob_token_ids_state=state,
        expanded_idx_mapping=int64(0, 1, 1, 2, 1),
        max_per_req_token_ids=num_custom,
    )
    ranks = scores.selected_token_ranks
    return {"ids": scores.logprob_token_ids, "logprobs": scores.logprobs, "ranks": ranks}


@case()
def prompt_logprob_ids() -> Results:
    from vllm.v1.worker.gpu.sample.prompt_logprob import get_prompt_logprobs_token_ids

    ids = get_prompt_logprobs_token_ids(12, STARTS, REQUESTS, COMPUTED, random_ids(99, 4, 40))
    return {"ids": ids}


@case(33, 1500, tolerance=1e-6)
def penalties(vocab: int) -> Results:
    from vllm.v1.worker.gpu.sample.penalties import apply_penalties, bincount

    mask, counts = random_ids(9, 4, -(-vocab // 32)), random_ids(9, 4, vocab)
    bincount(int64(3, 0), random_ids(vocab, 4, 1400), int32(1100, 9, 9, 5), int32(1300, 9, 9, 5),
             mask, counts, 1300)  # fmt: skip
    logits, tokens = torch.randn(6, vocab) * 3, random_ids(vocab, 6)
    tokens[2] = -1
    repetition, frequency, presence = torch.tensor(
        [[1.3, 1.0, 1.0, 0.8], [0.0, 0.0, 0.4, 0.2], [0.0, 0.0, -0.3, 0.1]]
    )
    apply_penalties(
        logits,
        int64(3, 3, 3, 0, 1, 2),
        tokens,
        int32(0, 1, 2, 0, 0, 0),
        repetition,
        frequency,
        presence,
        mask,
        counts,
    )
    return {"logits": logits, "mask": mask, "counts": counts}


@case(False, True)
def logit_bias(check_all_masked: bool) -> Results:
    from vllm.v1.worker.gpu.sample.logit_bias import apply_logit_bias

    logits = torch.randn(6, 100) * 3
    logits[4, 2:] = float("-inf")
    logits[5, :] = float("-inf")
    apply_logit_bias(
        logits,
        int64(0, 1, 2, 3, 4, 4),
        int64(5, 9, 3, 3, 3, 3),
        int32(3, 0, 0, 2, 0),
        random_ids(100, 5, 8),
        int32(0, 2, 0, 1, 0),
        torch.tensor([[1, 0], [9, 3], [0, 0], [7, 0], [0, 0]], dtype=torch.int32),
        torch.randn(5, 2),
        int32(0, 10, 9, 9, 9),
        int32(0, 1, 2, 0, 2),
        int32(0, 0, 0, 0, 1),
        torch.tensor([[0, 1]] * 5, dtype=torch.int32),
        check_all_masked,
    )
    return {"logits": logits}


@case()
def bad_words() -> Results:
    from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words

    # Words of request 0: (7), (1 2 8), (2 3 9); of request 1: (4 4 4 5).
    words = torch.tensor([[7, 1, 2, 8, 2, 3, 9], [4, 4, 4, 5, 0, 0, 0]], dtype=torch.int32)
    offsets = torch.tensor([[0, 1, 4, 7], [0, 4, 0, 0]], dtype=torch.int32)
    # The prompt's 4s do not count for request 1.
    token_ids = torch.tensor([[0, 0, 6, 1, 0], [4, 4, 4, 4, 0]], dtype=torch.int32)
    logits = torch.zeros(5, 12)
    apply_bad_words(
        logits,
        int64(0, 0, 0, 1, 1),
        words,
        offsets,
        int32(3, 1),
        token_ids,
        int32(2, 2),
        int32(4, 4),
        int32(1, 2, 3, 4, 4),
        int32(0, 1, 2, 0, 1),
        3,
    )
    return {"logits": logits}


@case(*range(12))
def thinking_budget(seed: int) -> Results:
    from vllm.v1.worker.gpu.sample.thinking_budget import apply_thinking_budget

    torch.manual_seed(seed)
    # A vocabulary of three makes markers frequent; the long request needs two blocks to scan.
    token_ids, lengths = random_ids(3, 3, 2600), int32(2500, 9, 3)
    if seed % 3 == 0:
        token_ids[0, 60:] = 0
    logits = torch.zeros(6, 8)
    starts, ends, scanned = int32(-1, -1, 1), int32(-1, 2, -1), int32(0, 4, 99 if seed % 2 else 1)
    apply_thinking_budget(
        logits,
        int64(0, 1, 2),
        int64(0, 1, 1, 1, 2, 2),
        int32(0 if seed % 4 else 3000, 2, -1 if seed % 5 == 0 else 0),
        token_ids,
        lengths,
        random_ids(3, 6),
        int32(0, 0, 1, 2, 0, 1),
        starts,
        ends,
        scanned,
        int32(1, 2),
        int32(2, 1),
        int32(2, 1, 0)[: 1 + seed % 3],
    )
    return {"logits": logits, "starts": starts, "ends": ends, "scanned": scanned}


@case((torch.float32, 100), (torch.bfloat16, 64))
def grammar_bitmask(parameters: tuple[torch.dtype, int]) -> Results:
    from vllm.triton_utils import triton
    from vllm.v1.worker.gpu.structured_outputs import _apply_grammar_bitmask_kernel

    dtype, vocab = parameters
    logits, words = torch.randn(6, vocab + 3).to(dtype)[:, :vocab], -(-vocab // 32)
    bitmask = torch.randint(-(2**31), 2**31, (4, words), dtype=torch.int32)
    # (request, local position) pairs; request 2 has one row, so its second mask is inactive.
    mapping = int32(0, 1, 3 * 2, 3 * 2 + 1)
    _apply_grammar_bitmask_kernel[(4, triton.cdiv(vocab, 8192))](
        logits,
        logits.stride(0),
        mapping,
        int32(0, 2, 5, 6),
        bitmask,
        bitmask.stride(0),
        vocab,
        MASK_STRIDE=3,
        BLOCK_SIZE=8192,
    )
    return {"logits": logits}


@case()
def nan_counts() -> Results:
    from vllm.v1.worker.gpu.metrics.logits import get_num_nans

    logits = torch.randn(3, 9000)
    logits[1, ::1000] = float("nan")
    return {"nans": get_num_nans(logits)}


@case()
def draft_prefill() -> Results:
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import prepare_prefill_inputs

    buffers = SimpleNamespace(query_start_loc=int32(*[-7] * 6), seq_lens=int32(*[-7] * 5))
    batch = SimpleNamespace(
        num_reqs=3,
        num_tokens=12,
        query_start_loc_np=STARTS.numpy(),
        input_ids=random_ids(99, 20),
        positions=torch.cat([torch.arange(18, 21), torch.arange(4, 11), torch.arange(6, 8)]),
        idx_mapping=REQUESTS,
        query_start_loc=STARTS,
        seq_lens=int32(21, 11, 8),
    )
    input_ids, positions = random_ids(9, 24), torch.full((24,), -7)
    indices, last_sampled = torch.full((5,), -7), torch.randint(99, (4, 1))
    total = prepare_prefill_inputs(
        buffers, batch, last_sampled, int64(2, 0, 1), input_ids, positions, indices, 5, 20
    )
    assert total == 15
    out = {"ids": input_ids, "positions": positions, "indices": indices}
    return out | {"starts": buffers.query_start_loc, "lengths": buffers.seq_lens}


@case()
def draft_rows() -> Results:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
        _flatten_sampled_kernel,
        gather_draft_sampled,
    )

    drafts, positions = gather_draft_sampled(
        random_ids(99, 12),
        torch.cat([torch.arange(20, 23), torch.arange(4, 11), torch.arange(6, 8)]),
        int64(0, 1, 2, 8, 9, 11),
        int64(3, 3, 3, 0, 0, 2),
        int32(0, 1, 2, 0, 1, 0),
        PREFILL,
    )
    flat = torch.full((5,), -7)
    _flatten_sampled_kernel[(3,)](
        flat, torch.randint(99, (3, 3)), 3, int32(2, 0, 1), CU_LOGITS, num_warps=1
    )
    return {"drafts": drafts, "positions": positions, "flat": flat}


@case("greedy draft", "sampled draft", "synthetic", "fp64", "synthetic greedy")
def rejection_sampling(variant: str) -> Results:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    vocab, cu_logits, out = 9000, int32(0, 4, 8, 9, 12), {}
    requests = int64(2, 0, 1, 3)
    local = torch.cat([torch.arange(n) for n in (4, 4, 1, 3)]).int()
    rows = requests.repeat_interleave(int64(4, 4, 1, 3))
    temperatures = torch.zeros(4) if variant == "synthetic greedy" else TEMPERATURES
    for trial in range(3):
        target = (torch.randn(12, vocab + 5) * 7)[:, :vocab]
        drafts = target.argmax(1).roll(1).int()
        drafts[3 * trial], drafts[trial + 4] = -1, 0
        draft_logits = None
        if variant == "sampled draft":
            draft_logits = torch.randn(4, 3, vocab) * 3
            owners, steps = rows[local < 3], local[local < 3].long()
            draft_logits[owners, steps] += target[local < 3] * temperatures[owners].unsqueeze(1)
        sampled, count = rejection_sample(
            target,
            draft_logits,
            drafts,
            cu_logits,
            torch.randint(2**40, (12,)),
            requests,
            rows,
            local,
            temperatures,
            SEEDS,
            3,
            torch.tensor([0.7, 0.5, 0.3]) if "synthetic" in variant else None,
            use_fp64=variant == "fp64",
        )
        written = torch.arange(4) < count.unsqueeze(1)
        out[f"sampled {trial}"], out[f"count {trial}"] = sampled.where(written, -1), count
    return out


def complete_interpreter() -> None:
    """Add what the interpreter of Triton lacks for these kernels."""
    from triton.backends import Backend, backends
    from triton.runtime.interpreter import InterpreterBuilder

    class ActiveDriver:
        @staticmethod
        def is_active() -> bool:
            return True

    # vLLM's CPU build uses Triton if a "cpu" backend is registered; the interpreter needs none.
    backends["cpu"] = Backend(compiler=None, driver=ActiveDriver)

    # A mask made of a scalar and a block arrives as int8 with the block's shape or the scalar's.
    def with_boolean_mask(name: str, index: int) -> None:
        stock = getattr(InterpreterBuilder, name)

        def access(self: object, pointers: Any, *rest: Any) -> object:
            mask = rest[index]
            mask.data = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
            return stock(self, pointers, *rest)

        setattr(InterpreterBuilder, name, access)

    with_boolean_mask("create_masked_load", 0)
    with_boolean_mask("create_masked_store", 1)

    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.triton_utils import HAS_TRITON, tl
    from vllm.v1.worker.gpu.metrics import logits
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    if not HAS_TRITON:
        raise RuntimeError("vLLM did not take up Triton's interpreter")
    # Functions of the device library are compiled code.
    rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
    logits.libdevice = SimpleNamespace(isnan=lambda x: x != x)


if __name__ == "__main__":
    complete_interpreter()
    torch.save({name: run() for name, run in CASES.items()}, sys.argv[1])
