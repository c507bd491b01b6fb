"""The part of a worker with trees that does not depend on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dyntree_plugin.admission import reasons
from dyntree_plugin.engine.agreement import check_ranks
from dyntree_plugin.engine.attention.registration import registered
from dyntree_plugin.engine.telemetry.trace import TreeTrace


class TreeWorkerMixin:
    """Compares the trees of all ranks, registers the attention of trees, and traces trees.

    It precedes a platform's worker class whose ``model_runner`` is a `TreeRunnerMixin`.
    """

    model_runner: Any
    vllm_config: Any
    attention_backends: ClassVar[Mapping[str, str]]
    """Paths of the plugin's attention backends, by the names of the vLLM backends they replace."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with reasons.logged():
            check_ranks(self.vllm_config)
        with registered(self.attention_backends):
            super().load_model(*args, **kwargs)  # type: ignore[misc]

    def trace_trees(self, wanted: bool) -> None:
        """Start or stop keeping every verified tree."""
        self.model_runner.trace = TreeTrace() if wanted else None

    def take_trace(self) -> list[dict[str, Any]]:
        """Return the trees kept since the last call.

        Raises:
            RuntimeError: if `trace_trees` has not been called.
        """
        trace: TreeTrace | None = self.model_runner.trace
        if trace is None:
            raise RuntimeError("trees are not traced: call trace_trees first")
        return trace.take()
