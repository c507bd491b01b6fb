"""Stage 3 for EAGLE-3 heads: fit a new head, or continue with an existing one."""

from __future__ import annotations

import functools
from typing import Any

from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig

from dyntree_plugin.commands.start import fetch
from dyntree_plugin.commands.tune import learn, models
from dyntree_plugin.commands.tune.learn import Lessons
from dyntree_plugin.commands.tune.settings import Folder, Settings, Update
from dyntree_plugin.pair.models import Shape
from dyntree_plugin.tune import eagle, optimize
from dyntree_plugin.tune.eagle import OfTarget
from dyntree_plugin.tune.files import damaged, explained
from dyntree_plugin.tune.fit import Machine
from dyntree_plugin.tune.head import STEPS, default_layers, frequent_tokens, head_loss
from dyntree_plugin.tune.shards import save_tensors

OTHER_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Settings of heads that `Head` does not have."""


def config_of(settings: Settings) -> Any:
    """Return the configuration of the head.

    Raises:
        ValueError: if the head there is reads layers or a width that the target does not have, or
            the target has no weights of the form that a head needs.
    """
    target = AutoConfig.from_pretrained(settings.target).get_text_config()
    for name in ("rms_norm_eps", "rope_parameters", "num_key_value_heads"):
        if getattr(target, name, None) is None:
            raise ValueError(
                f"--head eagle3: --target {settings.target!r} must be a model like Llama; its "
                f"configuration has no {name}"
            )
    if settings.draft is not None:
        with explained(f"the configuration of {settings.draft!r} cannot be read"):
            config = LlamaConfig.from_pretrained(fetch(settings.draft))
        if config.vocab_size != target.vocab_size or config.hidden_size != target.hidden_size:
            raise ValueError(
                f"--draft {settings.draft!r} must be a head of --target "
                f"{settings.target!r}: it has another vocabulary or width"
            )
        for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids"):
            if getattr(config, name, None) is None:
                raise ValueError(
                    f"--draft {settings.draft!r} must be an EAGLE-3 head whose configuration says "
                    f"what it reads and drafts; it has no {name}"
                )
        # vLLM computes with them, and training would not.
        if other := [name for name in OTHER_NORMS if getattr(config, name, False)]:
            raise ValueError(f"--draft {settings.draft!r} cannot be trained: it has {other[0]}")
        return config
    heads = target.num_attention_heads
    shape = Shape(
        target.hidden_size,
        target.intermediate_size,
        1,
        heads,
        target.num_key_value_heads,
        getattr(target, "head_dim", None) or target.hidden_size // heads,
    )
    layers = default_layers(target.num_hidden_layers)
    vocabulary = min(settings.head_vocabulary, target.vocab_size)
    return eagle.head_config(target, shape, layers, vocabulary)


def keep_of_target(folder: Folder, target: Any) -> None:
    """Store the target's weights that the head needs."""
    # Clones: a file must not have a tensor twice, such as a tied embedding.
    weights = {name: each.cpu().clone() for name, each in OfTarget.of(target)._asdict().items()}
    save_tensors(weights, folder.of_target)


def fitted(lessons: Lessons, settings: Settings, machine: Machine, update: Update) -> None:
    """Fit the head and store it."""
    folder = lessons.folder
    with explained(damaged(folder.of_target)):
        of_target = OfTarget(**load_file(folder.of_target))
    if settings.draft is None:
        config = config_of(settings)
        tokens = frequent_tokens(lessons.learn, config.draft_vocab_size, config.vocab_size)
        head = eagle.new_head(config, tokens, of_target, settings.seed)
        optimizers = optimize.muon_and_adamw
    else:
        head = eagle.load_head(fetch(settings.draft))
        optimizers = optimize.adamw
    loss = head_loss(of_target.embedding.float(), head.tokens)
    head = head.to(machine.main)
    logits = STEPS * head.config.draft_vocab_size
    learn.train(lessons, settings, machine, head, loss, update, logits, optimizers)
    save = functools.partial(eagle.save_head, head.to("cpu"))
    models.whole_folder(folder.fitted, save)
