"""The options: which values are accepted or refused, and what the defaults are."""

from __future__ import annotations

import subprocess
import sys
from ast import literal_eval
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.pairs import allowed_rules
from dyntree_plugin.tree.registry import GROWTHS

BUDGETS = st.integers(min_value=1, max_value=1024)


@settings(deadline=None)
@given(slots=BUDGETS, node_budget=st.none() | BUDGETS)
def test_the_defaults_fit_every_node_budget_that_is_allowed(
    slots: int, node_budget: int | None
) -> None:
    chosen = DynTreeOptions(node_budget=node_budget)
    if node_budget is not None and node_budget > slots:
        with pytest.raises(ValueError, match=f"dyntree.node_budget={node_budget} .*{slots}"):
            chosen.resolve(slots)
    else:
        shape = chosen.resolve(slots).shape
        assert shape.node_budget == (node_budget or slots)
        assert shape.max_depth <= shape.node_budget
        assert shape.width <= shape.node_budget


@settings(deadline=None)
@given(slots=BUDGETS, max_depth=st.integers(1, 64), width=st.integers(1, 64))
def test_an_explicit_depth_and_width_are_kept_or_refused(
    slots: int, max_depth: int, width: int
) -> None:
    chosen = DynTreeOptions(max_depth=max_depth, width=width)
    if max_depth > slots:
        with pytest.raises(ValueError, match=f"dyntree.max_depth={max_depth} .*at most {slots}"):
            chosen.resolve(slots)
    else:
        shape = chosen.resolve(slots).shape
        assert (shape.max_depth, shape.width) == (max_depth, width)


REFUSED = """
{"node_budget": 0} → dyntree.node_budget=0 must be an integer from 1 to 1024
{"node_budget": 1025} → dyntree.node_budget=1025 must be an integer from 1 to 1024
{"node_budget": "16"} → dyntree.node_budget='16' must be an integer
{"max_depth": 65} → dyntree.max_depth=65 must be an integer from 1 to 64
{"threshold": 2.0} → dyntree.threshold=2.0 must be a number above 0
{"expansion": [1, 0]} → dyntree.expansion=[1, 0] must be a list of 1 to 64 integers >= 1
{"growth": "heap"} → dyntree.growth='heap' must be topk or dyspec
{"coupling": "maybe"} → dyntree.coupling='maybe' must be on or off
{"width": 0, "children": 0} → dyntree.width=0
{"width": 0, "children": 0} → dyntree.children=0
16 → must be a JSON object
None → must be a JSON object
{"max_depth": 5, "node_budget": 4} → max_depth=5 cannot be reached with node_budget=4
{"growth": "topk", "rule": "multi_step"} → dyntree.rule=multi_step is biased
{"growth": "expansion"} → dyntree.growth=expansion needs expansion
{"growth": "expansion", "expansion": [4, 4]} → at most node_budget=16
{"growth": "topk", "threshold": 0.1} → dyntree.threshold=0.1 is for growth=threshold
{"growth": "dyspec", "sampling": "best"} → dyntree.sampling=best must be
{"growth": "chain", "lookup": "on"} → dyntree.lookup='on' is for growth=topk, not chain
{"max_depth": 3, "max_forwards": 4} → dyntree.max_forwards=4 cannot be reached with max_d
{"max_forwards": 17} → dyntree.max_forwards=17 cannot be reached with node_budget=16
{"growth": "chain", "exactness": "distribution"} → \
dyntree.exactness=distribution is for growth=topk with rule=match, not growth=chain
{"growth": "dyspec", "exactness": "bits"} → \
dyntree.exactness=bits is for rule=match, not rule=without_replacement
"""
WITHOUT_DRAFT = """
{"exactness": "distribution"} → exactness=distribution draws from a draft, and look-up
{"lookup": "off"} → dyntree.lookup='off' leaves nothing to draft with
{"growth": "chain"} → dyntree.growth=chain needs a draft model: use growth=topk
"""


@pytest.mark.parametrize(
    ("line", "draft"),
    [
        *((line, True) for line in REFUSED.strip().splitlines()),
        (f"{{'acceptance': {[0.01] * 65}}} → 0.01] must be a list of 1 to 64 numbers", True),
        *((line, False) for line in WITHOUT_DRAFT.strip().splitlines()),
    ],
)
def test_what_is_wrong_is_refused_with_its_option_and_what_is_allowed(
    line: str, draft: bool
) -> None:
    """A line has options, and a part of what is said of them."""
    given_options, _, said = line.partition(" → ")
    with pytest.raises(ValueError) as error:
        DynTreeOptions.parse(literal_eval(given_options)).resolve(16, draft=draft)
    assert said in str(error.value)


def test_an_unknown_option_is_refused_with_the_closest_and_all_known_ones() -> None:
    with pytest.raises(ValueError, match=r"dyntree.nodebudget=3 .*did you mean node_budget") as e:
        DynTreeOptions.parse({"nodebudget": 3})
    assert all(name in str(e.value) for name in DynTreeOptions.model_fields)


@pytest.mark.parametrize("growth", GROWTHS)
def test_every_growth_can_be_asked_for_and_gets_a_rule_that_is_exact(growth: str) -> None:
    needs = {"expansion": {"expansion": [1, 1, 3, 1]}, "sequoia": {"acceptance": [0.6, 0.2]}}
    plan = DynTreeOptions.parse({"growth": growth, **needs.get(growth, {})}).resolve(16)
    assert plan.rule in allowed_rules(growth, plan.growing.sampling)
    assert plan.shape.forwards == len(plan.growing.widths) + 1
    # Look-up's nodes alone may be deeper than the forwards reach.
    assert plan.shape.max_depth == plan.shape.forwards or plan.shape.grafts
    assert bool(plan.shape.grafts) == plan.in_force()["lookup"] == GROWTHS[growth].takes_tries


def test_candidates_are_coupled_with_the_target_under_match_alone() -> None:
    drawn = {"growth": "chain", "sampling": "without_replacement"}
    assert DynTreeOptions.parse(drawn | {"rule": "match"}).resolve(4).coupled
    assert not DynTreeOptions.parse(drawn).resolve(4).coupled
    assert not DynTreeOptions.parse({"coupling": "off"}).resolve(4).coupled
    assert not DynTreeOptions.parse({"exactness": "distribution"}).resolve(4).coupled


def test_a_distribution_needs_a_draft_and_leaves_the_rest_as_it_is() -> None:
    options = DynTreeOptions.parse({"exactness": "distribution"})
    plan, without = options.resolve(16), DynTreeOptions().resolve(16)
    assert (plan.shape, plan.growth, plan.rule) == (without.shape, without.growth, without.rule)
    assert (plan.budget, plan.chain_depth, without.chain_depth) == ("adaptive", 16, 0)
    assert plan.in_force()["exactness"] == "distribution"
    tokens = DynTreeOptions().resolve(32)
    trees = [each.drawn_trees for each in (options.resolve(17), plan, tokens)]
    assert trees == [True, False, False]  # a chain of 17 would have no forward for its last token


@pytest.mark.parametrize(
    ("growth", "source"),
    [
        ({}, {}),
        ({}, {"draft": False}),
        ({}, {"block": True}),
        ({"growth": "chain"}, {}),
        ({"growth": "dyspec", "rule": "match"}, {}),
    ],
)
def test_the_same_bits_go_with_whatever_keeps_tokens(
    growth: dict[str, object], source: dict[str, bool]
) -> None:
    plain, bits = (DynTreeOptions.parse(growth | more) for more in ({}, {"exactness": "bits"}))
    plan = bits.resolve(16, **source)
    assert plan.same_bits
    assert plan.in_force() == plain.resolve(16, **source).in_force() | {"exactness": "bits"}


@pytest.mark.parametrize(
    ("given_options", "of_vllm", "exactness"),
    [
        ({}, {}, "tokens"),
        ({}, {"draft_sample_method": "probabilistic"}, "distribution"),
        ({}, {"rejection_sample_method": "block"}, "distribution"),
        ({"exactness": "tokens"}, {"draft_sample_method": "probabilistic"}, "tokens"),
        ({"rule": "match", "growth": "chain"}, {"rejection_sample_method": "block"}, "tokens"),
        ({}, {"method": "ngram_gpu", "rejection_sample_method": "block"}, "tokens"),
        ({}, {"method": "dspark", "draft_sample_method": "probabilistic"}, "tokens"),
        ({}, {"parallel_drafting": True, "draft_sample_method": "probabilistic"}, "tokens"),
    ],
)
def test_who_asks_vllm_for_the_distribution_gets_it_where_it_is_served(
    given_options: dict[str, object], of_vllm: dict[str, object], exactness: str
) -> None:
    usual = {"method": "draft_model", "num_speculative_tokens": 16, "parallel_drafting": False}
    chains = {"draft_sample_method": "greedy", "rejection_sample_method": "standard"}
    speculation = SimpleNamespace(**usual | chains | of_vllm)
    options = DynTreeOptions.parse({"budget": "fixed"} | given_options)
    plan = options.plan_for(speculation)
    assert plan.exactness == exactness
    # Whoever gets it for vLLM's options has the defaults of who asks for it.
    if exactness == "distribution":
        assert plan == options.model_copy(update={"exactness": exactness}).resolve(16)


SEQUOIA = {"growth": "sequoia", "acceptance": [0.5]}


@pytest.mark.parametrize(
    ("given_options", "without"),
    [
        ({"growth": "chain", "width": 3, "children": 7}, ["width=3", "children=7"]),
        ({"growth": "dyspec", "width": 3, "children": 7}, ["width=3"]),
        ({"growth": "expansion", "expansion": [2, 2], "max_depth": 8}, ["max_depth=8"]),
        ({**SEQUOIA, "children": 9, "max_depth": 3}, ["children=9"]),
        ({"growth": "dyspec", "coupling": "on"}, ["coupling='on'"]),
        ({"growth": "dyspec", "calibration": True}, ["calibration='on'"]),
        ({"exactness": "distribution", "coupling": "on"}, ["coupling='on'"]),
        ({"growth": "dyspec", "rule": "match", "coupling": "on"}, []),
        ({"growth": "dyspec", "max_forwards": 3}, ["max_forwards=3"]),
        ({"max_depth": 9, "max_forwards": 3, "lookup": "off"}, ["max_depth=9"]),
        ({"max_depth": 9, "max_forwards": 3}, []),
        ({"max_depth": 3, "width": 3, "children": 7, "coupling": "on", "calibration": "on"}, []),
    ],
)
def test_what_was_asked_for_and_has_no_effect_is_named_and_not_shown(
    given_options: dict[str, object], without: list[str]
) -> None:
    chosen = DynTreeOptions.parse(given_options)
    plan = chosen.resolve(16)
    found = list(chosen.without_effect(plan))
    assert [reason.partition(" has no effect with ")[0] for reason in found] == [
        f"dyntree.{name}" for name in without
    ]
    shown = plan.in_force()
    named = {"max_depth", "max_forwards", "width", "children", "coupling", "calibration"}
    for name in named & given_options.keys():
        of_no_effect = any(option.startswith(f"{name}=") for option in without)
        wanted = True if given_options[name] == "on" else given_options[name]
        assert (shown.get(name) == wanted) is not of_no_effect, name


@pytest.mark.parametrize(
    ("given_options", "depth", "forwards"),
    [
        ({}, 32, 16),
        ({"budget": "fixed"}, 32, 12),
        ({"budget": "fixed", "exactness": "distribution"}, 32, 12),
        # What is drawn stays good deeper than coupled candidates do.
        ({"budget": "fixed", "exactness": "distribution", "node_budget": 32}, 32, 16),
        ({"max_depth": 6}, 6, 6),
        ({"max_forwards": 3}, 32, 3),
        ({"lookup": "off"}, 16, 16),
        ({"lookup": "off", "budget": "fixed"}, 12, 12),
        ({"lookup": "off", "max_forwards": 3}, 3, 3),
        ({"node_budget": 5}, 5, 5),
    ],
)
def test_look_up_reaches_deeper_than_the_draft(
    given_options: dict[str, object], depth: int, forwards: int
) -> None:
    plan = DynTreeOptions.parse(given_options).resolve(64)
    assert (plan.shape.max_depth, plan.shape.forwards) == (depth, forwards)
    assert len(plan.growing.widths) == forwards - 1
    assert plan.shape.grafts == (0 if "lookup" in given_options else plan.shape.node_budget)


def test_without_a_draft_model_look_up_makes_every_candidate() -> None:
    plan = DynTreeOptions.parse({}).resolve(16, draft=False)
    assert (plan.has_draft, plan.shape.forwards, plan.growing.widths) == (False, 0, ())
    assert (plan.shape.grafts, plan.shape.max_depth, plan.scratch_slots) == (16, 16, 0)
    shown = plan.in_force()
    assert shown["lookup"]
    assert not {"max_forwards", "width", "children"} & shown.keys()
    assert DynTreeOptions.parse({}).resolve(16).has_draft


def test_no_options_are_found_where_none_are_given() -> None:
    assert DynTreeOptions.of({"other": {}}) is None
    assert DynTreeOptions.of(None) is None
    assert DynTreeOptions.of({"dyntree": {}}) == DynTreeOptions()


@pytest.mark.parametrize("key", ["dyn_tree", "DynTree", "dyntre", "dytnree"])
def test_a_key_that_is_almost_ours_is_refused_and_not_a_server_without_trees(key: str) -> None:
    for others in ({}, {"dyntree": {}}):
        with pytest.raises(ValueError, match=f"key '{key}' is not known: did you mean 'dyntree'"):
            DynTreeOptions.of({key: {"node_budget": 4}, **others})


def test_the_keys_of_other_plugins_are_theirs() -> None:
    assert DynTreeOptions.of({"radix_tree": {}, "dynatrace": {}, "tree": {}, 3: {}}) is None


def test_the_options_load_without_vllm_or_torch() -> None:
    code = (
        "import sys, dyntree_plugin.options.options, dyntree_plugin.plugin;"
        "import dyntree_plugin.admission.check;"
        "sys.exit(sorted({'vllm', 'torch'} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
