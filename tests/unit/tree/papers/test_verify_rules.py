"""Which rule goes with which growth."""

from __future__ import annotations

import pytest

from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.pairs import (
    all_pairs,
    allowed_rules,
    check_pair,
    default_rule,
)
from dyntree_plugin.tree.registry import GROWTHS, plan_growth
from dyntree_plugin.tree.shape import TreeShape


def test_the_table_has_every_growth_with_every_sampling_that_it_offers():
    needs = {"expansion": (2, 1), "sequoia": (0.6, 0.3)}
    shape = TreeShape(node_budget=4, max_depth=2, width=2, children=2)
    for name, spec in GROWTHS.items():
        offered, parameter = spec.samplings, needs.get(name)
        assert plan_growth(GrowthConfig(name, parameter), shape).sampling == offered[0]
        for sampling in ("best", "without_replacement", "with_replacement"):
            config = GrowthConfig(name, parameter, sampling)
            if sampling in offered:
                assert plan_growth(config, shape).sampling == sampling
            else:
                with pytest.raises(ValueError, match="sampling"):
                    plan_growth(config, shape)


def test_a_pair_is_refused_exactly_if_the_table_says_so():
    for pair in all_pairs():
        if pair.allowed:
            check_pair(pair.growth, pair.sampling, pair.rule)
        else:
            with pytest.raises(ValueError) as refusal:
                check_pair(pair.growth, pair.sampling, pair.rule)
            for part in (pair.growth, pair.sampling, pair.rule, pair.reason):
                assert part in str(refusal.value)
            allowed = " or ".join(allowed_rules(pair.growth, pair.sampling))
            assert f"use rule={allowed}" in str(refusal.value)


def test_the_default_rule_is_always_allowed_and_named_first():
    for name, spec in GROWTHS.items():
        for sampling in spec.samplings:
            assert allowed_rules(name, sampling)[0] == default_rule(sampling)
