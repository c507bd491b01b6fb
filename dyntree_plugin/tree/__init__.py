"""The algorithm: growing a token tree and verifying it. Imports torch, never vLLM."""
