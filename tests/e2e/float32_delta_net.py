"""Gives an engine without trees Gated DeltaNet in float32, which vLLM's operators for a CPU lack.

The engine imports this with the option ``worker_extension_cls``.
"""

from vllm.model_executor.custom_op import PluggableLayer

from dyntree_plugin.engine.states.layers import TreeGatedDeltaNet

PluggableLayer.register_oot(TreeGatedDeltaNet, name="QwenGatedDeltaNetAttention")


class Extension:
    pass
