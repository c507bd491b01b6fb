"""What vLLM's chains of block drafts (DFlash, DSpark) need: the kernel of their inputs, and a norm.

A request's rows are its root and masks. The keys and values of what the target has read before the
root are written apart, from the target's hidden states.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import Any

from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.registry import implements


@compiled
def _slot(blocks, position, block_size):
    """Return the slot of a position; -1 in the null block."""
    block = blocks[min(position // block_size, blocks.shape[0] - 1)]
    return block * block_size + position % block_size if block else -1


@implements(
    "spec_decode.dflash.speculator._prepare_dflash_inputs_kernel",
    "cp_rank SAMPLE_FROM_ANCHOR PAD_SLOT_ID CP_SIZE CP_INTERLEAVE",
)
@compiled
def prepare_block_inputs(
    out_input_ids, out_query_positions, out_query_start_loc, out_seq_lens, out_query_slot_mapping,
    out_context_positions, out_context_slot_mapping, out_sample_indices, out_sample_pos,
    out_sample_idx_mapping, out_temperature, out_seeds, target_positions, target_query_start_loc,
    idx_mapping, last_sampled, next_prefill_tokens, num_sampled, num_rejected, temperature, seeds,
    block_table, parallel_drafting_token_id, block_size, num_query_per_req, num_speculative_steps,
    max_num_reqs, max_num_tokens, max_model_len,
):  # fmt: skip
    """Rows of rejected drafts are no context. A root that proposes has one row less after it."""
    count, width, steps = idx_mapping.shape[0], num_query_per_req, num_speculative_steps
    first, sampled, prefill = width - steps, last_sampled.reshape(-1), next_prefill_tokens.ravel()
    for i in range(count):
        request = idx_mapping[i]
        end = target_query_start_loc[i + 1] - num_rejected[i]
        for row in range(target_query_start_loc[i], target_query_start_loc[i + 1]):
            out_context_positions[row] = target_positions[row] if row < end else 0
            out_context_slot_mapping[row] = -1
            if row < end:
                slot = _slot(block_table[i], target_positions[row], block_size)
                out_context_slot_mapping[row] = slot
        root = target_positions[end - 1] + 1
        for k in range(width):
            row = i * width + k
            out_input_ids[row] = parallel_drafting_token_id
            out_query_positions[row] = min(root + k, max_model_len - 1)
            out_query_slot_mapping[row] = _slot(block_table[i], root + k, block_size)
            if k >= first:
                sample = i * steps + k - first
                out_sample_indices[sample] = row
                out_sample_pos[sample] = root + k + 1 - first
                out_sample_idx_mapping[sample] = request
        # Without a sampled token, this is a chunk of a prompt, which goes on after it.
        out_input_ids[i * width] = sampled[request] if num_sampled[i] > 0 else prefill[request]
        out_query_start_loc[i] = i * width
        out_seq_lens[i] = min(root + width, max_model_len)
        out_temperature[request], out_seeds[request] = temperature[request], seeds[request]
    out_query_start_loc[count : max_num_reqs + 1] = count * width
    out_seq_lens[count:max_num_reqs] = 0
    out_query_slot_mapping[count * width : max_num_tokens] = -1
    out_sample_indices[count * steps : max_num_reqs * steps] = 0
    out_sample_pos[count * steps : max_num_reqs * steps] = 0
    out_sample_idx_mapping[count * steps : max_num_reqs * steps] = -1


def normalize_by_layer() -> None:
    """Let vLLM's ``rms_norm`` normalize each layer of a block draft with its own weights.

    Its kernel for CPUs takes the weights of the first of several layers for all of them.
    """
    from vllm import _custom_ops

    operators: Any = _custom_ops
    stock = operators.rms_norm

    def rms_norm(out: Any, given: Any, weight: Any, epsilon: float) -> None:
        if weight is None or weight.dim() == 1:
            stock(out, given, weight, epsilon)
            return
        for of_layer in zip(out, given, weight, strict=True):
            stock(*of_layer, epsilon)

    operators.rms_norm = rms_norm
