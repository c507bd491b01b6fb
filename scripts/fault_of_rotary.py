"""Report of a fault of vLLM 0.32.0 on a CPU: its rotary operator rotates [tokens, heads, head size]
wrongly if there are several heads."""

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

tokens, heads, kv_heads, size = 5, 4, 2, 64
torch.manual_seed(0)
with set_current_vllm_config(VllmConfig()):
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    rope = get_rope(size, 2048, True, parameters, dtype=torch.float32)
positions = torch.arange(tokens)
query, key = torch.randn(tokens, heads, size), torch.randn(tokens, kv_heads, size)
flat = rope.forward_native(positions, query.flatten(1).clone(), key.flatten(1).clone())
for name, q, k in (("2-D", query.flatten(1), key.flatten(1)), ("3-D", query, key)):
    found = rope.forward_cpu(positions, q.clone(), k.clone())
    far = [float((a.reshape(b.shape) - b).abs().max()) for a, b in zip(found, flat, strict=True)]
    print(name, "queries and keys differ by", far)
