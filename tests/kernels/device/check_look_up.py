"""Check the look-up in two launches, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from look_up_checks import CASES, LAW, Case, LookUpChecks, compare
from paged_cases import DEVICE

from dyntree_kernels.cuda.look_up import MOST_DEPTH, look_up
from dyntree_kernels.tries import MOST_ON_CUDA, Trie


class TestTheLookUpInTwoLaunches(LookUpChecks):
    look_up = staticmethod(look_up)
    device = DEVICE
    texts = 20

    @pytest.mark.parametrize(
        ("case", "named"),
        [(Case(4, MOST_DEPTH + 1), "max_depth=65"), (Case(MOST_ON_CUDA + 1, 4), "nodes=65")],
    )
    def test_what_does_not_fit_is_refused(self, case: Case, named: str) -> None:
        with pytest.raises(ValueError, match=named):
            self.tries([[1, 2, 1]], case)

    @pytest.mark.skipif(DEVICE.type == "cpu", reason="needs CUDA graphs")
    def test_a_replayed_graph_reads_longer_texts(self) -> None:
        case, texts = CASES[0], self.random_texts(0)
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], True)
        tokens, lengths = tokens.int().to(DEVICE), torch.zeros(len(texts), device=DEVICE).int()
        trie = Trie.room(len(texts), case.nodes, DEVICE)

        def run() -> None:
            slots = torch.arange(len(texts), device=DEVICE)
            look_up(tokens, lengths, slots, trie, max_depth=case.max_depth)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for cut in (3, 0):
            lengths.copy_(torch.tensor([len(text) - cut for text in texts]).clamp(min=0))
            graph.replay()
            shorter = [text[: max(0, len(text) - cut)] for text in texts]
            compare(Trie(*(part.cpu() for part in trie)), shorter, case, LAW)
