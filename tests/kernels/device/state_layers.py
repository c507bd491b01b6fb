"""Recurrent layers of vLLM's classes with random weights, for a CPU and as on CUDA."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

PREFIX = "layer"
SLOTS, HEADS, SIZE, STATE, GROUPS, WIDTH = 9, 4, 16, 16, 2, 4


def _module(cls: Any, rows: int, columns: int, pending: int = 1, **attributes: Any) -> Any:
    """``pending``: the forwards whose paths may still come."""
    layer = object.__new__(cls)
    nn.Module.__init__(layer)
    vars(layer).update(prefix=PREFIX, activation="silu", tp_size=1, **attributes)
    channels, gates = layer.sizes if hasattr(layer, "sizes") else (0, 0)
    layer._read = deque(maxlen=pending)
    if channels:
        layer._columns = columns
        layer._raw, layer._mixed = torch.zeros(2, rows, channels)
        layer._gates = torch.zeros(rows, gates)
        own = layer._raw, layer._mixed, layer._gates
        layer._copies = [each.new_zeros(pending, *each.shape) for each in own if pending > 1]
    return layer


def _conv(channels: int, bias: bool = True) -> Any:
    weight = torch.randn(channels, 1, WIDTH)
    return SimpleNamespace(weight=weight, bias=torch.randn(channels) if bias else None)


def mamba2(cls: Any, rows: int, columns: int, pending: int = 1) -> Any:
    inner, grouped = HEADS * SIZE, GROUPS * STATE
    channels, conv = inner + 2 * grouped, _conv(inner + 2 * grouped)
    return _module(
        cls, rows, columns, pending, conv1d=conv, conv_weights=conv.weight.squeeze(1),
        head_dim=SIZE, ssm_state_size=STATE, tped_intermediate_size=inner, tped_conv_size=channels,
        tped_dt_size=HEADS, A=-torch.rand(HEADS), D=torch.randn(HEADS), dt_bias=torch.randn(HEADS),
        split_hidden_states_B_C_fn=lambda x: x.split([inner, grouped, grouped], dim=-1),
        kv_cache=(torch.randn(SLOTS, WIDTH - 1, channels), torch.randn(SLOTS, HEADS, SIZE, STATE)),
    )  # fmt: skip


def delta_net(cls: Any, rows: int, columns: int, pending: int = 1) -> Any:
    keys, values = GROUPS * STATE, HEADS * SIZE
    channels = 2 * keys + values
    return _module(
        cls, rows, columns, pending, conv1d=_conv(channels, bias=False), key_dim=keys,
        value_dim=values, head_k_dim=STATE, head_v_dim=SIZE, num_v_heads=HEADS, conv_dim=channels,
        A_log=torch.rand(HEADS), dt_bias=torch.randn(HEADS),
        kv_cache=(torch.randn(SLOTS, WIDTH - 1, channels), torch.randn(SLOTS, HEADS, SIZE, STATE)),
    )  # fmt: skip
