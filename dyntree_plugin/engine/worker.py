"""The part of a worker with trees that does not depend on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import CompilationMode
from vllm.logger import init_logger

from dyntree_plugin.admission import reasons
from dyntree_plugin.engine.agreement import check_ranks
from dyntree_plugin.engine.checked_layers import checked
from dyntree_plugin.engine.configuration import further_drafts
from dyntree_plugin.engine.layer_kinds import LayerKind
from dyntree_plugin.engine.telemetry.trace import TreeTrace
from dyntree_plugin.metrics.names import DRAFT, TARGET

# vLLM shows only what is logged below the name of its package.
logger = init_logger("vllm.dyntree")


class TreeWorkerMixin:
    """Compares the trees of all ranks, brings what trees need to the layers, and traces trees.

    It also keeps the drafts alive where vLLM knows one of them at most: when weights are discarded
    or replaced. What was learned of the old weights is then forgotten.

    It precedes a platform's worker class whose ``model_runner`` is a `TreeRunnerMixin`.
    """

    model_runner: Any
    vllm_config: Any
    kinds: ClassVar[Sequence[LayerKind]]
    """The kinds of layers that trees can pass."""
    _kept: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    _computed: Sequence[tuple[torch.nn.Module, str, torch.Tensor]] = ()
    _lost = False
    _weight_update_is_draft: bool

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with reasons.logged():
            check_ranks(self.vllm_config)
        with ExitStack() as made:
            for kind in self.kinds:
                made.enter_context(kind.making())
            made.enter_context(checked(self.vllm_config, self.kinds))
            super().load_model(*args, **kwargs)  # type: ignore[misc]

    def determine_available_memory(self) -> int:
        """Say what the first run of the model may wait for, which takes the most of a start."""
        if self.vllm_config.compilation_config.mode != CompilationMode.NONE:
            logger.info_once(
                "vLLM compiles the models, which may take minutes at a first start; later starts "
                "with the same models and settings read %s.",
                envs.VLLM_CACHE_ROOT,
            )
        memory: int = super().determine_available_memory()  # type: ignore[misc]
        return memory

    def execute_dummy_batch(self) -> None:
        """Run the target beside other data-parallel ranks; its time is none of a step."""
        super().execute_dummy_batch()  # type: ignore[misc]
        self.model_runner.clock.split()

    def sleep(self, level: int = 1) -> None:
        """Sleep; at level 2, which discards all weights, keep the drafts' on the host.

        vLLM's users reload the target, and have no way to reload further drafts.
        """
        if level == 2:
            of_target = {id(each) for each in _weights(self.model_runner.get_model())}
            of_drafts = {id(each): each for draft in self._drafts() for each in _weights(draft)}
            own = [each for name, each in of_drafts.items() if name not in of_target]
            copies = [each.detach().to("cpu", copy=True) for each in own]  # sync: no steps
            self._kept, self._lost = list(zip(own, copies, strict=True)), True
        super().sleep(level)  # type: ignore[misc]

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake up, and give the drafts the weights that `sleep` has kept."""
        super().wake_up(tags)  # type: ignore[misc]
        if tags is None or "weights" in tags:
            for weight, kept in self._kept:
                weight.data.copy_(kept)
            if self._lost:  # The next weights may come past every call below.
                self.model_runner.weights_replaced(TARGET)
            self._kept, self._lost = (), False

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Replace the target's weights; those of the drafts stay."""
        self._say_that_drafts_stay()
        super().reload_weights(*args, **kwargs)  # type: ignore[misc]
        self.model_runner.weights_replaced(TARGET)

    def start_weight_update(self) -> None:
        """Begin to replace the target's weights; those of the drafts stay."""
        self._say_that_drafts_stay()
        super().start_weight_update()  # type: ignore[misc]

    def start_draft_weight_update(self) -> None:
        """Begin to replace the draft's weights.

        Raises:
            ValueError: for several drafts, of which vLLM would update the first alone.
        """
        further = further_drafts(self.vllm_config.speculative_config)
        if further:
            names = [each.draft_model_config.model for each in further]
            raise ValueError(
                f"start_draft_weight_update is not supported with dyntree.drafts={names}: it "
                "updates the first draft alone; leave dyntree.drafts out"
            )
        self._computed = [each for draft in self._drafts() for each in _computed(draft)]
        super().start_draft_weight_update()  # type: ignore[misc]

    def finish_weight_update(self) -> None:
        super().finish_weight_update()  # type: ignore[misc]
        for module, name, tensor in self._computed:
            # Captured graphs read it where it was before.
            tensor.data.copy_(getattr(module, name))
            setattr(module, name, tensor)
        self._computed = ()
        self.model_runner.weights_replaced(DRAFT if self._weight_update_is_draft else TARGET)

    def supports_draft_weight_updates(self) -> bool:
        supported: bool = super().supports_draft_weight_updates()  # type: ignore[misc]
        return supported and not further_drafts(self.vllm_config.speculative_config)

    def _drafts(self) -> list[torch.nn.Module]:
        """Return the loaded drafts: one or a head, and further ones."""
        first = self.model_runner.get_draft_model()
        further = getattr(self.model_runner.speculator, "further", ())
        return [] if first is None else [first, *(each.model for each in further)]

    def _say_that_drafts_stay(self) -> None:
        if self._drafts():
            logger.info_once(
                "The target's weights are replaced, and the drafts' stay. The tokens are the new "
                "target's; fewer nodes are accepted the more it differs from the old one."
            )

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


def _weights(model: torch.nn.Module) -> chain[torch.Tensor]:
    computed = (tensor for _, _, tensor in _computed(model))
    return chain(model.parameters(), model.buffers(), computed)


def _computed(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Yield what modules have computed of their weights, with where it is: block drafts join the
    projections of all layers."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and name != "kv_cache":
                yield module, name, value
