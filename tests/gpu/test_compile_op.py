"""torch.library and torch.compile on the GPU."""

from __future__ import annotations

import torch
from helpers import int32, make_inputs

import splitkv


def test_opcheck() -> None:
    q, k, v = make_inputs(2, 8, 2, 64, 512, dtype=torch.bfloat16, device="cuda")
    absent = [None] * 7
    arguments = (q, k, v, int32([512, 7], "cuda"), 0, None, None, None, None, *absent, "auto", "auto")
    torch.library.opcheck(torch.ops.splitkv.decode_attention.default, arguments)


def test_opcheck_with_every_option() -> None:
    q, pages, _ = make_inputs(2, 8, 2, 64, 512, q_len=3, dtype=torch.bfloat16, device="cuda")
    k, v = pages.view(64, 16, 2, 64), pages.flip(1).view(64, 16, 2, 64)
    table = torch.randperm(64, device="cuda").view(2, 32).to(torch.int32)
    sinks, starts = torch.ones(8, device="cuda"), int32([3, 0], "cuda")
    mask = torch.rand(512, device="cuda") > 0.5
    scales = torch.ones(2, device="cuda"), None, None, 0.5
    arguments = (q, k, v, None, 500, table, 0.1, 100, 20.0, sinks, starts, mask, *scales, "pinned(5)", "triton")
    torch.library.opcheck(torch.ops.splitkv.decode_attention.default, arguments)


def test_compiled_whole_equals_eager() -> None:
    q, k, v = make_inputs(2, 8, 2, 64, 512, dtype=torch.bfloat16, device="cuda")

    def step(q: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        return splitkv.decode_attention(q * 2, k, v, lens) + 1  # type: ignore[operator]

    compiled = torch.compile(step, fullgraph=True)
    for lens in ([1, 512], [100, 0], [7, 300]):
        assert torch.equal(compiled(q, int32(lens, "cuda")), step(q, int32(lens, "cuda")))
