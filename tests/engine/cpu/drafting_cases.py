"""Cases of vLLM's own drafting and rejection kernels."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from case_table import (
    CU_LOGITS,
    PREFILL,
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


@case(True, False)
def block_inputs(root_proposes: bool) -> Results:
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import prepare_dflash_inputs

    steps, most = 3, 5
    buffers = SimpleNamespace(
        input_ids=random_ids(9, 24), positions=torch.full((24,), -7),
        query_start_loc=int32(*[-7] * 6), seq_lens=int32(*[-7] * 5),
    )  # fmt: skip
    batch = SimpleNamespace(
        num_reqs=3,
        num_scheduled_tokens=STARTS.diff().numpy(),
        # The last request ends where the longest text does.
        positions=torch.cat([torch.arange(18, 21), torch.arange(4, 11), torch.arange(26, 28)]),
        query_start_loc=STARTS,
        idx_mapping=REQUESTS,
    )
    out = {
        "slots": torch.full((24,), -7), "context at": torch.full((14,), -7),
        "context slots": torch.full((14,), -7),
        "indices": torch.full((15,), -7), "sampled at": torch.full((15,), -7),
        "owners": torch.full((15,), -7), "temperatures": torch.full((4,), -7.0),
        "seeds": torch.full((4,), -7),
    }  # fmt: skip
    # A rejected draft, a chunk that the prompt goes on after, and a block beyond the table.
    tables = int32(*range(3, 24)).view(3, 7)
    tables[0, 4] = 0
    prepare_dflash_inputs(
        buffers, *out.values(), batch, int32(2, 0, 1), int32(1, 0, 0), torch.randint(99, (4, 1)),
        random_ids(99, 4), TEMPERATURES, SEEDS, tables, 4, 0, 1, 1, 98,
        steps if root_proposes else 1 + steps, steps, most, 24, 30, root_proposes,
    )  # fmt: skip
    return out | vars(buffers)


def _target_dependent_buffers() -> SimpleNamespace:
    return SimpleNamespace(
        input_ids=random_ids(9, 20),
        positions=torch.randint(5, 18, (20,)),
        query_start_loc=int32(*[-7] * 6),
        seq_lens=int32(7, 19, 20, 21, -7),
    )


@case()
def target_dependent_prefill() -> Results:
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

    buffers = _target_dependent_buffers()
    batch = SimpleNamespace(
        num_reqs=3,
        input_ids=random_ids(99, 20),
        positions=torch.cat([torch.arange(18, 21), torch.arange(4, 11), torch.arange(6, 14)]),
        idx_mapping=REQUESTS,
        query_start_loc=STARTS,
        seq_lens=int32(21, 11, 8),
    )
    indices, step = torch.full((5,), -7), torch.tensor(2)
    # A decode with a rejected draft, a chunk that the prompt goes on after, and a last chunk.
    sampled, rejected = int32(2, 0, 1), int32(1, 0, 0)
    last_sampled, lookahead = torch.randint(99, (4, 1)), random_ids(99, 2, 4)
    speculator.prepare_prefill_inputs(
        indices, step, buffers, batch, sampled, rejected, last_sampled, lookahead, 5
    )
    return {"indices": indices, "step": step, **vars(buffers)}


@case(True, False)
def target_dependent_decode(advance: bool) -> Results:
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

    buffers, sampled_at = _target_dependent_buffers(), torch.arange(4, 9)
    drafts, lengths, rejected = torch.randint(99, (4, 3)), int32(12, 20, 19, 18), int32(2, 0, 0, 4)
    buffers.positions[:2] = int64(11, 19)
    speculator.prepare_decode_inputs(
        drafts[:, 0], lengths, rejected, buffers, sampled_at, 20, 5, advance
    )
    return {"sampled at": sampled_at, **vars(buffers)}


@case(*((step, advance) for step in (0, 2) for advance in (True, False)))
def target_dependent_update(variant: tuple[int, bool]) -> Results:
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

    (step, advance), buffers = variant, _target_dependent_buffers()
    drafted, sampled_at, hidden = torch.full((5, 3), -7), torch.arange(4, 9), torch.randn(9, 24)
    buffers.positions[:2] = int64(11, 19)
    speculator.update_draft_inputs(
        torch.randint(99, (4,)),
        torch.tensor(step),
        torch.randn(6, 40)[:, :24],
        drafted,
        hidden,
        buffers,
        sampled_at,
        4,
        20,
        3,
        advance,
    )
    return {"drafted": drafted, "hidden": hidden, "sampled at": sampled_at, **vars(buffers)}
