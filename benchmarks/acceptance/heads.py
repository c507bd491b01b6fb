"""Paths after contexts, as `bound` needs them, of an EAGLE-3 head as the draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.acceptance.models import Branches, Decoder
from benchmarks.acceptance.texts import Prompts, write
from dyntree_kernels.ancestors import ancestor_bits
from dyntree_plugin.tune.eagle import Head, OfTarget, read_target

Choose = Callable[[int, torch.Tensor], torch.Tensor]
"""Returns the tokens [R, C] at a level of R x C paths, from the head's log chances [R, C, V]."""


@dataclass(frozen=True)
class HeadPaths:
    """Paths of ``depth`` tokens after every ``every``-th of the ``tokens`` that the target writes
    after each of R prompts."""

    target: PreTrainedModel
    prompts: Prompts
    temperature: float
    tokens: int
    depth: int
    every: int

    @torch.inference_mode()
    def along(
        self, plain: LlamaForCausalLM, head: Head, generator: torch.Generator
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return for paths of the target, and of the head, the logs of both models' chances [C, L]
        of their tokens, and the head's log chances of all tokens before each, [C, L, V].

        ``plain``: the target with the attention of transformers.
        """
        text = write(self.target, self.prompts, self.temperature, self.tokens + self.depth)
        lengths = self.prompts.lengths[:, None]
        ids = torch.nn.functional.pad(self.prompts.tokens, (0, text.shape[1]))
        ids.scatter_(1, lengths + torch.arange(text.shape[1]), text)
        begins = lengths + torch.arange(self.every, self.tokens + 1, self.every)
        states, embedded, logits = read_target(plain, ids, head.layers)
        weights = OfTarget.of(plain).embedding

        def written(level: int, _: torch.Tensor) -> torch.Tensor:
            return ids.gather(1, begins + level)

        def drawn(_: int, laws: torch.Tensor) -> torch.Tensor:
            flat = torch.multinomial(laws.exp().flatten(0, 1), 1, generator=generator)
            return flat.view(laws.shape[:2])

        found = []
        for choose in (written, drawn):
            paths, laws = self._walk(head, states, embedded, weights, begins, choose)
            if choose is written:
                at = begins[..., None] - 1 + torch.arange(self.depth)
                rows = torch.arange(len(ids))[:, None, None]
                of_target = (logits[rows, at] / self.temperature).log_softmax(-1)
            else:
                of_target = self._target_laws(ids, begins, paths)
            chances = [each.gather(3, paths[..., None])[..., 0] for each in (of_target, laws)]
            found.append(tuple(each.flatten(0, 1) for each in (*chances, laws)))
        return found

    def _walk(
        self,
        head: Head,
        states: torch.Tensor,
        embedded: torch.Tensor,
        weights: torch.Tensor,
        begins: torch.Tensor,
        choose: Choose,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [R, C, L] and the head's log chances before each, [R, C, L, V]."""
        cosines, sines = head.rotary(embedded, torch.arange(embedded.shape[1])[None])
        rows = embedded.shape[1] - self.depth
        # The row that begins a path reads the target's state of the token before the last.
        bases = (begins - 2)[..., None].expand(-1, -1, embedded.shape[2])
        hidden, following = head.fc(states), embedded[:, 1 : 1 + rows]
        cached: list[tuple[torch.Tensor, torch.Tensor]] = []
        tokens, laws = [], []
        for level in range(self.depth):
            angles = (cosines[:, level : level + rows], sines[:, level : level + rows])
            hidden = head.midlayer(hidden[:, :rows], following, angles, cached)
            own = head.lm_head(head.norm(hidden.gather(1, bases))) / self.temperature
            law = own.new_full((*own.shape[:2], len(weights)), float("-inf"))
            law[..., head.tokens] = own.log_softmax(-1)
            laws.append(law)
            tokens.append(choose(level, law))
            # Rows that begin no path are not read.
            following = torch.zeros_like(following).scatter(1, bases, weights[tokens[-1]])
        return torch.stack(tokens, 2), torch.stack(laws, 2)

    def _target_laws(
        self, ids: torch.Tensor, begins: torch.Tensor, paths: torch.Tensor
    ) -> torch.Tensor:
        """Return the target's log chances before each token of the paths, [R, C, L, V]."""
        decoder = Decoder(self.target, *ids.shape)
        steps = torch.arange(self.depth).expand(len(ids), -1)
        bits, valid = ancestor_bits(steps - 1), torch.ones_like(steps, dtype=torch.bool)
        read, laws = torch.zeros_like(begins[:, 0]), []
        for path, end in zip(paths.unbind(1), begins.unbind(1), strict=True):
            fresh = read[:, None] + torch.arange(int((end - read).max()))
            first = decoder.append(ids.gather(1, fresh.clamp(max=ids.shape[1] - 1)), end - read)
            branches = Branches(decoder, self.depth, self.depth)
            later = branches.extend(path, 1 + steps, bits, valid).view(*steps.shape, -1)
            laws.append(torch.cat([first[:, None], later[:, :-1]], 1))
            read = end
        return (torch.stack(laws, 1) / self.temperature).log_softmax(-1)
