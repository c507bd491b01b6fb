"""What cannot be combined with a head of the target as draft, and what such a head does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dyntree_plugin.admission.refusals import Refusal, split
from dyntree_plugin.admission.versions import types_of_modules
from dyntree_plugin.options.methods import HEADS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_STEP = "Step3p5MTP"
SEVERAL_MODULES = ("MiMoMTPModel", _STEP)
"""vLLM's classes of modules of multi-token prediction of which a draft may have several."""


def modules(speculation: Any) -> int:
    """Return the number of a draft's modules of multi-token prediction, 1 for other drafts."""
    config = speculation.draft_model_config.hf_config
    return int(getattr(config, "num_nextn_predict_layers", None) or 1)


def _untyped(speculation: Any) -> int:
    """Return how many layers of Step-3.5's modules have no type of attention."""
    draft = speculation.draft_model_config
    config = draft.hf_config
    types = getattr(config, "layer_types", None)
    if draft.architecture != _STEP or not types:
        return 0
    known = len(types) + len(types_of_modules(config))
    return int(config.num_hidden_layers) + modules(speculation) - known


HEAD_REFUSALS = (
    Refusal(
        "vocab_size (target, draft)",
        lambda s: (
            s.target_model_config.get_vocab_size(),
            s.draft_model_config.get_vocab_size(),
        ),
        lambda sizes: sizes[0] != sizes[1],
        "a head is trained for one target; use a head of this one",
    ),
    Refusal(
        "num_nextn_predict_layers, architecture",
        lambda s: (modules(s), s.draft_model_config.architecture),
        lambda found: found[0] > 1 and found[1] not in SEVERAL_MODULES,
        "trees use the first of several modules at every depth, which was run for "
        f"{' and '.join(SEVERAL_MODULES)} alone; use an EAGLE-3 head, or look-up",
    ),
    Refusal(
        "layers without a type in layer_types",
        _untyped,
        lambda count: count > 0,
        "vLLM 0.32 cannot make the modules of Step-3.5; use vLLM 0.33, or look-up",
    ),
    Refusal(
        "Gemma-4's assistant, pipeline_parallel_size",
        lambda s: (s.use_gemma4_mtp(), s.target_parallel_config.pipeline_parallel_size),
        lambda found: found[0] and found[1] > 1,
        "it reads caches of the target's layers, and vLLM does not load it in a pipeline; use a "
        "draft model, or look-up",
    ),
    Refusal(
        "use_local_argmax_reduction",
        lambda s: s.use_local_argmax_reduction,
        bool,
        "a tree needs more than the draft's best token; leave it out",
    ),
)
"""Checks of a ``SpeculativeConfig`` with a head of the target. vLLM makes its positions reach as
far as the target's."""


def advice(vllm_config: VllmConfig) -> Iterator[str]:
    """Say what a head does otherwise than the options or the checkpoint of an admitted
    configuration say. The output is the same."""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method not in HEADS:
        return
    if (count := modules(speculation)) > 1:
        yield (
            f"The draft has num_nextn_predict_layers={count} modules, each trained for one depth: "
            "trees use the first at every depth, so fewer of the deeper nodes are accepted than "
            "with a module for each, as in vLLM's chain."
        )
    given, of_target = split(speculation)
    if given != of_target:
        yield (
            f"draft_tensor_parallel_size={given} has no effect: vLLM's V2 runner splits a head "
            f"over the target's {of_target} ranks."
        )
