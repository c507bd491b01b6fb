"""Prepare vLLM before any module of these tests imports its V2 runner."""

from __future__ import annotations

from vllm_cpu_runner import install

install()
