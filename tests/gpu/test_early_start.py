"""The split kernel begins before the kernel in front has ended: what that kernel writes at its last moment counts."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from helpers import int32, make_inputs, page_order, to_pages

from splitkv import DecodeProblem, DeviceSpec, decode_attention, workspace_bytes

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="kernels overlap from Hopper on"
)

LATE_NS = tl.constexpr(1_000_000)  # longer than a slow host takes to launch the call behind it


@triton.jit
def write_late(target, source, elements, BLOCK: tl.constexpr):
    """Lets the next kernel begin, and copies long after that."""
    tl.extra.cuda.gdc_launch_dependents()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < LATE_NS:
        now = tl.extra.cuda.globaltimer()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, at < elements), at < elements)


def late(target: torch.Tensor, source: torch.Tensor) -> None:
    block = 8192 if target.numel() > 8192 else 256
    write_late[(triton.cdiv(target.numel(), block),)](target, source, target.numel(), BLOCK=block)


@pytest.mark.parametrize("batch", [1, 4, 33])
@pytest.mark.parametrize("written", ["seq_lens", "starts", "k_cache", "block_table"])
def test_what_is_written_late_counts(batch: int, written: str) -> None:
    q, k, v = make_inputs(batch, 8, 2, 128, 2048, dtype=torch.bfloat16, device="cuda")
    lens = int32([2048 - 31 * row for row in range(batch)], "cuda")
    starts = int32([7 * row for row in range(batch)], "cuda")
    arguments = dict(q=q, k_cache=k, v_cache=v, seq_lens=lens, starts=starts)
    other = dict(
        seq_lens=int32([65 + 3 * row for row in range(batch)], "cuda"),
        starts=int32([900 - row for row in range(batch)], "cuda"),
        k_cache=torch.full_like(k, 3.0),
    )
    if written == "block_table":
        table, pages = page_order(batch, 2048, 16)
        pools = (to_pages(cache, table, pages, 16).cuda() for cache in (k, v))
        arguments |= dict(zip(("k_cache", "v_cache", "block_table"), (*pools, table.cuda()), strict=True))
        other["block_table"] = table.flip(1).contiguous().cuda()
    target = arguments[written]
    before, after = other[written], target.clone()
    expected = decode_attention(**arguments)
    scratch = workspace_bytes(DecodeProblem(batch, 8, 2, 128, capacity=2048), DeviceSpec.current())
    arguments["workspace"] = torch.empty(scratch // 4, device="cuda")
    target.copy_(before)
    decode_attention(**arguments)  # compiled, loaded and known
    for _ in range(3):
        target.copy_(before)
        arguments["workspace"].fill_(torch.nan)  # or parts of the last call would do
        late(target, after)
        assert torch.equal(decode_attention(**arguments), expected)
