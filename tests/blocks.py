"""Block drafts for the embedded target: some without training, and what a block draft computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from heads import PlainHead, target_config, write_head
from safetensors.torch import load_file

from dyntree_plugin import pair

KINDS = ("DFlash", "DFlash2", "DSpark", "Laguna", "MiMo", "Muse-Glimmer")
LENGTH = 5
LAYERS = 2
TARGET_LAYERS = (0, 2, 4)
RANK = 8
TAPS, GROUP = 3, 8
SIDES = ("attention", "mlp")
WINDOW = 20
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MUSE: dict[str, Any] = {
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "rope_parameters": ROPE,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention"] * LAYERS,
}

_MIMO = {
    "use_swa": True,
    "swa_window_size": WINDOW,
    "attention_sink_bias": True,
    "attention_value_scale": 0.7,
}

Draw = Callable[..., torch.Tensor]
"""Gives a random matrix of a shape."""


def random_block(
    folder: Path,
    kind: str = "DFlash",
    seed: int = 0,
    *,
    model: Path | None = None,
    layers: tuple[int, ...] = TARGET_LAYERS,
) -> Path:
    """Write a block draft of random weights; return its folder.

    Its embedding and its output layer are the target's: the one in the folder ``model``, or the
    embedded one. ``layers``: those of the target whose states it reads. ``kind``: "DFlash", or

    - "DSpark": logits depend on the token before, too, and the root proposes the first token;
    - "Laguna": a layer sees in a window, in order, and its heads have gates;
    - "Muse-Glimmer": a layer sees in a window, both ways;
    - "MiMo": so it does, and its heads have sinks;
    - "DFlash2": layers have convolutions, and logits are those of some candidates and depend on the
      token before.
    """
    target = json.loads((model / "config.json").read_text()) if model else target_config()
    hidden, inner, size = target["hidden_size"], target["intermediate_size"], target["head_dim"]
    queries, keys = (target[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    generator = torch.Generator().manual_seed(seed)
    draw = _drawing(generator)

    def norm(size: int) -> torch.Tensor:
        return 0.5 + 2 * torch.rand(size, generator=generator)

    weights = {"fc.weight": draw(hidden, len(layers) * hidden)}
    weights |= {f"{name}.weight": norm(hidden) for name in ("hidden_norm", "norm")}
    for number in range(LAYERS):
        of_layer = {
            "self_attn.q_proj": draw(queries, hidden),
            "self_attn.k_proj": draw(keys, hidden),
            "self_attn.v_proj": draw(keys, hidden),
            "self_attn.o_proj": draw(hidden, queries),
            "self_attn.q_norm": norm(size),
            "self_attn.k_norm": norm(size),
            "mlp.gate_proj": draw(inner, hidden),
            "mlp.up_proj": draw(inner, hidden),
            "mlp.down_proj": draw(hidden, inner),
            "input_layernorm": norm(hidden),
            "post_attention_layernorm": norm(hidden),
        }
        weights |= {f"layers.{number}.{name}.weight": each for name, each in of_layer.items()}
    kept = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "max_position_embeddings")
    counts = ("num_attention_heads", "num_key_value_heads")
    own: dict[str, Any] = {name: target[name] for name in (*kept, *counts)}
    own |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "attention_bias": False,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [*layers]},
    }
    if kind == "DSpark":
        own |= {"architectures": ["DSparkDraftModel"], "markov_rank": RANK}
        weights |= {
            f"markov_head.markov_w{number}.weight": 4 * draw(target["vocab_size"], RANK)
            for number in (1, 2)
        }
    if kind == "DFlash2":
        _add_pairs(weights, own, draw)
        own["dflash_config"] |= {"input_embedding_scale": 2.0}
    if kind == "Muse-Glimmer":
        own |= _MUSE
    if kind == "MiMo":
        own["dflash_config"] |= _MIMO
        sinks = 2 * torch.randn(LAYERS, target["num_attention_heads"], generator=generator)
        for number in range(LAYERS):
            weights[f"layers.{number}.self_attn.attention_sink_bias"] = sinks[number]
    if kind == "Laguna":
        own |= {"architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna"}
        own |= {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * LAYERS}
        own |= {"mlp_layer_types": ["dense"] * LAYERS, "rope_parameters": ROPE}
        weights |= {f"aux_hidden_norms.{n}.weight": norm(hidden) for n in range(len(layers))}
        for number in range(LAYERS):
            name = f"layers.{number}.self_attn"
            parts = [weights.pop(f"{name}.{each}_proj.weight") for each in "qkv"]
            weights[f"{name}.qkv_proj.weight"] = torch.cat(parts)
            weights[f"{name}.g_proj.weight"] = draw(target["num_attention_heads"], hidden)
    return write_head(folder, weights, own, dtype=torch.float32)


def trained_block(folder: Path, kind: str) -> Path:
    """Write the embedded draft as "DFlash2" or "Muse-Glimmer", which it was not trained for; return
    its folder. It differs so little that the target still accepts many of its tokens."""
    source = pair.paths()["dflash"]
    own = json.loads((source / "config.json").read_text())
    weights = {name: each.float() for name, each in load_file(source / "model.safetensors").items()}
    if kind == "DFlash2":
        _add_pairs(weights, own, _drawing(torch.Generator().manual_seed(0)), 0.2)
    else:
        own |= _MUSE
    return write_head(folder, weights, own, dtype=torch.float32)


def _drawing(generator: torch.Generator) -> Draw:
    return lambda *shape: torch.randn(*shape, generator=generator) / shape[-1] ** 0.5


def _add_pairs(
    weights: dict[str, torch.Tensor], own: dict[str, Any], draw: Draw, share: float = 1.0
) -> None:
    """Add convolutions and scores of pairs; ``share``: how much they change."""
    hidden, vocabulary = own["hidden_size"], own["vocab_size"]
    own |= {"architectures": ["DFlash2DraftModel"]}
    own["dflash_config"] |= {"conv_kernel_size": TAPS, "conv_group_size": GROUP}
    own["dflash_config"] |= {"selector_rank": RANK, "selector_top_k": 12}
    for name in (f"layers.{n}.{part}_conv" for n in range(LAYERS) for part in SIDES):
        taps = share * (draw(2, TAPS, hidden) + 0.5)
        taps[:, 0] += 1 - share
        weights[f"{name}.base_kernel"] = taps
        of_rows = draw(2 * TAPS * hidden // GROUP, hidden)
        weights[f"{name}.kernel_projection.weight"] = share * of_rows
    for name in ("predecessor", "successor"):
        weights[f"candidate_selector.{name}_codebook"] = 2 * draw(vocabulary, RANK)
    weights["candidate_selector.hidden_projection.weight"] = share * draw(RANK, hidden)


class PlainBlock(PlainHead):
    """A stored block draft in plain torch, which runs one block as its authors define it."""

    @torch.inference_mode()
    def logits(
        self, text: list[int], path: list[int], *, causal: bool = False, stale: int = 0
    ) -> torch.Tensor:
        """Return the logits [V] after ``text`` and the nodes of ``path``.

        The target has read all of the text but its last token. ``causal``: a place of the block
        sees those before it alone; of Laguna's, all. ``stale``: tokens at the end of the context
        that are missing.
        """
        laguna = self._config["model_type"] == "laguna"
        ids = torch.tensor([text[:-1]])
        layers = self.target.model(input_ids=ids, output_hidden_states=True)
        own = self._config["dflash_config"]
        states = [self._stream(layers, ids, number + 1) for number in own["target_layer_ids"]]
        if laguna:
            states = [self._norm(x, f"aux_hidden_norms.{n}") for n, x in enumerate(states)]
        context = self._norm(torch.cat(states, dim=-1) @ self._weight("fc").T, "hidden_norm")
        kept = len(context) - stale
        first = 0 if "markov_rank" in self._config else 1  # row that gives the first token
        masks = self._config.get("block_size", LENGTH + first) - 1
        block = torch.tensor([text[-1]] + [own["mask_token_id"]] * masks)
        rows = self.target.model.embed_tokens(block) * own.get("input_embedding_scale", 1)
        for number in range(LAYERS):
            name = f"layers.{number}."
            normed = self._norm(rows, f"{name}input_layernorm")
            read = self._norm(context, f"{name}input_layernorm") if laguna else context
            causal_here = causal != laguna
            normed, after = self._convolved(normed, f"{name}attention_conv")
            rows = rows + after(
                self._block_attention(read[:kept], len(context), normed, name, causal_here)
            )
            normed = self._norm(rows, f"{name}post_attention_layernorm")
            normed, after = self._convolved(normed, f"{name}mlp_conv")
            gate, up = (
                normed @ self._weight(f"{name}mlp.{each}_proj").T for each in ("gate", "up")
            )
            inner = torch.nn.functional.silu(gate) * up
            rows = rows + after(inner @ self._weight(f"{name}mlp.down_proj").T)
        scores = self._scores(rows[len(path) + first])
        if "selector_rank" in own:
            return self._of_pairs(scores, rows[len(path) + first], [*text, *path][-1])
        if first == 1:
            return scores
        before, after = (self._weight(f"markov_head.markov_w{number}") for number in (1, 2))
        return scores + after @ before[[*text, *path][-1]]

    def _convolved(
        self, rows: torch.Tensor, name: str
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Return what a part of a layer reads, and what its output goes through: convolutions over
        a block, whose coefficients depend on the ``rows``. Other drafts have none."""
        if f"{name}.base_kernel" not in self._weights:
            return rows, lambda found: found
        own = (rows @ self._weight(f"{name}.kernel_projection").T).view(len(rows), 2, TAPS, -1)
        own = own.repeat_interleave(GROUP, dim=-1) + self._weights[f"{name}.base_kernel"]

        def convolve(given: torch.Tensor, side: int) -> torch.Tensor:
            before = torch.nn.functional.pad(given, (0, 0, TAPS - 1, 0))
            taps = [before[TAPS - 1 - tap :][: len(given)] for tap in range(TAPS)]
            return (own[:, side] * torch.stack(taps, dim=1)).sum(dim=1)

        return convolve(rows, 0), lambda found: convolve(found, 1)

    def _of_pairs(self, scores: torch.Tensor, row: torch.Tensor, before: int) -> torch.Tensor:
        """Return the logits [V] after the token ``before``, from those of a position's ``row``."""
        selector = "candidate_selector."
        best = scores.topk(self._config["dflash_config"]["selector_top_k"]).indices
        weights = self._norm(row, "norm") @ self._weight(f"{selector}hidden_projection").T
        weights = weights * self._weights[f"{selector}predecessor_codebook"][before]
        pairs = self._weights[f"{selector}successor_codebook"][best] @ weights
        return torch.full_like(scores, -torch.inf).index_copy_(0, best, scores[best] + pairs)

    def _block_attention(
        self, context: torch.Tensor, root: int, rows: torch.Tensor, name: str, causal: bool
    ) -> torch.Tensor:
        """Attend from the ``rows`` of a block at ``root`` to themselves and the ``context``."""

        laguna = self._config["model_type"] == "laguna"
        if laguna:
            of = [self._config[f"num_{each}_heads"] for each in ("attention", *["key_value"] * 2)]
            fused = self._weight(f"{name}self_attn.qkv_proj")
            split = fused.split([each * self._config["head_dim"] for each in of])
        else:
            split = tuple(self._weight(f"{name}self_attn.{kind}_proj") for kind in "qkv")
        parts = dict(zip("qkv", split, strict=True))

        def heads(rows: torch.Tensor, kind: str, first: int) -> torch.Tensor:
            found = (rows @ parts[kind].T).unflatten(1, (-1, self._config["head_dim"]))
            if kind != "v":
                found = self._norm(found, f"{name}self_attn.{kind}_norm")
            found = found.transpose(0, 1)
            return found if kind == "v" else self._turned(found, first)

        keys, values = (
            torch.cat([heads(context, kind, 0), heads(rows, kind, root)], dim=1) for kind in "kv"
        )
        queries = heads(rows, "q", root)
        groups = len(queries) // len(keys)
        keys, values = (each.repeat_interleave(groups, dim=0) for each in (keys, values))
        seen = torch.ones(len(rows), keys.shape[1], dtype=torch.bool)
        if causal:
            seen = seen.tril(len(context))
        own = self._config["dflash_config"]
        if window := own.get("swa_window_size") or self._config.get("sliding_window"):
            places = root + torch.arange(len(rows))
            at = torch.cat([torch.arange(len(context)), places])
            seen &= at > places[:, None] - window
        scores = (queries @ keys.mT * self._config["head_dim"] ** -0.5).masked_fill(
            ~seen, -torch.inf
        )
        none = torch.tensor(-torch.inf).expand(len(scores))
        sinks = self._weights.get(f"{name}self_attn.attention_sink_bias", none)
        sinks = sinks.float()[:, None, None].expand(-1, len(rows), 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        found = weights @ (values * own.get("attention_value_scale", 1))
        if laguna:
            gates = torch.nn.functional.softplus(rows @ self._weight(f"{name}self_attn.g_proj").T)
            found = found * gates.T[:, :, None]
        return found.transpose(0, 1).flatten(1) @ self._weight(f"{name}self_attn.o_proj").T
