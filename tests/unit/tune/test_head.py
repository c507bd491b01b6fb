"""The EAGLE-3 head is trained on the rows that it has when it drafts."""

from __future__ import annotations

import itertools
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu
from transformers import LlamaForCausalLM

from benchmarks.pair import models, train_head
from dyntree_plugin.pair.models import Shape, in_dtype
from dyntree_plugin.tune import eagle

LAYERS = (0, 1, 3)
LENGTH, STEPS = 12, 5
SHAPE = Shape(hidden=32, intermediate=48, layers=1, heads=4, kv_heads=2, head_dim=8)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    shape = replace(SHAPE, layers=4)
    return _spread(models.new_model(shape, vocabulary=97, seed=0).eval(), seed=1)


@pytest.fixture(scope="module")
def head(target: LlamaForCausalLM) -> eagle.Head:
    tokens = torch.randperm(97, generator=torch.Generator().manual_seed(2))[:40].sort().values
    config = eagle.head_config(target.config, SHAPE, LAYERS, len(tokens))
    return _spread(eagle.new_head(config, tokens, eagle.OfTarget.of(target), seed=3), seed=4)


def _spread(model: models.Model, seed: int) -> models.Model:
    """Give random weights that are large enough for every row to matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        low, high = (0.5, 1.5) if "norm" in name else (-0.3, 0.3)
        weight.data.uniform_(low, high, generator=generator)
    return model


class Served:
    """A head that drafts: a row at a time by its weights' names, over a cache of earlier rows."""

    def __init__(self, head: eagle.Head) -> None:
        self.config = head.config
        self.weights = {name: each.detach() for name, each in head.state_dict().items()}
        self.cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    def row(
        self, hidden: torch.Tensor, embedded: torch.Tensor, position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of a row and the stream that the next row reads."""
        size, groups = self.config.head_dim, 2
        read = torch.cat(
            (
                self._norm("midlayer.input_layernorm", embedded),
                self._norm("midlayer.hidden_norm", hidden),
            )
        )
        query, key, value = (
            (self.weights[f"midlayer.self_attn.{name}_proj.weight"] @ read).view(-1, size)
            for name in "qkv"
        )
        self.cache.append((self._turned(key, position), value))
        keys, values = (
            torch.stack(each).repeat_interleave(groups, 1) for each in zip(*self.cache, strict=True)
        )
        scores = torch.einsum("hd,rhd->hr", self._turned(query, position), keys) * size**-0.5
        found = torch.einsum("hr,rhd->hd", scores.softmax(-1), values).flatten()
        hidden = hidden + self.weights["midlayer.self_attn.o_proj.weight"] @ found
        read = self._norm("midlayer.post_attention_layernorm", hidden)
        gate, up = (
            self.weights[f"midlayer.mlp.{name}_proj.weight"] @ read for name in ("gate", "up")
        )
        hidden = hidden + self.weights["midlayer.mlp.down_proj.weight"] @ (silu(gate) * up)
        return self.weights["lm_head.weight"] @ self._norm("norm", hidden), hidden

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = (x.square().mean() + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def _turned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = self.config.head_dim // 2
        theta = self.config.rope_parameters["rope_theta"]
        angle = position * theta ** (-torch.arange(half) / half)
        one, other = x[:, :half], x[:, half:]
        return torch.cat(
            (
                one * angle.cos() - other * angle.sin(),
                other * angle.cos() + one * angle.sin(),
            ),
            -1,
        )


def _drafted(
    head: eagle.Head, states: torch.Tensor, embedded: torch.Tensor, base: int, wrong: str = ""
) -> list[torch.Tensor]:
    """Return the logits of each step behind the target's states up to `base`, row after row.

    The token of a row is the one behind its position: `wrong` names an error of one.
    """
    served = Served(head)
    behind = 0 if wrong == "token" else 1
    states = states @ served.weights["fc.weight"].T
    for position in range(base + 1):
        logits, stream = served.row(states[position], embedded[position + behind], position)
    steps = [logits]
    for position in range(base + 1, base + STEPS):
        place = position - 1 if wrong == "position" else position
        read = states[position] if wrong == "state" else stream
        if wrong == "cache":
            served.cache = served.cache[: base + 1]
        logits, stream = served.row(read, embedded[position + behind], place)
        steps.append(logits)
    return steps


def _unrolled(head: eagle.Head, target: LlamaForCausalLM) -> tuple[torch.Tensor, ...]:
    text = torch.randint(97, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    states, embedded, _ = eagle.read_target(target, text, head.layers)
    with torch.no_grad():
        steps = [logits[1] for logits in head.unrolled(states, embedded, STEPS)]
    return states[1], embedded[1], *steps


@pytest.mark.parametrize("base", [0, 1, LENGTH - STEPS - 1])
def test_training_unrolls_what_serving_does_row_by_row(
    base: int, head: eagle.Head, target: LlamaForCausalLM
) -> None:
    states, embedded, *steps = _unrolled(head, target)
    assert [len(logits) for logits in steps] == [LENGTH - step for step in range(1, STEPS + 1)]
    for logits, wanted in zip(steps, _drafted(head, states, embedded, base), strict=True):
        torch.testing.assert_close(logits[base], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "first"), [("token", 1), ("position", 2), ("state", 2), ("cache", 3)]
)
def test_an_error_of_one_row_shows_from_the_step_that_has_it(
    wrong: str, first: int, head: eagle.Head, target: LlamaForCausalLM
) -> None:
    base = 4
    states, embedded, *steps = _unrolled(head, target)
    others = _drafted(head, states, embedded, base, wrong)
    for step, (logits, other) in enumerate(zip(steps, others, strict=True), 1):
        assert torch.allclose(logits[base], other, atol=1e-2) is (step < first)


def test_the_loss_is_of_the_token_behind_the_one_that_a_row_reads(
    head: eagle.Head, target: LlamaForCausalLM
) -> None:
    text = torch.randint(97, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    states, embedded, logits = eagle.read_target(target, text, head.layers)
    given = [each.log_softmax(-1) for each in head.unrolled(states, embedded, 2)]
    expected = []
    for step in (1, 2):
        sums = []
        for row, base in itertools.product(range(2), range(LENGTH - step)):
            # The row's token is at base + step, and the target says there what comes next.
            p = logits[row, base + step].softmax(-1)[head.tokens]
            sums.append((p * (p.log() - given[step - 1][row, base])).sum())
        expected.append(torch.stack(sums).mean())
    loss = train_head.unrolled_loss(head, target, text, steps=2, step_weight=0.5)
    torch.testing.assert_close(loss, (expected[0] + 0.5 * expected[1]) / 1.5)


def test_a_head_reads_the_streams_before_layers(target: LlamaForCausalLM) -> None:
    text = torch.randint(97, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, read, number=number: seen.update({number: read[0]})
        )
        for number, layer in enumerate(target.model.layers)
    ]
    states, embedded, logits = eagle.read_target(target, text, LAYERS)
    for hook in hooks:
        hook.remove()
    assert torch.equal(states, torch.cat([seen[number] for number in LAYERS], -1))
    assert torch.equal(embedded, target.model.embed_tokens(text))
    assert torch.equal(logits, target(input_ids=text).logits)


def test_a_stored_head_is_read_back(head: eagle.Head, tmp_path: Path) -> None:
    eagle.save_head(in_dtype(head, torch.bfloat16), tmp_path)
    again = eagle.load_head(tmp_path)
    assert torch.equal(again.tokens, head.tokens)
    assert again.layers == LAYERS
    for name, weight in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight.to(torch.bfloat16).to(weight.dtype))


def test_a_head_computes_where_its_inputs_are(head: eagle.Head) -> None:
    """A tensor of the CPU among them would fail, as it would on a GPU."""
    elsewhere = deepcopy(head).to("meta")
    size = head.config.hidden_size
    states = torch.empty(1, LENGTH, len(LAYERS) * size, device="meta")
    embedded = torch.empty(1, LENGTH, size, device="meta")
    found = [*elsewhere.unrolled(states, embedded, STEPS)]
    assert [logits.device.type for logits in found] == ["meta"] * STEPS
