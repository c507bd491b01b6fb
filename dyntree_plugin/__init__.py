"""dyntree: speculative decoding with a dynamic token tree, as a plugin of vLLM."""

__version__ = "0.2.0"
