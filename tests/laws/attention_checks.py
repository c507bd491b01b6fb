"""Check on every device that tree attention is that of the oracles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from attention_inputs import AttentionCase, draft_masks, tree_mask
from tree_shapes import chain, random_tree, star

from dyntree_kernels.features import LayerFeatures
from dyntree_kernels.reference import path_attention

WINDOW = 40
BEYOND: dict[str, dict[str, Any]] = {
    "window": {"window": WINDOW},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": torch.tensor([0.0, 3.0, -2.0, 5.0])},
    "scales": {"key_scale": torch.tensor([0.7]), "value_scale": torch.tensor(1.6)},
}
BEYOND["all"] = {
    **BEYOND["window"],
    **BEYOND["soft cap"],
    **BEYOND["sinks"],
    "key_scale": torch.tensor([0.6, 1.3]),
    "value_scale": torch.tensor([1.9, 0.8]),
}
"""Features of layers with four query heads and two KV heads."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def assert_matches(
    case: AttentionCase, expected: torch.Tensor | None = None, **options: object
) -> None:
    """Compare with the oracle; ``expected`` is its result if the caller has it already."""
    tolerance = TOLERANCE[case.q.dtype]
    wanted = case.expected() if expected is None else expected
    torch.testing.assert_close(
        case.run(**options).double().cpu(), wanted, atol=tolerance, rtol=2 * tolerance,
        equal_nan=True,
    )  # fmt: skip


def rounds_as(stock: torch.Tensor, truncate: torch.Tensor, nearest: torch.Tensor) -> bool:
    """Whether engines round to bfloat16 as vLLM's kernel does here, which is the probe's answer."""
    from dyntree_plugin.engine.rounding import truncates_bfloat16

    same = [int((each == stock).sum()) for each in (nearest, truncate)]
    return same[truncates_bfloat16()] > same[not truncates_bfloat16()]


def on(device: torch.device, features: Mapping[str, Any]) -> dict[str, Any]:
    """Return features whose tensors are on ``device``."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in features.items()
    }


def tree_batch(*nodes: int) -> list[torch.Tensor]:
    return [tree_mask(random_tree(n, torch.Generator().manual_seed(n))) for n in nodes]


class AttentionChecks:
    """Tests of the ``kernel`` that runs the cases of ``make``.

    ``quantised`` are arguments of ``make`` with a quantised cache, whose NaN need not be kept.
    ``layouts`` are arguments of ``make``, and ``ways`` options of the kernel, that hot spots are
    tested with. ``few``: whether a run takes so long that there are fewer of them.
    """

    kernel: ClassVar[str]
    make: ClassVar[Callable[..., AttentionCase]]
    layouts: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    quantised: ClassVar[Sequence[Mapping[str, Any]]] = ()
    ways: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    contexts: ClassVar[Sequence[int]]
    few: ClassVar[bool] = False

    @pytest.mark.parametrize(
        ("nodes", "build"),
        [
            *((nodes, "random") for nodes in (1, 31, 32, 33, 64, 65)),
            *((33, "chain"), (65, "chain"), (32, "star"), (65, "star")),
        ],
    )
    def test_every_node_sees_the_context_and_its_root_path(self, nodes: int, build: str) -> None:
        g = torch.Generator().manual_seed(nodes)
        tree = {"random": lambda n: random_tree(n, g), "chain": chain, "star": star}[build](nodes)
        contexts = [*(self.contexts[nodes % 3 :: 3] if self.few else self.contexts)]
        masks = [tree_mask(tree)] * len(contexts)
        case = self.make(masks, contexts, kv_heads=1, head_size=32, seed=nodes)
        out = case.run().cpu().double()
        torch.testing.assert_close(out, case.expected(), atol=1e-5, rtol=1e-5)
        for r in range(0, len(contexts), 2):
            queries = case.q[case.rows(r)].cpu()
            replay = path_attention(queries, case.keys[r], case.values[r], tree, case.features)
            torch.testing.assert_close(out[case.rows(r)], replay, atol=1e-5, rtol=1e-5)

    def test_draft_rows_ignore_the_columns_nobody_sees(self) -> None:
        for layout in self.layouts:
            case = self.make(draft_masks(), [40, 0, 63], **layout)
            assert all(cache.isnan().any() for cache in case.caches)
            for way in self.ways:
                assert_matches(case, **way)

    @pytest.mark.parametrize(
        ("part", "value"),
        [("keys", torch.nan), ("values", torch.nan), ("values", torch.inf)],
    )
    def test_what_is_not_finite_reaches_the_rows_that_see_it_alone(
        self, part: str, value: float
    ) -> None:
        contexts = [50, 0]
        places = [(0, 50), (0, 67), (0, 89), (1, 0), (1, 4), (0, 13)]
        for layout in self.layouts:
            case = self.make(tree_batch(40, 9), contexts, **layout)
            for number, way in enumerate(self.ways):
                whole = case.run(**way)
                # Together the ways have every place.
                for request, position in places[number :: 2 if self.few else 1]:
                    out = case.broken(request, position, part, value).run(**way)
                    node = position - contexts[request]
                    sees = torch.zeros(len(whole), dtype=torch.bool)
                    sees[case.rows(request)] = case.masks[request][:, node] if node >= 0 else True
                    sees = sees.to(out.device)
                    assert torch.equal(out[~sees], whole[~sees])
                    assert not out[sees].isfinite().flatten(1).all(1).any()

    def test_rows_that_see_nothing_get_zeros(self) -> None:
        masks = [tree_mask(chain(5)), tree_mask(star(9)), tree_mask(chain(3))]
        for way in self.ways:
            case = self.make(masks, [0, 40, 0])
            whole, bits = case.run(**way), case.bits.clone()
            bits[:5] = 0
            bits[15] = 0
            out = dataclasses.replace(case, bits=bits).run(**way)
            assert (out[:5] == 0).all()
            assert (out[15] == 0).all()
            assert torch.equal(out[5:14], whole[5:14])

    def test_columns_beyond_the_block_table_are_not_looked_up(self) -> None:
        case = self.make(draft_masks(), [40, 0, 63])
        wide = torch.nn.functional.pad(case.bits, (0, 5))
        assert torch.equal(dataclasses.replace(case, bits=wide).run(), case.run())

    def test_positions_beyond_the_block_table_are_in_the_null_block(self) -> None:
        masks = [tree_mask(chain(40)), tree_mask(chain(9)), tree_mask(chain(9))]
        case = self.make(masks, [40, 70, 0], block_size=32)
        case.without_nan()
        narrow = case.block_table[:, :2].contiguous()
        padded = torch.nn.functional.pad(narrow, (0, 1))
        for way in self.ways:
            found, with_null = (
                dataclasses.replace(case, block_table=table).run(**way)
                for table in (narrow, padded)
            )
            assert torch.equal(found, with_null)
            assert not torch.equal(found, case.run(**way))

    def test_requests_without_a_tree_are_left_untouched(self) -> None:
        case = self.make([tree_mask(chain(n)) for n in (6, 3, 9)], [20, 30, 0])
        for way in self.ways:
            full = case.run(**way)
            out = torch.full_like(full, 7.0)
            case.ctx_lens[1] = -1
            case.attend(out, **way)
            case.ctx_lens[1] = 30
            assert (out[6:9] == 7.0).all()
            assert torch.equal(out[:6], full[:6])
            assert torch.equal(out[9:], full[9:])

    def test_one_wrong_ancestor_bit_is_noticed(self) -> None:
        nodes = 12 if self.few else 33
        case = self.make(tree_batch(nodes), [20], kv_heads=1, head_size=32)
        case.without_nan()
        expected = case.expected()
        for row in range(nodes):
            bits, column = case.bits.clone(), row * 7 % nodes
            bits[row, column // 32] ^= 1 << (column % 32)
            if not bits[row].any():
                continue
            wrong = dataclasses.replace(case, bits=bits).run().double().cpu()
            differs = ~torch.isclose(wrong, expected, atol=1e-5, rtol=1e-5).all(-1).all(-1)
            assert differs.nonzero().flatten().tolist() == [row]

    def test_equal_scores_give_the_mean_of_the_visible_values(self) -> None:
        case = self.make(tree_batch(40, 9), [70, 0])
        case.q.zero_()
        assert_matches(case)

    @pytest.mark.parametrize("large", [60.0, 3000.0])
    def test_large_scores_do_not_overflow(self, large: float) -> None:
        case = self.make([tree_mask(star(12))], [70])
        case.q *= large
        out = case.run().double().cpu()
        torch.testing.assert_close(out, case.expected(), atol=1e-3, rtol=1e-3)


class FeatureChecks(AttentionChecks):
    """Tests of a kernel that serves windows, soft caps and sinks besides."""

    def with_features(
        self, masks: list[torch.Tensor], contexts: list[int], name: str, **layout: Any
    ) -> AttentionCase:
        """Return a case of layers with `BEYOND`; blocks that no row sees are freed."""
        case = self.make(masks, contexts, **layout)
        case.features = dataclasses.replace(case.features, **on(case.q.device, BEYOND[name]))
        case.free(BEYOND[name].get("window", 1 << 20))
        return case

    @pytest.mark.parametrize("name", BEYOND)
    def test_windows_soft_caps_and_sinks(self, name: str) -> None:
        contexts = [0, 1, 30, WINDOW - 1, WINDOW, WINDOW + 1, 71, 72, 73, 95, 96, 97, 200]
        if self.few:
            contexts = contexts[::2]
        g = torch.Generator().manual_seed(7)
        trees = [chain(9), star(9), random_tree(35, g)]
        trees = [trees[number % 3] for number in range(len(contexts))]
        quantised = self.quantised if name == "all" else ()
        for layout in (*self.layouts, *quantised):
            case = self.with_features([tree_mask(tree) for tree in trees], contexts, name, **layout)
            few = self.few and (name != "all" or layout in quantised)
            for way in self.ways[: 1 if few else None]:
                assert_matches(case, **way)
        exact = self.with_features([tree_mask(tree) for tree in trees], contexts, name)
        out = exact.run().cpu().double()
        kept = dataclasses.replace(exact.features, **BEYOND[name])
        for r, tree in enumerate(trees):
            queries = exact.q[exact.rows(r)].cpu()
            replay = path_attention(queries, exact.keys[r], exact.values[r], tree, kept)
            torch.testing.assert_close(out[exact.rows(r)], replay, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize(
        "wrong",
        [
            *({"window": size} for size in (WINDOW - 1, WINDOW + 1, None)),
            {"soft_cap": None},
            {"soft_cap": 1.4},
            {"sinks": None},
            {"key_scale": None},
            {"value_scale": None},
            {"key_scale": BEYOND["all"]["value_scale"], "value_scale": BEYOND["all"]["key_scale"]},
        ],
        ids=str,
    )
    def test_a_wrong_feature_changes_every_row(self, wrong: dict[str, Any]) -> None:
        case = self.with_features(tree_batch(9, 4), [100, 60], "all")
        case.without_nan()
        right = case.run()
        case.features = dataclasses.replace(case.features, **on(case.q.device, wrong))
        differs = ~torch.isclose(case.run(), right, atol=1e-5, rtol=1e-5)
        assert differs.flatten(1).any(1).all()

    def test_the_edge_of_a_window_follows_the_depth_of_a_row(self) -> None:
        tree, context = [-1, 0, 0, 0, 1, 2, 3, 4, 4], 77
        depths = torch.tensor([0, 1, 1, 1, 2, 2, 2, 3, 3])
        case = self.with_features([tree_mask(tree)], [context], "window")
        for depth in range(5):
            edge = context - WINDOW + depth
            for way in self.ways:
                out = case.broken(0, edge, "values", torch.nan).run(**way).cpu()
                assert torch.equal(out.isnan().flatten(1).any(1), depths < depth)

    def test_the_edge_of_a_window_follows_the_place_of_a_row_that_sees_both_ways(self) -> None:
        """Control: as in a tree, whose rows all have as many bits, they differ."""
        block, contexts = torch.ones(9, 9, dtype=torch.bool), [77, 0, WINDOW - 4, 200]
        for layout in self.layouts:
            case = self.with_features([block] * 4, contexts, "window", **layout)
            case.without_nan()
            of_trees = case.run()
            case.features = dataclasses.replace(case.features, both_ways=True)
            for way in self.ways:
                assert_matches(case, **way)
            assert not torch.isclose(case.run()[:8], of_trees[:8]).flatten(1).all(1).any()
            for place in range(5):
                out = case.broken(0, 77 - WINDOW + place, "values", torch.nan).run().cpu()
                assert torch.equal(out[:9].isnan().flatten(1).any(1), torch.arange(9) < place)

    def test_a_row_that_sees_its_sink_alone_gets_zeros(self) -> None:
        for way in self.ways:
            case = self.with_features([tree_mask(chain(3))], [0], "all")
            case.bits[1] = 0
            out = case.run(**way)
            assert (out[1] == 0).all()
            assert out[0].abs().min() > 0

    def test_features_that_a_kernel_does_not_serve_are_refused(self) -> None:
        case = self.make([tree_mask(chain(3))], [5])
        case.features = LayerFeatures(1.0, window=16, chunk=16, alibi=torch.zeros(4))
        with pytest.raises(ValueError, match=f"'{self.kernel}' does not serve alibi, chunk"):
            case.run()
        with pytest.raises(ValueError, match="'reference' does not serve"):
            case.expected()
