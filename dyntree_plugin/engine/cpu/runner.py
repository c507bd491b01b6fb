"""The runner on the CPU."""

from __future__ import annotations

# Patches torch.cuda and the runner's buffers for the CPU; vLLM's V2 modules must see it first.
import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip

from typing import Any

from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.cpu.model_runner import CPUModelRunner

import vllm_cpu_runner
from dyntree_kernels.cpu.warm_up import warm_up
from dyntree_plugin.engine.cpu.ops import CPUOps
from dyntree_plugin.engine.limits import WORD_TOKENS_ON_CPU
from dyntree_plugin.engine.runner import TreeRunnerMixin
from dyntree_plugin.engine.step.ops import TreeOps
from vllm_cpu_runner.long_lists import lift_limits


class TreeCPUModelRunner(TreeRunnerMixin, CPUModelRunner):
    """Adds the CPU's kernels, and hands the scheduler no padding after small trees."""

    def make_ops(self) -> TreeOps:
        return CPUOps()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        lift_limits(self.sampler, self.vocab_size, WORD_TOKENS_ON_CPU)

    def warm_up_kernels(self) -> None:
        vllm_cpu_runner.warm_up()
        warm_up(self.dtype)  # type: ignore[arg-type]  # vLLM has resolved its name by now

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return each request's drafts for the scheduler, without the padding after small trees.

        A scheduler that is synchronous calls it, and then the counts are at hand. Of independent
        draws, a small tree tells which coincide, so the room for them must not depend on it.
        """
        drafts = super().take_draft_token_ids()
        if drafts is None or self.trees.plan.growing.sampling == "with_replacement":
            return drafts
        slots = [self.req_states.req_id_to_index[req_id] for req_id in drafts.req_ids]
        counts = self.trees.counts[slots].tolist()  # sync: host memory on the CPU
        cut = [ids[:count] for ids, count in zip(drafts.draft_token_ids, counts, strict=True)]
        return DraftTokenIds(drafts.req_ids, cut)
