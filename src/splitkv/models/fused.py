"""A decode step in few launches, on a GPU: what decoder.py says in plain torch, by kernels that do several things each.

Kinds of step, to be set as `Decoder.step`:
    "torch"     decoder.py's own, on any device; the oracle of the others
    "fused"     the kernels, with torch's products
    "streamed"  the kernels, with product_kernels.py's products where there is one row
Each layer's `step` is built from what stands here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import step_kernels
from .parts import RMSNorm
from .product_kernels import product
from .state import DecodeState

STEPS = ("torch", "fused", "streamed")


class TorchProducts:
    """What stands around a product in a decoder, with torch's products."""

    def after_norm(self, x: Tensor, norm: RMSNorm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """norm(x) @ weight.T + bias."""
        return F.linear(step_kernels.norm(x, norm.weight, norm.eps), weight, bias)

    def swiglu(self, x: Tensor, norm: RMSNorm, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of norm(x) @ gate_up.T."""
        return step_kernels.swiglu(self.after_norm(x, norm, gate_up))

    def onto(
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, factor: Tensor | None = None
    ) -> None:
        """x += (y * factor) @ weight.T + bias."""
        x.addmm_(y if factor is None else y * factor, weight.T)
        if bias is not None:
            x += bias

    def logits(self, x: Tensor, norm: RMSNorm, head: Tensor) -> Tensor:
        """The same as after_norm, in f32."""
        return self.after_norm(x, norm, head).float()


class StreamedProducts(TorchProducts):
    """The same for one row, with products of our own, and all that stands around them done on the way."""

    def after_norm(self, x: Tensor, norm: RMSNorm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = x.new_empty(1, weight.shape[0])
        return product(x, weight, out, bias=bias, norm=(norm.weight, norm.eps))

    def swiglu(self, x: Tensor, norm: RMSNorm, gate_up: Tensor) -> Tensor:
        out = x.new_empty(1, gate_up.shape[0] // 2)
        return product(x, gate_up, out, norm=(norm.weight, norm.eps), paired=True)

    def onto(
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, factor: Tensor | None = None
    ) -> None:
        product(y, weight, x, bias=bias, factor=factor, add=True)

    def logits(self, x: Tensor, norm: RMSNorm, head: Tensor) -> Tensor:
        out = x.new_empty((1, head.shape[0]), dtype=torch.float32)
        return product(x, head, out, norm=(norm.weight, norm.eps))


class FusedStep:
    """One step of a batch on its way through the layers, which add to `x` in place.

    x: [batch, hidden], the residual stream. positions: [batch] int32, of the tokens. rotation: cos, sin of them, each
    [batch, 1, pairs] f32. state: lengths moved on already, caches not yet.
    """

    def __init__(
        self, kind: str, tokens: Tensor, embedding: Tensor, frequencies: Tensor, rope_scale: float, state: DecodeState
    ) -> None:
        if kind not in STEPS[1:]:
            raise ValueError(f"step: expected one of {', '.join(STEPS)}, got {kind!r}")
        # Measured on an H200 with 4 rows: torch's products are quicker by a quarter.
        self.products = StreamedProducts() if kind == "streamed" and tokens.shape[0] == 1 else TorchProducts()
        self.state = state
        self.x, self.positions, self.rotation = step_kernels.begin(
            tokens, embedding, frequencies, rope_scale, state.seq_lens
        )
