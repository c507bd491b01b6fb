"""The chance that a candidate child is accepted, learned from verifications while serving.

A draft's probability is not that chance: under ``match`` a child is accepted if it is the target's
draw. A good draft foresees that draw far more surely than its own distribution says, and a poor
draft less surely. The estimate is a logistic regression of acceptance on two numbers that every
candidate has without another pass over the vocabulary (Platt, "Probabilistic Outputs for Support
Vector Machines", 1999, with a margin beside the score):

    chance = sigmoid(bias + a * logit(draft probability) + b * margin)

where the margin is the score's lead over the best other candidate. If the target's scores are the
draft's plus noise, the truth is close to ``sigmoid(margin / scale)`` where two candidates matter
and to a multiple of the logit where many do. The prior is what was learned before, which fades
towards weights that are fixed for each kind of candidate. Those of kind `DRAFT` are ``(0, 1, 0)``,
the draft probability itself.

All candidates of the draft have these two features, also beside a trie's. A trie's candidate that
the draft has judged has the logit of the draft probability, which contains the target sampler's
noise where drafting is coupled, and the trie's evidence. One that the draft has not judged has the
evidence, and the noise of its token.

If the chance p of that token were known, the target would take it with the chance
``exp(-exp(-(logit p + noise)))``. But the evidence is an average over places where p differs, which
this closed form does not know. On held-out code that the embedded target wrote, the log loss per
judged node was 0.400 with the evidence alone, 0.427 with the closed form of a KT estimate, and
0.382 with the noise as a feature at temperature 0.6, and 0.413, 0.390 and 0.379 at temperature 1.

Two more features, the draft's log probability without noise and its entropy, brought 0.23 % ± 0.09
more tokens per step over 12 combinations of workload, temperature and 16 or 64 nodes, so they are
left out: each would need another pass over the vocabulary.

Each class of temperature has its own weights for each kind of candidate. They follow the workload
by Newton steps on each verification.

Nothing here can change the output: verification never looks at values.
"""

from __future__ import annotations

import torch

from dyntree_kernels.contracts import BESIDE, BOTH, DRAFT, KINDS, LOOK_UP
from dyntree_kernels.learning import Regression
from dyntree_plugin.tree.token_tree import NO_VALUE

FEATURES = 2
"""The number of features of a node."""

TEMPERATURE_STEP = 0.25
CLASSES = 6
"""The number of classes: greedy; temperatures below 0.25, 0.5, 0.75 and 1; from 1 on."""

MAX_FEATURE = 20.0  # a logit of 20 is a chance of 1 within float32
PRIOR_WEIGHTS = {
    DRAFT: (0.0, 1.0, 0.0),
    # Means of the weights that were learned of held-out code, written by the embedded target at
    # temperatures 0, 0.6 and 1, but for the draft's slope, which pairs do not share.
    LOOK_UP: (-0.7, 1.0, 0.4),
    BOTH: (1.3, 1.0, 0.4),
    BESIDE: (-0.5, 1.0, 0.0),
}
PRIOR_STRENGTH = 0.1
NEWTON_STEPS = 2  # per verification; the first batches are far from quadratic
LOWEST_WEIGHTS = (-5.0, 0.0, 0.0)  # slopes of 0 or more: a better score is never worth less
HIGHEST_WEIGHTS = (5.0, 20.0, 20.0)


def temperature_class(temperature: torch.Tensor) -> torch.Tensor:
    """Return the classes, int64 [R], of requests with these temperatures, float [R]."""
    warm = 1 + (temperature / TEMPERATURE_STEP).long().clamp(max=CLASSES - 2)
    return torch.where(temperature > 0, warm, 0)


def logit_of(log_probs: torch.Tensor) -> torch.Tensor:
    """Return the logits of probabilities given by their logs, within `MAX_FEATURE`."""
    log_probs = _bounded(log_probs)
    logit = log_probs - torch.log(-torch.expm1(log_probs))
    return logit.clamp(-MAX_FEATURE, MAX_FEATURE)


def _bounded(log_probs: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(log_probs, nan=NO_VALUE).clamp(-MAX_FEATURE, -1e-7)


def features(log_probs: torch.Tensor) -> torch.Tensor:
    """Return the features of candidates, float32 [..., K, FEATURES].

    ``log_probs`` float32 [..., K] are the log softmax of the scores of a node's K best candidates,
    best first. A margin needs a K of at least 2. A candidate of ``-inf`` gets finite features.
    """
    logit = logit_of(log_probs)
    log_probs = _bounded(log_probs)
    if log_probs.shape[-1] == 1:
        margin = logit
    else:
        best, second = log_probs[..., :1], log_probs[..., 1:2]
        margin = torch.cat([best - second, log_probs[..., 1:] - best], dim=-1)
    return torch.stack([logit, margin], dim=-1).clamp(-MAX_FEATURE, MAX_FEATURE)


class AcceptanceEstimate:
    """The weights of the logistic regressions, which follow the workload.

    Row ``class * KINDS + kind`` is that of a class of temperature and a kind of candidate.
    """

    def __init__(self, device: torch.device | str, memory: float = 2048.0) -> None:
        """Start uncalibrated. An observation counts for 1/e after ``memory`` judged nodes of its
        class and kind."""
        self.memory = memory
        self.prior = torch.tensor([PRIOR_WEIGHTS[kind] for kind in range(KINDS)], device=device)
        self.low = torch.tensor(LOWEST_WEIGHTS, device=device)
        self.high = torch.tensor(HIGHEST_WEIGHTS, device=device)
        self._prior_information = PRIOR_STRENGTH * torch.eye(1 + FEATURES, device=device)
        self.weights = self.prior.repeat(CLASSES, 1)
        """float32 [CLASSES * KINDS, 1 + FEATURES]: bias, then a weight per feature."""
        self.information = self._prior_information.repeat(CLASSES * KINDS, 1, 1)
        """float32 [CLASSES * KINDS, 1 + FEATURES, 1 + FEATURES]: the inverse of the weights'
        covariance."""

    def forget(self) -> None:
        """Start anew, at the same addresses: after a poor draft, values are so low that no step
        verifies a node to learn from."""
        self.weights.copy_(self.prior.repeat(CLASSES, 1))
        self.information.copy_(self._prior_information.expand_as(self.information))

    @property
    def regression(self) -> Regression:
        """The tensors and constants, for kernels that observe."""
        tensors = (self.weights, self.information, self.prior, self.low, self.high)
        return Regression(*tensors, PRIOR_STRENGTH, self.memory, NEWTON_STEPS)

    def log_chance(
        self, features: torch.Tensor, classes: torch.Tensor, kinds: torch.Tensor | int = DRAFT
    ) -> torch.Tensor:
        """Return the log of the chance that the target takes each candidate if it gets there.

        ``features`` are [R, ..., FEATURES], ``classes`` int64 [R], and ``kinds`` one kind or an
        integer tensor [R, ...]. The result is float32 [R, ...] and at most 0.
        """
        weights = self.weights[classes.view(-1, *[1] * (features.dim() - 2)) * KINDS + kinds]
        logit = weights[..., 0] + (weights[..., 1:] * features).sum(dim=-1)
        return torch.nn.functional.logsigmoid(logit)
