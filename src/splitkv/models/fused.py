"""A decode step in few launches, on a GPU: what decoder.py says in plain torch, by kernels that do several things each.

Kinds of step, to be set as `Decoder.step`:
    "torch"     decoder.py's own, on any device; the oracle of the others
    "fused"     the kernels, with torch's products
    "streamed"  the kernels, with products of our own: cuda_product.py's for a few rows where that takes them, else
                product_kernels.py's for one row, else torch's
Each layer's `step` is built from what stands here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cuda_product, product_kernels, step_kernels
from .parts import RMSNorm
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
    """The same for a few rows, with products of our own, and all that stands around them done on the way."""

    def after_norm(self, x: Tensor, norm: RMSNorm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = _product(x, weight)
        if product is None:
            return super().after_norm(x, norm, weight, bias)
        return product(x, weight, x.new_empty(x.shape[0], weight.shape[0]), bias=bias, norm=(norm.weight, norm.eps))

    def swiglu(self, x: Tensor, norm: RMSNorm, gate_up: Tensor) -> Tensor:
        product = _product(x, gate_up, paired=True)
        if product is None:
            return super().swiglu(x, norm, gate_up)
        out = x.new_empty(x.shape[0], gate_up.shape[0] // 2)
        return product(x, gate_up, out, norm=(norm.weight, norm.eps), paired=True)

    def onto(
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, factor: Tensor | None = None
    ) -> None:
        product = _product(y, weight)
        if product is None:
            super().onto(x, y, weight, bias, factor)
        else:
            product(y, weight, x, bias=bias, factor=factor, add=True)

    def logits(self, x: Tensor, norm: RMSNorm, head: Tensor) -> Tensor:
        product = _product(x, head)
        if product is None:
            return super().logits(x, norm, head)
        out = x.new_empty((x.shape[0], head.shape[0]), dtype=torch.float32)
        return product(x, head, out, norm=(norm.weight, norm.eps))


def _product(x: Tensor, weight: Tensor, paired: bool = False) -> Callable[..., Tensor] | None:
    """Our own product for x [rows, columns] and a weight; None: torch's."""
    if cuda_product.takes(x, weight, paired):
        return cuda_product.product
    return product_kernels.product if x.shape[0] == 1 else None


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
        self.products = StreamedProducts() if kind == "streamed" else TorchProducts()
        self.state = state
        self.x, self.positions, self.rotation = step_kernels.begin(
            tokens, embedding, frequencies, rope_scale, state.seq_lens
        )
