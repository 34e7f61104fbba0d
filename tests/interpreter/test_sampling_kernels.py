"""The GPU's argmax in the interpreter, against torch's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from splitkv.models.sampling_kernels import BLOCK, argmax


@pytest.mark.parametrize("size", [1, 7, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_the_first_of_the_largest(size: int) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size))
    logits[1] = logits[1].round()  # many are equal
    logits[2] = float("-inf")
    logits[3, size // 2] = torch.nan
    assert torch.equal(argmax(logits), logits.argmax(-1))
    assert torch.equal(argmax(logits[:, : size // 2 + 1]), logits[:, : size // 2 + 1].argmax(-1))
