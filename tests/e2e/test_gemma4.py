"""Gemma-4's module, which reads the target's cache. `test_targets` has the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pooled
import pytest
import torch
import workload
from engine_process import answered
from random_engines import FEW, NODES
from random_targets import gemma4_assistant, random_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

WINDOW = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gemma4")
    return {
        "target": random_target(folder / "target", "gemma4_text"),
        "module": gemma4_assistant(folder / "module"),
    }


class Reference:
    """Target and module in transformers, which run over one text as their authors define them."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._target, self._module = (
            AutoModelForCausalLM.from_pretrained(folders[name]) for name in ("target", "module")
        )

    @torch.inference_mode()
    def logits(self, text: list[int], path: list[int], advance: int = 0) -> torch.Tensor:
        """Return the module's logits [V] after ``text`` and ``path``.

        The target has read all of the text but its last token. A node stands ``advance`` positions
        after its parent.
        """
        read = self._target.model(torch.tensor([text[:-1]]), return_shared_kv_states=True)
        state, position = read.last_hidden_state[:, -1:], torch.tensor([[len(text) - 2]])
        caches = {
            kind: [each[:, :, -WINDOW:] if kind == "sliding_attention" else each for each in cache]
            for kind, cache in read.shared_kv_states.items()
        }
        for token in (text[-1], *path):
            embedded = self._target.get_input_embeddings()(torch.tensor([[token]]))
            found = self._module(
                inputs_embeds=torch.cat([embedded, state], dim=-1),
                position_ids=position,
                shared_kv_states=caches,
            )
            state, position = found.last_hidden_state, position + advance
        return found.logits[0, 0]


def test_every_row_says_what_the_module_says_alone(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """At the roots, after prompts in chunks and after accepted paths, and at expanded nodes."""
    tokenizer = AutoTokenizer.from_pretrained(pair.paths()["target"])
    head = workload.with_head(folders["module"], "gemma4_mtp", NODES, budget="fixed")
    job: dict[str, Any] = {
        "arguments": head | {"model": str(folders["target"])},
        "prompts": [tokenizer.encode(text)[:90] for text in pair.held_out_prompts(4, seed=2)],
        "notes": str(tmp_path / "notes"),
        "params": FEW | {"max_tokens": 20},
    }
    answered(str(Path(pooled.__file__)), job, {}, threads=1)
    notes = torch.load(tmp_path / "notes")[::31]
    reference = Reference(folders)
    found = torch.stack([logits[0] for _, _, logits in notes])
    wanted = torch.stack([reference.logits(text, path) for text, path, _ in notes])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)
    assert max(len(path) for _, path, _ in notes) > 2
    shifted = torch.stack([reference.logits(text[:-1], path) for text, path, _ in notes])
    assert float((found - shifted).abs().mean()) > 0.1
    deep = [(text, path, logits[0]) for text, path, logits in notes if path]
    moved = [(reference.logits(text, path, 1) - logits).abs().mean() for text, path, logits in deep]
    assert float(torch.stack(moved).mean()) > 0.01
