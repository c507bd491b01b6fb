"""What is measured on prompts of their own before methods are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from benchmarks.acceptance.drafting import Grown
from benchmarks.acceptance.looking_up import LookUps
from benchmarks.acceptance.methods import MOST_CHILDREN, Method, Setting
from benchmarks.acceptance.simulate import simulate
from benchmarks.acceptance.texts import Prompts, logits_along
from benchmarks.acceptance.verifying import Replay
from dyntree_plugin.tree.children import ChildPicker, sampled_children
from dyntree_plugin.tree.noise import DRAFT, stream
from dyntree_plugin.tree.papers.without_replacement import WITHOUT_REPLACEMENT
from dyntree_plugin.tree.perturb import perturb_on
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.token_tree import Accepted
from dyntree_plugin.tree.value import AcceptanceEstimate, outcomes, temperature_class


@torch.inference_mode()
def positional_acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Prompts,
    text: torch.Tensor,
    temperature: float,
) -> tuple[float, ...]:
    """Sequoia's P (arXiv 2402.12374, section 4.1): the chance that a node's 1st, 2nd, … child is
    accepted, along the target's ``text`` [R, T] behind the prompts.

    At temperature 0 children are the draft's best; above, draws without replacement, and the
    chance is exact for each draw: no acceptance is sampled. It never rises with the child's place
    (what does, by noise, is levelled), as the dynamic programme assumes, and ends before it is 0.
    """
    wanted, given = (logits_along(model, prompts, text) for model in (target, draft))
    count = min(MOST_CHILDREN, given.shape[1])
    if temperature == 0:
        ranks = given.topk(count, 1).indices == wanted.argmax(1, keepdim=True)
        chances = ranks.double().mean(0)
    else:
        log_draft = (given / temperature).log_softmax(1)
        seeds = stream(prompts.seeds, DRAFT).repeat_interleave(text.shape[1])
        ones, rows = torch.ones(len(seeds), device=seeds.device), torch.arange(len(seeds))
        noise = perturb_on(draft.device)(
            torch.zeros_like(log_draft), ones, seeds, rows.to(seeds.device)
        )
        tokens, found = sampled_children(log_draft, count, noise)
        law = (wanted / temperature).softmax(1)
        accept = WITHOUT_REPLACEMENT.odds(law, log_draft, tokens, found > -torch.inf).accept
        refused = torch.nn.functional.pad((1 - accept.double()).cumprod(1)[:, :-1], (1, 0), value=1)
        chances = (accept * refused).mean(0)
    levelled = chances.cummin(0).values
    return tuple(levelled[levelled > 0].tolist())


def learn_values(
    drafts: Sequence[PreTrainedModel],
    prompts: Prompts,
    text: torch.Tensor,
    method: Method,
    setting: Setting,
    rounds: int = 2,
) -> AcceptanceEstimate:
    """Return values that a method learned from decoding ``prompts`` with its ``drafts``.

    ``text`` is what follows them. The first round grows trees by the uncalibrated values, the next
    by what the first has learned: the nodes that are judged depend on the values.
    """
    device, config = drafts[0].device, drafts[0].config
    estimate = AcceptanceEstimate(device)
    plan = method.plan(setting)
    kind = temperature_class(torch.tensor([setting.temperature], device=device))

    def observe(grown: Grown, accepted: Accepted) -> None:
        tree = grown.tree
        if grown.features is None or grown.kinds is None:
            raise ValueError("values are learned of trees that keep their features")
        slots = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
        judged, taken = outcomes(tree.parents, accepted.path, slots < tree.counts[:, None])
        classes = kind.expand(len(tree.counts))
        estimate.observe(grown.features, grown.kinds, judged, taken, classes)

    pick = ChildPicker(plan, perturb_on(device), estimate)
    vocabulary = config.get_text_config().vocab_size
    tokens = text.shape[1] - setting.max_depth
    for _ in range(rounds):
        lookups = look_ups(method, plan, vocabulary, prompts, pick, setting.temperature, tokens)
        simulate(
            plan, pick, method.drafts_of(drafts), prompts, Replay(text), setting.temperature,
            tokens, observe, lookups,
        )  # fmt: skip
    return estimate


def look_ups(
    method: Method,
    plan: TreePlan,
    vocabulary: int,
    prompts: Prompts,
    pick: ChildPicker,
    temperature: float,
    tokens: int,
) -> LookUps | None:
    """Return the method's look-up in texts that grow by so many ``tokens``, if it has one."""
    if not plan.shape.grafts:
        return None
    longest = prompts.longest + tokens + 2 * plan.shape.max_depth + 2
    return LookUps(prompts, longest, pick, plan.shape.grafts, vocabulary, temperature, method.ngram)
