"""Look-up in the texts of many requests, as a source of candidates beside the draft or alone."""

from __future__ import annotations

import torch
from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

from benchmarks.acceptance.texts import Prompts
from dyntree_kernels.cpu.look_up import look_up
from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.children import ChildPicker
from dyntree_plugin.tree.judged import JudgedTrie
from dyntree_plugin.tree.value import temperature_class

_LONGEST_NGRAM = 5  # vLLM's default
_SURE = 10.0  # a chain is kept whole, whatever its evidence


class LookUps:
    """The texts of R requests so far, and what look-up finds in them."""

    def __init__(
        self,
        prompts: Prompts,
        longest: int,
        picker: ChildPicker,
        nodes: int,
        vocabulary: int,
        temperature: float,
        ngram: int | None = None,
    ) -> None:
        """``longest``: room for tokens of each text. ``nodes``: of each request's trie.
        ``ngram``: vLLM's n-gram with this shortest match in place of our look-up."""
        self._tokens = torch.zeros(len(prompts), longest, dtype=torch.int32)
        self._tokens[:, : prompts.longest] = prompts.tokens
        self._lengths = prompts.lengths.to(torch.int32, copy=True)
        self._seeds = prompts.seeds
        self._picker = picker
        self._nodes = nodes
        self._vocabulary = vocabulary
        self._temperature = temperature
        self._ngram = ngram

    def append(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Extend each text by the first ``counts[r]`` of ``tokens`` [R, E]."""
        new = torch.arange(tokens.shape[1])
        at = self._lengths[:, None] + new
        real = new < counts[:, None]
        row = torch.arange(len(tokens))[:, None].expand_as(at)
        self._tokens[row[real], at[real].long()] = tokens[real].int()
        self._lengths += counts.int()

    def keep(self, requests: torch.Tensor) -> None:
        """Go on with ``requests`` alone, indices of the present ones in ascending order."""
        self._tokens, self._lengths = self._tokens[requests], self._lengths[requests]
        self._seeds = self._seeds[requests]

    def tries(self) -> JudgedTrie:
        """Return the tries below the last tokens."""
        requests = len(self._lengths)
        trie = Trie.room(requests, self._nodes, self._tokens.device)
        if self._ngram is None:
            depth = self._picker.max_depth
            look_up(self._tokens, self._lengths, torch.arange(requests), trie, max_depth=depth)
        else:
            self._chains(trie, self._ngram)
        temperatures = torch.full((requests,), self._temperature)
        noise = self._picker.trie_noise(
            trie, self._lengths.long() - 1, self._seeds, temperatures, self._vocabulary
        )
        return self._picker.judged(trie, noise, temperature_class(temperatures))

    def _chains(self, trie: Trie, least: int) -> None:
        """Fill ``trie`` with the chains that vLLM's n-gram finds."""
        trie.above.copy_(torch.arange(self._nodes) - 1)
        trie.evidence.fill_(_SURE)
        for row, length in enumerate(self._lengths.tolist()):
            found = _find_longest_matched_ngram_and_propose_tokens(
                self._tokens[row, :length].numpy(), least, max(least, _LONGEST_NGRAM), 1 << 30,
                self._nodes,
            )  # fmt: skip
            trie.tokens[row, : len(found)] = torch.from_numpy(found).long()
            trie.exists[row, : len(found)] = True
