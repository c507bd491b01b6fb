"""Triton kernels of the V2 runner without CPU implementations, by the feature that needs them."""

from __future__ import annotations

_MTP = "spec_decode.multi_module_mtp.speculator."
_ESTIMATOR = "spec_decode.acceptance_estimator."

REFUSED: dict[str, tuple[str, ...]] = {
    "decode context parallelism": ("cp_utils._dcp_local_seq_lens_kernel",),
    "trace replay": ("sample.trace_replay._trace_replay_kernel",),
    "return_sampling_mask": ("sample.output._compact_sampling_mask_kernel",),
    "batch-sharded sampling": (
        "sample.batch_shard._build_shard_plan_kernel",
        "sample.batch_shard._pack_sampler_output_kernel",
        "sample.batch_shard._unpack_gathered_output_kernel",
        "sample.batch_shard._pack_logprobs_kernel",
        "sample.batch_shard._unpack_logprobs_kernel",
    ),
    "watermarking": (
        "sample.watermark._repeated_context_mask_kernel",
        "sample.watermark._philox_gumbel_kernel",
    ),
    "KDA with a prefix cache": ("model_states.recoverssm._postprocess_recoverssm_align_kernel",),
    "a prompt given as embeddings": ("model_states.prompt_embeds._apply_prompt_embeds_kernel",),
    "a drafter with several MTP modules": (
        _MTP + "_prepare_input_buffers_kernel",
        _MTP + "_prepare_input_hidden_states_and_embeddings_kernel",
        _MTP + "_pad_trailing_draft_slots_kernel",
        _MTP + "_cache_inputs_kernel",
        _MTP + "_shift_input_ids_kernel",
        _MTP + "_shift_input_embeds_kernel",
    ),
    "a DFlash2 drafter": (
        "spec_decode.dflash2.speculator._selector_walk_kernel",
        "spec_decode.dflash2.speculator._cache_draft_logits_kernel",
    ),
    "adaptive verification": (
        _ESTIMATOR + "_accumulate_kernel",
        _ESTIMATOR + "_refit_kernel",
        _ESTIMATOR + "_local_max_sumexp_kernel",
        _ESTIMATOR + "_predict_kernel",
    ),
    "an n-gram drafter": (
        "spec_decode.ngram.speculator._ngram_scan_kernel",
        "spec_decode.ngram.speculator._ngram_finalize_kernel",
    ),
}
