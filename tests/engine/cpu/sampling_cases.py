"""Cases of the sampler's kernels."""

from __future__ import annotations

import torch
from case_table import (
    COMPUTED,
    CPU,
    REQUESTS,
    SEEDS,
    STARTS,
    TEMPERATURES,
    Results,
    case,
    int32,
    int64,
    random_ids,
)

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

    # Bad words of request 0: (7), (1 2 8), (2 3 9); of request 1: (4 4 4 5).
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


@case(*range(6))
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
