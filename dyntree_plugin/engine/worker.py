"""What the workers with trees share: their layers' attention, and tracing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dyntree_plugin.engine.attention.registration import registered
from dyntree_plugin.engine.telemetry.trace import TreeTrace


class TreeWorkerMixin:
    """Goes before a platform's worker whose ``model_runner`` is a `TreeRunnerMixin`."""

    model_runner: Any
    attention_backends: ClassVar[Mapping[str, str]]
    """Class paths of ours, by the names of those of vLLM's that they go before."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with registered(self.attention_backends):
            super().load_model(*args, **kwargs)  # type: ignore[misc]

    def trace_trees(self, wanted: bool) -> None:
        """Start, or end, keeping every verified tree."""
        self.model_runner.trace = TreeTrace() if wanted else None

    def take_trace(self) -> list[dict[str, Any]]:
        """The trees kept since the last call.

        Raises:
            RuntimeError: if `trace_trees` has not been called.
        """
        trace: TreeTrace | None = self.model_runner.trace
        if trace is None:
            raise RuntimeError("trees are not being traced: call trace_trees first")
        return trace.take()
