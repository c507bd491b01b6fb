"""Check learning in one launch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from learn_checks import LearnChecks
from paged_cases import DEVICE

from dyntree_kernels.cuda.learn import learn


class TestLearningInOneLaunch(LearnChecks):
    learn = staticmethod(learn)
    device = DEVICE
    tolerance = 2e-3
    lessons = 6
