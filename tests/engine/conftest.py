"""Prepare vLLM before any module of these tests imports its V2 runner."""

from __future__ import annotations

from vllm.platforms import current_platform

from vllm_cpu_runner import install

# The watch on new versions of vLLM runs some of these tests with a CUDA build.
if current_platform.is_cpu():
    install()
