"""The draft's forwards read the same rows as plain torch computes, and vLLM's own cache slots.

It runs on a GPU or in Triton's interpreter. Batches hold requests with little room left, and
padding. Groups of the KV cache have different block sizes, and one has no slots.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from paged_cases import DEVICE

pytest.importorskip("vllm.v1.worker.gpu", exc_type=ImportError)
from vllm.v1.worker.gpu import block_table, buffer_utils

from dyntree_kernels.ancestors import pack_bits
from dyntree_kernels.contracts import RequestParams
from dyntree_kernels.cuda.draft_rows import ChainRows, Seen, SlotTables, begin, chain

STATES, LONGEST, PAD = 9, 63, -1
SIZES = [16, 4, 8]  # block size of each group
MAPPED = [True, True, False]
GROUPS = len(SIZES)
CHAIN = ("padding", "room", "count", "ancestors", "columns", "last", "shift")
BEGIN = ("padding", "class", "room", "chained", "levels", "columns", "shift")
SHIFTS = (0, -1)


class Tables:
    """Block tables of every request, by default random ones."""

    def __init__(self, g: torch.Generator, own: list[torch.Tensor] | None = None) -> None:
        wide = [-(-(LONGEST + 1) // size) + 3 for size in SIZES]
        self.own = own or [
            torch.randint(1, 500, (STATES, blocks), generator=g, dtype=torch.int32).to(DEVICE)
            for blocks in wide
        ]
        of_groups: dict[str, Any] = {
            "addresses": ([each.data_ptr() for each in self.own], torch.uint64),
            "strides": ([each.stride(0) for each in self.own], torch.int64),
            "sizes": (SIZES, torch.int32),
            "mapped": (MAPPED, torch.bool),
        }
        self.arrays = SlotTables(
            *(torch.tensor(x, dtype=dtype, device=DEVICE) for x, dtype in of_groups.values())
        )

    def slots(self, index: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots [groups, R, W] that vLLM's kernel computes for ``positions`` [R, W]."""
        requests, width = positions.shape
        out = torch.zeros(GROUPS, requests * width + 2, dtype=torch.int64, device=DEVICE)
        starts = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE) * width
        vllms_slot_mappings()[(GROUPS, requests + 1)](
            out.shape[1], index.contiguous().to(DEVICE), starts,
            positions.flatten().contiguous().to(DEVICE), *self.arrays[:3], self.arrays.mapped,
            torch.ones(GROUPS, dtype=torch.bool, device=DEVICE), out, out.stride(0), 0, CP_SIZE=1,
            CP_INTERLEAVE=1, PAD_ID=PAD, TRITON_BLOCK_SIZE=1024,
        )  # fmt: skip
        return out[:, : requests * width].view(GROUPS, requests, width).cpu()


def vllms_slot_mappings() -> Any:
    """Return vLLM's kernel. If vLLM found no GPU, it did not compile it, so compile it here."""
    kernel: Any = block_table._compute_slot_mappings_kernel
    if not hasattr(kernel, "__getitem__"):
        kernel.__annotations__.update(
            dict.fromkeys(("CP_SIZE", "CP_INTERLEAVE", "PAD_ID", "TRITON_BLOCK_SIZE"), tl.constexpr)
        )
        kernel = triton.jit(kernel)
    return kernel


@pytest.fixture(autouse=True)
def language() -> Any:
    with mock.patch.object(block_table, "tl", tl), mock.patch.object(buffer_utils, "tl", tl):
        yield


def requests_of(number: int, g: torch.Generator) -> torch.Tensor:
    """Return requests as the engine packs them. If there are several, the last one is padding."""
    packed = torch.randint(1, 1000, (number, 9), generator=g)
    packed[:, 0] = torch.randperm(STATES, generator=g)[:number]
    packed[:, 5] = torch.rand(number, generator=g).view(torch.int32)
    packed[:, 7] = torch.randint(6, (number,), generator=g)
    if number > 1:
        packed[-1] = -1
    return packed


def roots_of(number: int, g: torch.Generator) -> torch.Tensor:
    roots = torch.randint(LONGEST - 12, (number,), generator=g)
    roots[0] = LONGEST - 1
    return roots


def differing(ours: tuple[torch.Tensor, ...], expected: tuple[Any, ...]) -> bool:
    return not all(torch.equal(a.cpu(), b) for a, b in zip(ours, expected, strict=True))


def chain_of(number: int, width: int, seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1000, (number, width + 1), generator=g)[:, :width]
    counts = torch.randint(0, width + 4, (number,), generator=g, dtype=torch.int32)
    counts[number // 2] = 1
    return Tables(g), requests_of(number, g), roots_of(number, g), tokens, counts


def chained_by_kernel(case: Any, shift: int = 0) -> tuple[torch.Tensor, ...]:
    tables, packed, roots, tokens, counts = case
    (number, width), words = tokens.shape, -(-tokens.shape[1] // 32)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, -7, dtype=dtype, device=DEVICE)

    rows = number * width
    out = ChainRows(
        empty(rows, dtype=torch.int32), empty(rows), empty(rows, words, dtype=torch.int32),
        empty(GROUPS, rows + 3)[:, :rows], empty(number), empty(number),
    )  # fmt: skip
    seen = Seen(empty(number, dtype=torch.int32), empty(number, dtype=torch.int32))
    given = (each.to(DEVICE) for each in (packed, roots, tokens, counts))
    chain(*given, tables.arrays, out, seen, LONGEST, shift)
    return (*out, *seen)


def chained_by_tensors(case: Any, shift: int = 0, without: str = "") -> tuple[Any, ...]:
    """Compute the same on tensors; ``without`` names a mechanism to leave out."""
    shift = 0 if without == "shift" else shift
    tables, packed, roots, tokens, counts = case
    number, width = tokens.shape
    index = packed[:, 0].clamp(min=0) if without == "padding" else packed[:, 0]
    step = torch.arange(width)
    behind = roots[:, None] + 1 + step
    positions = behind.clamp(max=LONGEST) + shift
    real = torch.ones_like(behind).bool()
    if without != "count":
        real &= step < counts[:, None]
    if without != "room":
        real &= behind <= LONGEST
    slots = tables.slots(index, positions).masked_fill(~real, PAD)
    mask = torch.ones(width, width).bool()
    bits = pack_bits(mask if without == "ancestors" else mask.tril()).repeat(number, 1)
    last = (counts.long() - 1).clamp(min=0, max=None if without == "last" else width - 1)
    columns = 0 if without == "columns" else width
    return (
        tokens.flatten().int(), positions.flatten(), bits, slots.flatten(1),
        torch.arange(number) * width + last, (roots + 1 + last).clamp(max=LONGEST),
        torch.where(index < 0, -1, roots + 1 + shift).int(),
        (roots + 1 + shift + columns).clamp(max=LONGEST + 1).int(),
    )  # fmt: skip


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize(("number", "width"), [(1, 1), (4, 1), (7, 9), (3, 33), (2, 65)])
def test_rows_run_on_what_the_requests_got(number: int, width: int, shift: int) -> None:
    case = chain_of(number, width, seed=1)
    assert not differing(chained_by_kernel(case, shift), chained_by_tensors(case, shift))


@pytest.mark.parametrize("mechanism", CHAIN)
def test_rows_that_lack_a_mechanism_are_seen(mechanism: str) -> None:
    case = chain_of(7, 9, 0)
    assert differing(chained_by_kernel(case, -1), chained_by_tensors(case, -1, mechanism))


def begun_by_kernel(case: Any, columns: int, shift: int) -> tuple[torch.Tensor, ...]:
    tables, packed, roots, chained = case
    number = len(roots)
    growth = RequestParams.room(number, torch.device(DEVICE))
    slots = torch.zeros(GROUPS, number * columns + 5, dtype=torch.int64, device=DEVICE)
    seen = Seen(*torch.zeros(2, number, dtype=torch.int32, device=DEVICE))
    given = (each.to(DEVICE) for each in (packed, roots, chained))
    begin(*given, tables.arrays, growth, slots, seen, columns, LONGEST, shift)
    return (*growth, slots[:, : number * columns], *seen)


def begun_by_tensors(case: Any, columns: int, shift: int, without: str = "") -> tuple[Any, ...]:
    tables, packed, roots, chained = case
    shift = 0 if without == "shift" else shift
    index = packed[:, 0]
    spare = 0 if without == "padding" else STATES
    stored_at = torch.where(index < 0, spare, index)
    behind = roots[:, None] + 1 + torch.arange(columns)
    positions = (behind if without == "room" else behind.clamp(max=LONGEST)) + shift
    end = roots + 1 + shift + (0 if without == "columns" else columns)
    return (
        roots,
        packed[:, 5].clamp(min=0).int().view(torch.float32),
        packed[:, 7] if without == "class" else packed[:, 7].clamp(min=0),
        packed[:, 6],
        torch.zeros(len(roots)).bool() if without == "chained" else chained[stored_at],
        (packed[:, 8] - roots - 2).clamp(min=0 if without == "levels" else 1),
        stored_at,
        tables.slots(index, positions).flatten(1),
        torch.where(index < 0, -1, roots + 1 + shift).int(),
        end.clamp(max=LONGEST + 1).int(),
    )


def beginning(number: int, seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)
    chained = torch.rand(STATES + 1, generator=g) < 0.4
    chained[0], chained[-1] = False, True
    return Tables(g), requests_of(number, g), roots_of(number, g), chained


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize(("number", "columns"), [(1, 1), (1, 0), (7, 12), (5, 130)])
def test_growth_begins_with_what_the_requests_are(number: int, columns: int, shift: int) -> None:
    case = beginning(number, seed=1)
    found = begun_by_kernel(case, columns, shift)
    assert not differing(found, begun_by_tensors(case, columns, shift))


@pytest.mark.parametrize("mechanism", BEGIN)
def test_a_beginning_that_lacks_a_mechanism_is_seen(mechanism: str) -> None:
    case = beginning(7, 0)
    assert differing(begun_by_kernel(case, 12, -1), begun_by_tensors(case, 12, -1, mechanism))


@pytest.mark.parametrize("of", ["chain", "begin"])
def test_positions_beyond_a_block_table_get_the_null_slot(of: str) -> None:
    room, width = 32, 12
    case = chain_of(7, width, 0) if of == "chain" else beginning(7, 0)
    own = [
        each[:, : room // size].contiguous() for each, size in zip(case[0].own, SIZES, strict=True)
    ]
    narrow = Tables(torch.Generator(), own), *case[1:]
    positions = (case[2][:, None] + 1 + torch.arange(width)).clamp(max=LONGEST).flatten()
    if of == "chain":
        found, within = chained_by_kernel(narrow)[3], chained_by_tensors(case)[3]
    else:
        found, within = begun_by_kernel(narrow, width, 0)[7], begun_by_tensors(case, width, 0)[7]
    expected = within.masked_fill(positions >= room, PAD)
    assert not torch.equal(expected, within)
    assert torch.equal(found.cpu(), expected)


def test_arrays_that_are_not_dense_are_refused() -> None:
    tables, packed, roots, tokens, counts = chain_of(3, 4, 0)
    with pytest.raises(ValueError, match="dense"):
        chained_by_kernel((tables, packed, roots, tokens.to(DEVICE).t().contiguous().t(), counts))
    thin = roots.to(DEVICE).repeat_interleave(2)[::2]
    with pytest.raises(ValueError, match="dense"):
        chained_by_kernel((tables, packed, thin, tokens, counts))
