"""Hugging Face causal models over ragged rows: prefill, decode and tree decode of many requests.

The linear layers run on the packed rows of all requests. Attention pads them per request: it reads
the context once for all of a request's rows, and of the other nodes of its tree only each row's
own path.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

_ATTENTION = "dyntree_rows"


@dataclass(frozen=True)
class _Rows:
    """Where the M rows of one forward stand: [M] each, sorted by request.

    ``ranks`` count a request's rows. ``contexts``: leading context positions that a row sees.
    ``paths`` int64 [M, P]: scratch rows that it sees, its own among them, -1 behind the last; None
    for rows of the context, whose slot is their position. ``own``: the scratch rows written.
    """

    requests: torch.Tensor
    ranks: torch.Tensor
    positions: torch.Tensor
    contexts: torch.Tensor
    paths: torch.Tensor | None = None
    own: slice | None = None

    @functools.cached_property
    def width(self) -> int:
        return int(self.ranks.max()) + 1

    @functools.cached_property
    def reach(self) -> int:
        return int(self.contexts.max())

    @functools.cached_property
    def present(self) -> torch.Tensor:
        """The requests that have rows."""
        requests: torch.Tensor = torch.unique_consecutive(self.requests)
        return requests


class _Cache:
    """Keys and values: of contexts [2, layers, R, Hkv, C, D], of tree nodes [2, layers, S, Hkv, D].

    Nodes of all requests share the scratch rows, which grow as needed.
    """

    def __init__(self, model: PreTrainedModel, requests: int, positions: int) -> None:
        config = model.config.get_text_config()
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = config.num_hidden_layers
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        self.context = like.new_zeros(2, layers, requests, heads, positions, size)
        self.scratch = like.new_empty(2, layers, 0, heads, size)

    def write(self, layer: int, rows: _Rows, key: torch.Tensor, value: torch.Tensor) -> None:
        for which, states in enumerate((key, value)):
            if rows.own is None:
                self.context[which, layer][rows.requests, :, rows.positions] = states
            else:
                self.scratch[which, layer, rows.own] = states

    def reserve(self, rows: int) -> None:
        there = self.scratch.shape[2]
        if rows > there:
            self.scratch = pad(self.scratch, (0, 0, 0, 0, 0, max(rows, 2 * there) - there))

    def keep(self, requests: torch.Tensor) -> None:
        self.context = self.context[:, :, requests]


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    *,
    rows: _Rows,
    cache: _Cache,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: query [1, H, M, D], key and value [1, Hkv, M, D]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    cache.write(layer, rows, key[0].transpose(0, 1), value[0].transpose(0, 1))
    context, at = cache.context[:, layer, :, :, : rows.reach], (rows.requests, rows.ranks)
    if 2 * len(rows.present) < context.shape[1]:  # a copy of these is less than reading all
        context = context[:, rows.present]
        at = (torch.searchsorted(rows.present, rows.requests), rows.ranks)
    keys, values = context
    requests, heads, reach, size = keys.shape
    count = query.shape[2]
    group = query.shape[1] // heads

    def padded(packed: torch.Tensor, fill: float = 0) -> torch.Tensor:
        out = packed.new_full((requests, rows.width, *packed.shape[1:]), fill)
        out[at] = packed
        return out

    # [R, Hkv, W x G, D]
    q = padded(query[0].transpose(0, 1).reshape(count, heads, group, size) * scaling)
    flat = q.transpose(1, 2).reshape(requests, heads, rows.width * group, size)
    seen = torch.arange(reach, device=q.device) < padded(rows.contexts, 1)[:, :, None]
    scores = (flat @ keys.transpose(2, 3)).view(requests, heads, rows.width, group, reach)
    scores.masked_fill_(~seen[:, None, :, None], float("-inf"))
    if rows.paths is None:
        weights = scores.softmax(-1).view(requests, heads, rows.width * group, reach)
        mixed = (weights @ values).view(requests, heads, rows.width, group, size)
        return mixed.transpose(1, 2)[at].reshape(1, count, heads * group, size), None

    path = padded(rows.paths, -1)  # [R, W, P]
    depth = path.shape[2]
    near_keys, near_values = (
        cache.scratch[which, layer]
        .index_select(0, path.clamp(min=0).flatten())
        .view(requests, rows.width, depth, heads, size)
        for which in range(2)
    )
    near = torch.einsum("rwhgd,rwphd->rhwgp", q, near_keys)
    near.masked_fill_((path < 0)[:, None, :, None], float("-inf"))
    weights = torch.cat([scores, near], -1).softmax(-1)
    far = weights[..., :reach].reshape(requests, heads, rows.width * group, reach) @ values
    mixed = far.view(requests, heads, rows.width, group, size).transpose(1, 2)
    mixed = mixed + torch.einsum("rhwgp,rwphd->rwhgd", weights[..., reach:], near_values)
    return mixed[at].reshape(1, count, heads * group, size), None


AttentionInterface.register(_ATTENTION, _attend)


def load(model: str | Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A causal model whose attention is full and softmax alone.

    Raises:
        ValueError: for a model with sliding windows, soft caps or no key-value heads.
    """
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, attn_implementation=_ATTENTION
    )
    config = loaded.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    all_alike = ["full_attention" if window is None else "sliding_attention"]
    kinds = set(getattr(config, "layer_types", None) or all_alike)
    if kinds != {"full_attention"} or getattr(config, "attn_logit_softcapping", None):
        raise ValueError(f"model {model} has attention of kinds {sorted(kinds)}: only full serves")
    torch.nn.Module.to(loaded, device)
    return loaded


class Decoder:
    """A model and the caches of R requests whose contexts grow at their own pace."""

    def __init__(self, model: PreTrainedModel, requests: int, positions: int) -> None:
        """``positions``: the longest context there will be."""
        self.model = model
        self.device = model.device
        self.lengths = torch.zeros(requests, dtype=torch.int64, device=model.device)
        self.cache = _Cache(model, requests, positions)

    def keep(self, requests: torch.Tensor) -> None:
        """Go on with ``requests`` alone, indices of the present ones in ascending order."""
        self.lengths = self.lengths[requests]
        self.cache.keep(requests)

    def append(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Extend each context by the first ``counts[r]`` of ``tokens`` [R, E].

        Returns the logits behind each request's last one, float32 [R, V]; zero where it has none.
        """
        requests, ranks, rows = self._extend(tokens, counts)
        last = (ranks == counts[requests] - 1).nonzero()[:, 0]
        found = self.forward(tokens[requests, ranks], rows, last)
        logits = found.new_zeros(tokens.shape[0], found.shape[1])
        logits[requests[last]] = found
        return logits

    def read(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """As `append`, but the logits behind every token, float32 [M, V], request by request."""
        requests, ranks, rows = self._extend(tokens, counts)
        return self.forward(tokens[requests, ranks], rows)

    def _extend(
        self, tokens: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, _Rows]:
        wanted = torch.arange(tokens.shape[1], device=self.device) < counts[:, None]
        requests, ranks = wanted.nonzero(as_tuple=True)
        positions = self.lengths[requests] + ranks
        self.lengths = self.lengths + counts
        return requests, ranks, _Rows(requests, ranks, positions, positions + 1)

    def branches(self, columns: int, depth: int) -> Branches:
        """One step's trees below the last tokens of the contexts, in place of the last step's."""
        return Branches(self, columns, depth)

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, rows: _Rows, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.model.base_model(
            input_ids=tokens[None],
            position_ids=rows.positions[None],
            use_cache=False,
            rows=rows,
            cache=self.cache,
        )[0][0]
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        logits: torch.Tensor = head(hidden if wanted is None else hidden[wanted])
        return logits.float()


class Branches:
    """Tree nodes of R requests behind their contexts, level by level.

    Columns are what a growth numbers; a node's keys and values stand in a row of their own that
    only valid nodes take.
    """

    def __init__(self, decoder: Decoder, columns: int, depth: int) -> None:
        requests = decoder.lengths.shape[0]
        self._decoder = decoder
        self._column = 0
        self._row_of = decoder.lengths.new_full((requests, columns), -1)
        self._paths = decoder.lengths.new_empty(0, depth)

    def extend(
        self,
        tokens: torch.Tensor,
        depths: torch.Tensor,
        ancestors: torch.Tensor,
        valid: torch.Tensor,
    ) -> torch.Tensor:
        """Run the nodes [R, W] that take the next W columns.

        ``depths`` count from the root, the last token of the context; ``ancestors`` int32
        [R, W, words] are bits over the columns, own one included. Returns the logits of the
        ``valid`` nodes alone, float32 [M, V] in the order of ``valid.nonzero()``.
        """
        decoder, cache = self._decoder, self._decoder.cache
        requests, slots = valid.nonzero(as_tuple=True)
        depths = depths[requests, slots]
        first = self._paths.shape[0]
        own = slice(first, first + requests.shape[0])
        index = torch.arange(own.start, own.stop, device=decoder.device)
        parents = _parent_columns(ancestors[requests, slots], self._column + slots)
        self._row_of[requests, self._column + slots] = index
        above = self._row_of[requests, parents.clamp(min=0)].masked_fill(parents < 0, -1)
        self._paths = torch.nn.functional.pad(self._paths, (0, 0, 0, len(index)), value=-1)
        # Nodes of one forward may be parent and child; parents stand first.
        for level in range(1, int(depths.max()) + 1):
            at = (depths == level).nonzero()[:, 0]
            deep = at[above[at] >= 0]
            self._paths[first + deep] = self._paths[above[deep]]
            self._paths[first + at, level - 1] = index[at]
        paths = self._paths[first:]
        self._column += valid.shape[1]
        cache.reserve(own.stop)
        rows = _Rows(
            requests,
            ranks=(valid.cumsum(1) - 1)[requests, slots],
            positions=decoder.lengths[requests] - 1 + depths,
            contexts=decoder.lengths[requests],
            paths=paths[:, : int(depths.max())],
            own=own,
        )
        return decoder.forward(tokens[requests, slots], rows)


def _parent_columns(ancestors: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The last column before its ``own`` that each row of int32 [M, words] sees, -1 for none."""
    word, bit = (own // 32)[:, None], torch.ones_like(own)[:, None] << (own % 32)[:, None]
    words = torch.arange(ancestors.shape[1], device=own.device)
    bits = ancestors.long() & 0xFFFFFFFF
    bits.scatter_(1, word, bits.gather(1, word) & ~bit)
    last = torch.where(bits != 0, words, -1).amax(1)
    high = bits.gather(1, last.clamp(min=0)[:, None])[:, 0]
    # The exponent of an integer below 2**53 as a float is exact.
    place = torch.frexp(high.double()).exponent - 1
    return torch.where(last >= 0, last * 32 + place, -1)
