"""A stage of a pipeline before the last: it places nodes, and keeps accepted paths."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput

from dyntree_plugin.engine.layer_kinds import AcceptedPaths
from dyntree_plugin.engine.pipeline.relay import Decided, Rows
from dyntree_plugin.engine.stage import TreeStage
from dyntree_plugin.engine.step.trees import PlacedTrees


class EarlierStage(TreeStage):
    """Follows the trees of the last stage, which drafts and verifies them.

    A step's path and its requests' next trees arrive before the next step of these requests.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        if self.relay is None:
            raise RuntimeError("an engine of one stage has no earlier one")
        self.trees = PlacedTrees(self.max_num_reqs, self.plan.shape.node_budget, device)

    def measure_costs(self) -> None:
        """Do nothing: the last stage measures its part, and learns the whole while serving."""

    def update_pp_decode_requests(self) -> None:
        """Take what an earlier step of the requests decided; vLLM calls it before every step."""
        super().update_pp_decode_requests()  # type: ignore[no-untyped-call]
        if self.relay is None:
            return
        decided = self.relay.take(self.trees.spare)
        if decided is not None:
            self.follow(decided)

    def follow(self, decided: Decided) -> None:
        """Make accepted paths permanent in this stage's layers, and take the next trees."""
        accepted = AcceptedPaths(decided.path, decided.rows.roots, decided.slots)
        for keeper, places in zip(self.keepers, decided.rows.places, strict=True):
            keeper.keep(accepted, places)
        self.trees.put_places(decided.slots, decided.depths, decided.ancestors)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Begin to receive the tokens, the paths and the trees of the step."""
        state = self.execute_model_state
        output = super().sample_tokens(grammar_output)
        if state is not None and self.relay is not None:
            batch = state.input_batch
            self.relay.receive(batch, Rows.of(batch, [each.places for each in self.keepers]))
        self.clock.split()
        return output
