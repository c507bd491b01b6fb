"""A block draft: what its forward is given, and the trees that grow from its logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_model import HIDDEN, LONGEST, VOCAB, Draft
from drafted_steps import NO_BATCH, Drafting, packed, without_vllm
from torch import nn

from dyntree_kernels.ancestors import unpack_bits
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_plugin.engine.cpu.ops import CPUOps
from dyntree_plugin.engine.drafts import block
from dyntree_plugin.engine.step.catch_up import CatchUp
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.drafting import grow

LENGTH, MASK = 5, VOCAB - 1
ROOTS = torch.tensor([9, 20, LONGEST - 4])
COUNTS = torch.tensor([2, 1, 1], dtype=torch.int32)


class Block(Draft):
    """A loaded block, whose rows say the next tokens of a fixed text by their positions."""

    mask_token = MASK

    def __init__(self, causal: bool, root_proposes: bool = False) -> None:
        super().__init__()
        self.causal, self.root_proposes = causal, root_proposes
        self.kept: list[Any] = []
        self.ran: list[Any] = []

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def keep(self, states: torch.Tensor, positions: torch.Tensor, slots: Any) -> None:
        self.kept.append((states.clone(), positions.clone(), slots[0].clone()))

    def run(self, ids: torch.Tensor, positions: torch.Tensor, metadata: Any, _: Any) -> Any:
        mask = metadata["attn_groups"][0][0].tree_mask
        slots = metadata["slot_mappings"][0]
        given = (ids, positions, slots, mask.ancestor_bits, mask.ctx_lens)
        self.ran.append([each.clone() for each in given])
        return positions[:, None].float().expand(-1, HIDDEN) + self.root_proposes

    def offer(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.compute_draft_logits(hidden, 0),)

    def score(self, tokens: torch.Tensor, *offered: torch.Tensor) -> torch.Tensor:
        if not self.root_proposes:
            return offered[0]
        after = torch.nn.functional.one_hot((3 * tokens.long() + 1) % VOCAB, VOCAB)
        return offered[0] + 9.0 * after

    def compute_draft_logits(self, hidden: torch.Tensor, _: int) -> torch.Tensor:
        logits = -0.1 * torch.arange(VOCAB).expand(len(hidden), -1).clone()
        logits[torch.arange(len(hidden)), text(hidden[:, 0].long())] = 3.0
        return logits


def text(positions: torch.Tensor) -> torch.Tensor:
    return 7 * positions % (VOCAB - 2)


class Masked(Block):
    """A loaded draft that reads masks, a head with ``shift`` -1, which says the same text."""

    def __init__(self, shift: int) -> None:
        super().__init__(causal=True)
        self.shift, self.states = shift, torch.zeros(0)

    def combine_masked(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full((1, HIDDEN), -7.0), hidden])

    def run_masked(self, rows: Any, states: Any) -> Any:
        self.states = states
        return self.run(rows.ids, rows.positions, rows.metadata, None) + 1 - self.shift


def drafting(model: Any, **options: Any) -> Drafting:
    plan = DynTreeOptions(lookup="off", budget="fixed", **options).resolve(LENGTH, block=True)
    return Drafting(CPUOps(), CompiledGrowth, captured=False, plan=plan, models=[model])


def step(made: Drafting) -> tuple[torch.Tensor, int]:
    """Do a step of three greedy requests, of which the last has little room; return the tokens of
    the trees, and the forwards after the catch-up."""
    player = made.player(packed([0, 3, 6]))
    tokens = torch.arange(3 * (LENGTH + 1)).view(3, -1)
    hidden = torch.arange(60.0)[:, None].expand(-1, HIDDEN)
    path = torch.tensor([[4, -1, -1, -1, -1], *[[-1] * 5] * 2])
    states = TargetStates((hidden,), torch.tensor([0, 20, 40]), path, torch.zeros(0))
    player.catch_up(CatchUp(NO_BATCH, Emitted(ROOTS, tokens, COUNTS, 2), states, LENGTH))
    return grow(player, made.plan.further_forwards)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)


@pytest.mark.parametrize("shift", [None, 0, -1])
def test_a_tree_of_one_child_is_the_blocks_chain(shift: int | None) -> None:
    """Of the best token of each position. Control: at other positions they differ."""
    model = Block(causal=False) if shift is None else Masked(shift)
    tokens, forwards = step(drafting(model, children=1, width=1, node_budget=LENGTH))
    roots = ROOTS + COUNTS
    for request, root in enumerate(roots[:2]):
        places = int(root) + 1 + torch.arange(LENGTH)
        assert torch.equal(tokens[request], text(places))
        assert not torch.equal(text(places), text(places + 1))
    assert forwards == 0


def test_a_draft_may_read_the_token_before_and_propose_from_the_root() -> None:
    """As DSpark does: each token of the chain is the one that its parent makes likely."""
    block = Block(causal=False, root_proposes=True)
    tokens, _ = step(drafting(block, children=1, width=1, node_budget=LENGTH))
    assert len(block.ran[0][0]) == 3 * LENGTH
    for before, after in zip([1, *tokens[0, :-1].tolist()], tokens[0].tolist(), strict=True):
        assert after == (3 * before + 1) % VOCAB


def test_it_keeps_the_states_before_the_emitted_tokens() -> None:
    """Those of the root and of accepted nodes; a token that was not emitted has no slot."""
    block = Block(causal=False)
    step(drafting(block))
    ((states, positions, slots),) = block.kept
    assert states[:, 0].view(3, 2)[0].tolist() == [0, 5]  # node 4 is in row 5
    assert states[:, 0].view(3, 2)[1:, 0].tolist() == [20, 40]
    assert positions.view(3, 2)[:, 0].tolist() == ROOTS.tolist()
    assert (slots.view(3, 2)[:, 1] < 0).tolist() == [False, True, True]


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_is_the_root_and_masks_that_see_each_other(causal: bool) -> None:
    block = Block(causal)
    step(drafting(block))
    ((ids, positions, slots, bits, context),) = block.ran
    roots, width = ROOTS + COUNTS, LENGTH + 1
    assert ids.view(3, width)[:, 0].tolist() == [1, 6, 12]
    assert (ids.view(3, width)[:, 1:] == MASK).all()
    places = roots[:, None] + torch.arange(width)
    assert torch.equal(positions.view(3, width), places.clamp(max=LONGEST - 1))
    assert context.tolist() == roots.tolist()
    real = places < LONGEST
    assert torch.equal(slots.view(3, width) >= 0, real)
    seen = unpack_bits(bits, width).view(3, width, width)
    wanted = real[:, None, :].expand(-1, width, -1)
    assert torch.equal(seen[:2], (wanted.tril() if causal else wanted)[:2])
    # No row sees a place behind the longest text.
    assert not seen[2][:, ~real[2]].any()
    assert seen[2][:, real[2]].any(dim=1).all()


@pytest.mark.parametrize("shift", [0, -1])
def test_masks_follow_the_emitted_tokens(shift: int) -> None:
    """In one causal forward, a head's before a state of their own. They have slots, which the next
    step's emitted tokens overwrite: its rows begin right after the root."""
    draft = Masked(shift)
    step(drafting(draft))
    ((ids, positions, slots, bits, context),) = draft.ran
    width = 2 + LENGTH - 1
    masks = [MASK] * (LENGTH - 1)
    assert ids.view(3, width)[:2].tolist() == [[0, 1, *masks], [6, *masks, MASK]]
    places = (ROOTS + 1)[:, None] + torch.arange(width)
    assert torch.equal(positions.view(3, width), places.clamp(max=LONGEST - 1) + shift)
    assert context.tolist() == (ROOTS + 1 + shift).tolist()
    read = torch.arange(width) < COUNTS[:, None] + LENGTH - 1
    assert torch.equal(slots.view(3, width) >= 0, read & (places < LONGEST))
    assert torch.equal(
        unpack_bits(bits, width).view(3, width, width), torch.ones(3, width, width).tril().bool()
    )
    if shift:
        states = draft.states[:, 0].view(3, width)
        assert states.tolist() == [
            [0, 5, *[-7] * 4], [20, *[-7] * 5], [40, *[-7] * 5],
        ]  # fmt: skip


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_vllm_builds_the_draft_for_its_block_and_the_targets_attention(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def load(target: nn.Module, config: Any) -> nn.Module:
        seen.extend(vars(config.speculative_config).values())
        return target

    monkeypatch.setattr(block, f"load_{method}_model", load)
    made: Any = object.__new__(block.BlockSpeculator)
    speculation = SimpleNamespace(num_speculative_tokens=16, attention_backend=None)
    made.speculative_config, made.method, made.length = speculation, method, LENGTH
    made.causal = True
    attention: Any = SimpleNamespace(backend="the target's")
    made.vllm_config = SimpleNamespace(speculative_config=speculation, attention_config=attention)
    made.device = torch.device("meta")
    made.load_draft_model(nn.Module(), set())
    assert seen == [LENGTH, "the target's"]
    assert speculation.num_speculative_tokens == 16
