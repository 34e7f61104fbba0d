"""What must not depend on the neighbours, the schedule, the scratch or the moment: cases 07, 13, 20, 28, 32.

A CUDA graph replays launches with the arguments of the capture. The same is done here without a GPU: the arguments of a
call's launch are kept, the tensors change in place, and the kernels are launched with the kept arguments again.
tests/gpu has the real graphs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import helpers
import pytest
import torch
from helpers import Guarded, assert_same, int32, make_inputs, page_order, to_pages
from interpreting import INTERPRETED
from planting import replace_launcher
from torch import Tensor

import splitkv
from splitkv import DecodeAttention, DecodeProblem, DeviceSpec, SplitPolicy, decode_attention

Decode = Any  # conftest.Decode
Row = tuple[Tensor, Tensor]

# ---- case 07: the neighbours -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["auto", "4"])
@pytest.mark.parametrize("name", ["f32", "f16"])
def test_case_07_neighbours_change_no_bit(decode: Decode, name: str, policy: str) -> None:
    """Alone, then in batches of every kind: others' lengths, its place, empty rows, its pages, the table's width."""
    dtype = {"f32": torch.float32, "f16": torch.float16}[name]
    length, page_size, dim = (150, 64, 16) if decode.interpreted else (3011, 64, 64)
    capacity = -(-length // page_size) * page_size
    q, k, v = make_inputs(1, 2, 1, dim, capacity, dtype=dtype)
    table, num_pages = page_order(1, capacity, page_size)
    k, v = (to_pages(cache, table, num_pages, page_size, fill=1.0) for cache in (k, v))

    def row_in(lens: list[int], place: int, table: Tensor = table, pools: tuple[Tensor, Tensor] = (k, v)) -> Row:
        """The row at `place` among rows of these lengths, which have queries of their own and share its pages."""
        batch = len(lens)
        queries = torch.randn(batch, *q.shape[1:], generator=torch.Generator().manual_seed(batch)).to(dtype)
        queries[place] = q[0]
        lens = [*lens[:place], length, *lens[place + 1 :]]
        tables = table.expand(batch, -1).contiguous()
        got = decode(queries, *pools, int32(lens), block_table=tables, policy=policy, return_lse=True)
        return got[0][place], got[1][place]

    alone = row_in([0], 0)
    others = [0, 1, 30, length, capacity]
    for batch in (2, 5) if decode.interpreted else (2, 3, 8, 32, 96):
        lens = [others[i % 5] for i in range(batch)]
        assert_same(row_in(lens, batch // 2), alone, batch)
    assert_same(row_in([40, 0], 1), row_in([140, 0], 1), "a neighbour of 100 tokens more")
    assert_same(row_in([0, 30], 0), alone, "the first place")
    moved = torch.arange(num_pages).roll(-1)[table.long()].to(torch.int32)
    pools = (k.roll(1, 0), v.roll(1, 0))
    wide = torch.cat([moved, torch.full((1, 1000), -1, dtype=torch.int32)], 1)
    assert_same(row_in([0], 0, moved, pools), alone, "other pages")
    assert_same(row_in([0, 0], 1, wide, pools), alone, "a table of 1,000 more columns")


# ---- cases 13, 20, 28: what was captured -------------------------------------------------------------------


class Captures:
    """Keeps the arguments of launches, and launches them again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: list[tuple[Callable[..., None], dict[str, Any]]] = []
        right = helpers.launcher

        def keeping(name: str) -> Callable[..., None]:
            def launch(**arguments: Any) -> None:
                self.kept.append((right(name), arguments))
                right(name)(**arguments)

            return launch

        replace_launcher(keeping, monkeypatch)

    def graph(self, call: Callable[[], Any]) -> Callable[[], None]:
        del self.kept[:]
        call()
        ((launch, arguments),) = self.kept
        return lambda: launch(**arguments)


def test_case_13_captures_keep_their_scratch(decode_here: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches captured first, then large ones, then a call that needs far more: nobody's scratch moves."""
    captures = Captures(monkeypatch)
    q, k, v = make_inputs(4, 2, 1, 16, 96)
    lens = int32([96, 40, 0, 77])
    graphs = []
    for batch in (1, 2, 4):
        problem = DecodeProblem(batch, 2, 1, 16, capacity=96, q_dtype="f32", kv_dtype="f32")
        attention = DecodeAttention(problem, SplitPolicy.pinned(4), device="cpu")
        out = torch.empty_like(q[:batch])

        def call(b: int = batch, o: Tensor = out, a: DecodeAttention = attention) -> None:
            a.run(q[:b], k[:b], v[:b], lens[:b], out=o, backend=decode_here.backend)

        replay = captures.graph(call)
        ((_, arguments),) = captures.kept
        graphs.append((attention, arguments["workspace"], out, replay))
    big = DecodeProblem(40, 2, 1, 16, capacity=96, q_dtype="f32", kv_dtype="f32")
    DecodeAttention(big, SplitPolicy.pinned(16), device="cpu").workspace.fill_(0xFF)
    ranges = []
    for attention, workspace, out, replay in [*graphs, *reversed(graphs)]:
        assert attention.workspace.data_ptr() == workspace.data_ptr(), "the captured launch has another's scratch"
        ranges.append((workspace.data_ptr(), workspace.data_ptr() + workspace.numel()))
        out.fill_(math.nan)
        replay()
        batch = out.shape[0]
        want = decode_here(q[:batch], k[:batch], v[:batch], lens[:batch], policy=SplitPolicy.pinned(4))
        assert torch.equal(out, want), batch
    ranges = sorted(set(ranges))
    assert len(ranges) == 3 and all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))


def test_case_28_replays_see_the_lengths_of_now(decode_here: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """One captured launch over rows that come, go, grow and shrink, tables that narrow, and stale columns of NaN."""
    replays, capacity = (4, 96) if decode_here.interpreted else (60, 4096)
    captures = Captures(monkeypatch)
    q, k, v = make_inputs(4, 2, 1, 16, capacity)
    full, num_pages = page_order(4, capacity, 16)
    k, v = (to_pages(cache, full, num_pages, 16) for cache in (k, v))
    nan_page = min(set(range(num_pages)) - set(full.flatten().tolist()))
    lens, table, out = int32([0] * 4), full.clone(), torch.empty_like(q)
    replay = captures.graph(
        lambda: decode_attention(q, k, v, lens, block_table=table, out=out, backend=decode_here.backend)
    )
    generator = torch.Generator().manual_seed(0)
    for step in range(replays):
        active = int(torch.randint(1, 5, (), generator=generator))
        new = torch.randint(0, 1 + min(capacity, 32 << (step % 9)), (4,), generator=generator, dtype=torch.int32)
        new[active:] = 0
        lens.copy_(new)
        table.copy_(full)
        for row, length in enumerate(new.tolist()):
            table[row, -(-length // 16) :] = nan_page
        out.fill_(math.nan)
        replay()
        assert torch.equal(out, decode_here(q, k, v, new.clone(), block_table=table.clone())), step


@pytest.mark.parametrize("order", ["empty first", "empty last"])
def test_case_20_captured_empty_replayed_full(
    decode_here: Decode, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:  # fmt: skip
    captures = Captures(monkeypatch)
    q, k, v = make_inputs(3, 2, 1, 16, 96)
    lens, out = int32([0, 0, 0]), torch.empty_like(q)
    steps = [int32([0, 0, 0]), int32([96, 0, 7])]
    first, last = steps if order == "empty first" else reversed(steps)
    lens.copy_(first)
    replay = captures.graph(lambda: decode_attention(q, k, v, lens, out=out, policy="4", backend=decode_here.backend))
    lens.copy_(last)
    out.fill_(math.nan)
    replay()
    assert torch.equal(out, decode_here(q, k, v, last, policy="4"))
    assert not out[last == 0].any()


# ---- case 32: exactly the workspace ------------------------------------------------------------------------

GEOMETRIES = [(64, 4, 256, 256), (24, 4, 256, 256), (16, 1, 576, 512), (1, 1, 64, 64), (3, 1, 128, 128)]
SMALL = [(6, 2, 32, 16), (1, 1, 16, 16), (3, 1, 16, 32)]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("geometry", SMALL if INTERPRETED else [*GEOMETRIES, *SMALL], ids=str)
def test_case_32_exactly_the_workspace(decode_here: Decode, geometry: tuple[int, ...], batch: int) -> None:
    """Every policy with its own count of bytes between guard bands, and one byte less refused."""
    heads, kv_heads, dim, v_dim = geometry
    capacity = 64 if decode_here.interpreted else 2048
    q, k, v = make_inputs(batch, heads, kv_heads, dim, capacity, v_head_dim=v_dim)
    lens = int32([capacity, 0, capacity // 2 + 1][:batch])
    problem = DecodeProblem(batch, heads, kv_heads, dim, v_dim, capacity=capacity, q_dtype="f32", kv_dtype="f32")
    policies = ("4", "length(256,8)") if decode_here.interpreted else ("auto", "waves", "legacy", "16", "length(256,8)")
    for policy in policies:
        needed = splitkv.workspace_bytes(problem, DeviceSpec.cpu(), policy)
        if not needed:
            continue
        scratch = Guarded((needed,), torch.uint8)
        got = decode_here(q, k, v, lens, policy=policy, return_lse=True, workspace=scratch.tensor)
        assert scratch.intact(), f"{policy}: written beside the workspace"
        ample = torch.full((2 * needed,), 0xFF, dtype=torch.uint8)
        assert_same(decode_here(q, k, v, lens, policy=policy, return_lse=True, workspace=ample), got, policy)
        with pytest.raises(ValueError, match=rf"workspace: expected at least {needed} bytes, got {needed - 1}"):
            decode_here(q, k, v, lens, policy=policy, workspace=scratch.tensor[:-1])


@pytest.mark.parametrize("geometry", [*GEOMETRIES, (128, 1, 576, 512)], ids=str)
def test_case_32_the_workspace_follows_batch_and_capacity_alone(geometry: tuple[int, ...]) -> None:
    """Monotone in the batch at 262,144; the plan has no argument from which lengths could reach it."""
    (heads, kv_heads, dim, v_dim), device = geometry, DeviceSpec.named("h200")
    for policy in ("auto", "waves", "length", "16"):
        sizes = [
            splitkv.workspace_bytes(DecodeProblem(batch, heads, kv_heads, dim, v_dim), device, policy)
            for batch in (1, 2, 7, 64, 256)
        ]
        assert sizes == sorted(sizes) and sizes[-1] > 0, policy
