"""Separate draft models as a source of candidates: their forwards over rows that see a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import SpeculativeConfig, VllmConfig, replace
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from dyntree_plugin.engine.agreement import sizes_alone
from dyntree_plugin.engine.configuration import further_drafts
from dyntree_plugin.engine.drafts.base import NodeProposals
from dyntree_plugin.engine.offloading import on_device
from dyntree_plugin.engine.pipeline.whole_draft import as_one_stage
from dyntree_plugin.engine.step.catch_up import CatchUp, prompt_rows
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import RowMemory, RowWriter, TreeRows
from dyntree_plugin.engine.step.source import NodeSource
from dyntree_plugin.tree.padded import of_width, readable
from dyntree_plugin.tree.pooled import apart, mixture


class LoadedModel(Protocol):
    """A draft model that is loaded, its hidden size, and the size of its vocabulary."""

    hidden_size: int
    vocab_size: int

    def _run_model(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def compute_draft_logits(
        self, hidden_states: torch.Tensor, spec_step_idx: int
    ) -> torch.Tensor: ...


class FilledRows(Protocol):
    """What a forward reads: tokens, positions, and the attention metadata of every model."""

    @property
    def ids(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def metadata(self) -> dict[str, Any]: ...
    @property
    def slots_by_layer(self) -> dict[str, torch.Tensor]: ...


class DraftModel:
    """One model over the rows of a `RowMemory`, which several models may share.

    Its state between two calls lies at a fixed address: the roots' hidden states.
    """

    def __init__(self, model: LoadedModel, memory: RowMemory, vocabulary: int) -> None:
        """``vocabulary``: V, the target's, which may be padded to another size than the model's."""
        self._model = model
        self._vocabulary = vocabulary
        self._memory = memory
        self.root_hidden = torch.zeros(
            memory.requests, model.hidden_size, dtype=memory.dtype, device=memory.device
        )

    def read(self, rows: FilledRows, last: torch.Tensor) -> None:
        """Read filled rows, of which ``last`` int64 [R] are the roots'."""
        torch.index_select(self.hidden(rows), 0, last, out=self.root_hidden[: len(last)])

    def root_logits(self, requests: int) -> torch.Tensor:
        """Return the logits after the roots, [R, V]."""
        return self.logits_of(self.root_hidden[:requests])

    def logits(self, rows: FilledRows) -> torch.Tensor:
        """Return the logits of filled rows, [rows, V]."""
        return self.logits_of(self.hidden(rows))

    def hidden(self, rows: FilledRows) -> torch.Tensor:
        """Run filled rows; return what gives their logits."""
        ids = readable(rows.ids, self._vocabulary, self._model.vocab_size)
        return self._model._run_model(ids, rows.positions, rows.metadata, rows.slots_by_layer, None)

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return of_width(self._model.compute_draft_logits(hidden, 0), self._vocabulary)


class DraftModels:
    """The `NodeSource` that runs one draft model, or several over the same rows.

    A node has one slot, the same in the cache of every model. Each of them reads all tokens.
    """

    shift = 0
    kept: tuple[torch.Tensor, ...] = ()

    def __init__(
        self,
        speculator: StandaloneARSpeculator,
        further: Sequence[LoadedModel],
        memory: RowMemory,
        writer: RowWriter,
        vocabulary: int,
        *,
        trees_apart: bool = False,
    ) -> None:
        """``speculator``: vLLM's, with the first model. ``further``: models beside it.
        ``vocabulary``: V, the target's, to which the models' may be padded otherwise.
        ``trees_apart``: each model grows a separate tree; see `GrowthPlan.roots`."""
        self._trees_apart = trees_apart
        self._speculator = speculator
        self._memory = memory
        self._writer = writer
        self.models = [DraftModel(model, memory, vocabulary) for model in (speculator, *further)]

    def receive(self, emitted: Emitted, target: TargetStates) -> None:
        """Do nothing: a separate model reads tokens alone."""

    def follow(self, requests: Requests, emitted: Emitted) -> None:
        """Read the emitted tokens, the last of which are the new roots; all requests decode."""
        rows = self._writer.chain(requests, emitted)
        last = self._memory.root_rows[: len(emitted.roots)]
        for model in self.models:
            model.read(rows, last)

    def follow_prompts(self, step: CatchUp) -> None:
        """Do as `follow` where some requests are in their prompt, whose chunks are read as well."""
        found = prompt_rows(self._speculator, self._memory, step)
        for model in self.models:
            model.read(found, found.last)

    def root_logits(self, requests: int) -> torch.Tensor:
        """Return the logits after the roots, [R, V]; those of several models are mixed.

        Models whose trees are apart give [R * models, V].
        """
        return self._pooled([model.root_logits(requests) for model in self.models], requests)

    def forward(self, rows: TreeRows, requests: int, first: int) -> torch.Tensor:
        """Run the models over filled rows; return the logits of all of them, [R * width, V]."""
        return self._pooled([model.logits(rows) for model in self.models], requests)

    def _pooled(self, logits: list[torch.Tensor], requests: int) -> torch.Tensor:
        return apart(logits, requests) if self._trees_apart else mixture(logits)


@as_one_stage()
def run_alone(
    self: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    attn_metadata: dict[str, Any] | None,
    slot_mappings: dict[str, torch.Tensor] | None,
    num_tokens_across_dp: torch.Tensor | None,
) -> torch.Tensor:
    """Run a draft's forward as ``StandaloneARSpeculator._run_model``, for this rank alone.

    That reads nothing of the speculator but the model and the configuration.
    """
    sizes = sizes_alone(self.vllm_config, len(input_ids))
    stock = StandaloneARSpeculator._run_model
    return stock(self, input_ids, positions, attn_metadata, slot_mappings, sizes)


class FurtherDraft:
    """A loaded draft model that runs as vLLM's speculator runs its own.

    Its attention layers are in the KV cache group of the other models' layers: one block table and
    one slot per position serve all of them.
    """

    def __init__(
        self, model: nn.Module, vllm_config: VllmConfig, hidden_size: int, vocab_size: int
    ) -> None:
        """``vllm_config`` is the engine's, which knows the attention layers of all models."""
        self.model = model
        self.vllm_config = vllm_config
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size

    _run_model = run_alone

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        return StandaloneARSpeculator.compute_draft_logits(
            cast(StandaloneARSpeculator, self), hidden_states, spec_step_idx
        )


def load_further_drafts(vllm_config: VllmConfig) -> list[FurtherDraft]:
    """Load the drafts of the option ``drafts``, as vLLM's speculator loads its own."""
    return [
        FurtherDraft(
            _load(vllm_config, speculation, f"draft_model_{number}"),
            vllm_config,
            speculation.draft_model_config.get_hidden_size(),
            speculation.draft_model_config.get_vocab_size(),
        )
        for number, speculation in enumerate(
            further_drafts(vllm_config.speculative_config), start=2
        )
    ]


def _load(vllm_config: VllmConfig, speculation: SpeculativeConfig, prefix: str) -> nn.Module:
    """Load one of them. ``prefix`` begins the names of its layers and of its compiled code."""
    rank = vllm_config.parallel_config.rank
    config = replace(
        vllm_config,
        model_config=speculation.draft_model_config,
        quant_config=None,
        parallel_config=replace(speculation.draft_parallel_config, rank=rank),
    )
    with set_model_tag(prefix):
        return get_model(vllm_config=config, prefix=prefix)


class TreeSpeculator(NodeProposals, StandaloneARSpeculator):
    """Loads, profiles and places a draft model as the stock class does, and further ones."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.further: list[FurtherDraft] = []

    _run_model = run_alone

    @on_device()
    @as_one_stage()
    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the draft, and further ones, whose layers vLLM then takes for the draft's own."""
        first = super().load_draft_model(target_model, target_attn_layer_names)
        self.further = load_further_drafts(self.vllm_config)
        return first

    def make_source(self, memory: RowMemory, writer: RowWriter) -> NodeSource:
        trees = self.compose.trees
        apart = trees.plan.growing.roots > 1
        return DraftModels(self, self.further, memory, writer, trees.vocabulary, trees_apart=apart)

    def rehearse(
        self, batch: InputBatch, hidden: tuple[torch.Tensor, ...], most_logits: bool
    ) -> None:
        """Run one forward of every draft."""
        rows, at = batch.num_tokens, self.rows_of_logits(batch, most_logits)
        models: list[LoadedModel] = [self, *self.further]
        vocabulary = self.compose.trees.vocabulary
        logits = []
        for model in models:
            # vLLM rehearses with any of the target's tokens.
            ids = readable(batch.input_ids[:rows], vocabulary, model.vocab_size)
            found = model._run_model(ids, batch.positions[:rows], None, None, None)
            logits.append(of_width(model.compute_draft_logits(found[at], 0), vocabulary))
        mixture(logits)  # Those of a pool are held at once.
