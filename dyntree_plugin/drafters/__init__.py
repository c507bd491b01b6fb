"""Where candidates come from. Imports torch, never vLLM."""
