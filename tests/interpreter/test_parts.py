"""The kernel that merges the parts of several ranks, in the interpreter: merge_states with sinks, in one launch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from helpers import Guarded, assert_parity

from splitkv.backends.triton_parts import merge_parts
from splitkv.reference import merge_states_reference

INF, NAN = math.inf, math.nan
LSES = (-INF, -300.0, -1.0, 0.0, 2.5, 80.0)


def expected(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """float64: a sink is one more part, whose out is 0, for vectors that see a key."""
    if sinks is not None:
        seen = lses.amax(0) > -INF
        logits = torch.where(seen, sinks.repeat(lses.shape[1] // len(sinks)), -INF)
        outs, lses = torch.cat((outs, torch.zeros_like(outs[:1]))), torch.cat((lses, logits[None]))
    return merge_states_reference(outs, lses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize(("parts", "v_head_dim"), [(1, 16), (2, 48), (3, 128), (5, 80)])
def test_equals_merge_states_in_float64(parts: int, v_head_dim: int, sunk: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(parts + v_head_dim)
    vectors = 12  # of six heads
    lses = torch.tensor(LSES)[torch.randint(len(LSES), (parts, vectors), generator=generator)]
    lses[:, 0] = -INF  # sees nothing anywhere
    outs = torch.randn(parts, vectors, v_head_dim, generator=generator).to(dtype)
    outs.masked_fill_((lses == -INF)[..., None], NAN)
    sinks = torch.tensor([0.0, -INF, 90.0, -400.0, 3.0, 1.0]) if sunk else None
    # As they lie in what was received: a rank's outs, then its lses, then padding.
    slots = torch.full((parts, vectors * v_head_dim + 3 * vectors), NAN).to(dtype)
    received = slots[:, : vectors * v_head_dim].view(parts, vectors, v_head_dim)
    received.copy_(outs)
    out, lse = Guarded((vectors, v_head_dim), dtype), Guarded((vectors,), torch.float32)
    merge_parts(outs=received, lses=lses, sinks=sinks, out=out.tensor, lse=lse.tensor)
    assert out.intact() and lse.intact()
    assert_parity((out.tensor, lse.tensor), expected(outs, lses, sinks))
    assert lse.tensor[0] == -INF and not out.tensor[0].any()
