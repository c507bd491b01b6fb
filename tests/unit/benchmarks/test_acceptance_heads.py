"""The paths of a head, from which the bound of what trees can emit is computed."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from benchmarks.acceptance import heads
from benchmarks.acceptance.models import load
from benchmarks.acceptance.texts import Prompts, write
from dyntree_plugin import pair
from dyntree_plugin.tune.eagle import load_head, read_target

TOKENS, DEPTH, EVERY = 8, 3, 4
CLOSE = {"atol": 1e-3, "rtol": 1e-3}
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19]]


def test_paths_have_the_chances_that_head_and_target_give_them() -> None:
    """Control: chances of another row of the head differ."""
    stored, cpu = pair.paths(), torch.device("cpu")
    target = load(stored["target"], cpu, torch.float32)
    plain = LlamaForCausalLM.from_pretrained(stored["target"], dtype=torch.float32)
    head = load_head(stored["eagle3"]).requires_grad_(False)
    prompts = Prompts.of(PROMPTS, 0, cpu)
    text = write(target, prompts, 1.0, TOKENS + DEPTH)
    begun = heads.HeadPaths(target, prompts, 1.0, TOKENS, DEPTH, EVERY)
    found = begun.along(plain, head, torch.Generator().manual_seed(0))
    of_target, of_draft = ([each.view(2, 2, DEPTH, *each.shape[2:]) for each in p] for p in found)

    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([[*prompt, *text[number].tolist()]])
        states, embedded, logits = read_target(plain, ids, head.layers)
        unrolled = list(head.unrolled(states, embedded, DEPTH))
        for context in range(2):
            begin = len(prompt) + EVERY * (context + 1)
            for level in range(DEPTH):
                token = ids[0, begin + level]
                law = torch.full((logits.shape[2],), -torch.inf)
                law[head.tokens] = unrolled[level][0, begin - 2].log_softmax(0)
                other = unrolled[level][0, begin - 3].log_softmax(0)
                torch.testing.assert_close(of_target[2][number, context, level], law, **CLOSE)
                assert not torch.allclose(law[head.tokens], other, **CLOSE)
                wanted = logits[0, begin + level - 1].log_softmax(0)[token]
                torch.testing.assert_close(of_target[0][number, context, level], wanted, **CLOSE)

            first = of_draft[2][number, context, 0]
            torch.testing.assert_close(first, of_target[2][number, context, 0], **CLOSE)
            off = of_draft[2][number, context] - of_draft[1][number, context, :, None]
            drawn = off.abs().argmin(1)  # the tokens, by their chances
            whole = torch.cat([ids[:, :begin], drawn[None]], 1)
            laws = plain(whole).logits[0, begin - 1 : -1].log_softmax(1)
            expected = laws.gather(1, drawn[:, None])[:, 0]
            torch.testing.assert_close(of_draft[0][number, context], expected, **CLOSE)
