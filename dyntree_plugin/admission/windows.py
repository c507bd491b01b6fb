"""What cannot be combined with trees if layers of the target have windows."""

from __future__ import annotations

from dyntree_plugin.admission.uncompared import Targets

_WINDOWED = Targets("sliding_window", lambda m: m.get_sliding_window())

WINDOW_REFUSALS = (*_WINDOWED.uncompared("dtype", "enable_lora"),)
"""Checks of ``VllmConfig``."""
