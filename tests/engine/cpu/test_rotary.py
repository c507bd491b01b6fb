"""Every head of a token is rotated by the token's position, however many axes queries have."""

from __future__ import annotations

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from vllm_cpu_runner import mend_rotary

TOKENS, SIZE = 5, 64


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the replacement, and what the test replaces."""
    own = RotaryEmbedding.forward_cpu
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", getattr(own, "__wrapped__", own))


def differences(query: torch.Tensor, key: torch.Tensor | None, neox: bool = True) -> list[float]:
    """Return how far the operator's queries and keys are from those of PyTorch."""
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(SIZE, 128, neox, {"rope_type": "default", "rope_theta": 1e4}, torch.float32)
    positions = torch.arange(3, 3 + TOKENS)
    of_rows = [None if each is None else each.reshape(TOKENS, -1) for each in (query, key)]
    wanted = rope.forward_native(positions, *of_rows)
    found = rope.forward_cpu(positions, query.clone(), None if key is None else key.clone())
    return [
        float((own.reshape(TOKENS, -1) - each).abs().max())
        for own, each in zip(found, wanted, strict=True)
        if own is not None and each is not None
    ]


def rows(heads: int, axes: int) -> torch.Tensor:
    """Return queries or keys of so many axes."""
    drawn = torch.randn(TOKENS, heads, SIZE, generator=torch.Generator().manual_seed(heads))
    return drawn if axes == 3 else drawn.flatten(1)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("axes", [(3, 3), (3, 2), (2, 3), (2, 2), (3, None), (2, None)])
def test_every_head_is_rotated(axes: tuple[int, int | None], neox: bool) -> None:
    for _ in range(2):  # The second call has no effect.
        mend_rotary()
    of_queries, of_keys = axes
    key = None if of_keys is None else rows(2, of_keys)
    assert max(differences(rows(4, of_queries), key, neox)) < 1e-5


def test_parts_of_heads_are_rotated() -> None:
    """As latent attention asks, whose queries are not contiguous."""
    mend_rotary()
    query = torch.randn(TOKENS, 4, 16 + SIZE)[..., 16:]
    assert max(differences(query, rows(1, 3), neox=False)) < 1e-5


@pytest.mark.parametrize("shape", [(0, 4, SIZE), (0, 4 * SIZE), (1, 1, SIZE)])
def test_no_rows_and_one_of_one_head_are_assigned_to_themselves(shape: tuple[int, ...]) -> None:
    mend_rotary()
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(SIZE, 128, True, {"rope_type": "default", "rope_theta": 1e4}, torch.float32)
    heads = torch.ones(*shape[:-1], 16 + shape[-1])
    part = heads[..., 16:]
    found, _ = rope.forward_cpu(torch.arange(shape[0]), part, part.clone())
    assert found.shape == shape
    heads[..., 16:] = found  # as latent attention does


def test_vllms_operator_leaves_heads_out() -> None:
    """Control; when it fails, the replacement can go."""
    assert max(differences(rows(4, 2), rows(2, 2))) < 1e-5
    assert min(differences(rows(4, 3), rows(2, 3))) > 0.1
