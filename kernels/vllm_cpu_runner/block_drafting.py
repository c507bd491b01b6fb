"""What vLLM's chains of block drafts (DFlash, DSpark) need: the kernel of their inputs, and a norm.

A request's rows are its root and masks. The keys and values of what the target has read before the
root are written apart, from the target's hidden states.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.arrays import numpys
from vllm_cpu_runner.registry import implements

if TYPE_CHECKING:
    import torch


@compiled
def _slot(blocks, position, block_size):
    """Return the slot of a position; -1 in the null block."""
    block = blocks[min(position // block_size, blocks.shape[0] - 1)]
    return block * block_size + position % block_size if block else -1


@compiled
def _prepare(
    ids, positions, starts, lengths, slots, context_positions, context_slots, indices, sampled_at,
    owners, temperatures, seeds, target_positions, target_starts, requests, last_sampled,
    next_prefill, num_sampled, num_rejected, given_temperatures, given_seeds, tables, mask,
    block_size, width, steps, longest,
):  # fmt: skip
    count, first = requests.shape[0], width - steps
    for i in range(count):
        request = requests[i]
        end = target_starts[i + 1] - num_rejected[i]
        for row in range(target_starts[i], target_starts[i + 1]):
            context_positions[row] = target_positions[row] if row < end else 0
            context_slots[row] = -1
            if row < end:
                context_slots[row] = _slot(tables[i], target_positions[row], block_size)
        root = target_positions[end - 1] + 1
        for k in range(width):
            row = i * width + k
            ids[row] = mask
            positions[row] = min(root + k, longest - 1)
            slots[row] = _slot(tables[i], root + k, block_size)
            if k >= first:
                sample = i * steps + k - first
                indices[sample], sampled_at[sample] = row, root + k + 1 - first
                owners[sample] = request
        # Without a sampled token, this is a chunk of a prompt, which goes on after it.
        token = last_sampled[request] if num_sampled[i] > 0 else next_prefill[request]
        ids[i * width] = token
        starts[i], lengths[i] = i * width, min(root + width, longest)
        temperatures[request], seeds[request] = given_temperatures[request], given_seeds[request]
    starts[count:] = count * width
    lengths[count:] = 0
    slots[count * width :] = -1
    indices[count * steps :] = 0
    sampled_at[count * steps :] = 0
    owners[count * steps :] = -1


@implements("spec_decode.dflash.speculator._prepare_dflash_inputs_kernel")
def prepare_block_inputs(
    out_input_ids_ptr: torch.Tensor, out_query_positions_ptr: torch.Tensor,
    out_query_start_loc_ptr: torch.Tensor, out_seq_lens_ptr: torch.Tensor,
    out_query_slot_mapping_ptr: torch.Tensor, out_context_positions_ptr: torch.Tensor,
    out_context_slot_mapping_ptr: torch.Tensor, out_sample_indices_ptr: torch.Tensor,
    out_sample_pos_ptr: torch.Tensor, out_sample_idx_mapping_ptr: torch.Tensor,
    out_temperature_ptr: torch.Tensor, out_seeds_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor, target_query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor, last_sampled_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor, num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor, temperature_ptr: torch.Tensor, seeds_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor, block_table_stride: int, parallel_drafting_token_id: int,
    block_size: int, num_query_per_req: int, num_speculative_steps: int, max_num_reqs: int,
    max_num_tokens: int, max_model_len: int, cp_rank: int, SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int, CP_SIZE: int, CP_INTERLEAVE: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    """Rows of rejected drafts are no context. A root that proposes has one row less after it."""
    samples = max_num_reqs * num_speculative_steps
    _prepare(
        *numpys(
            out_input_ids_ptr, out_query_positions_ptr, out_query_start_loc_ptr[:max_num_reqs + 1],
            out_seq_lens_ptr[:max_num_reqs], out_query_slot_mapping_ptr[:max_num_tokens],
            out_context_positions_ptr, out_context_slot_mapping_ptr,
            out_sample_indices_ptr[:samples], out_sample_pos_ptr[:samples],
            out_sample_idx_mapping_ptr[:samples], out_temperature_ptr, out_seeds_ptr,
            target_positions_ptr, target_query_start_loc_ptr, idx_mapping_ptr,
            last_sampled_ptr.flatten(), next_prefill_tokens_ptr.flatten(), num_sampled_ptr,
            num_rejected_ptr, temperature_ptr, seeds_ptr, block_table_ptr,
        ),
        parallel_drafting_token_id, block_size, num_query_per_req, num_speculative_steps,
        max_model_len,
    )  # fmt: skip


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
