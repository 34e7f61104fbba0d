"""A decode step in few launches, on a GPU: what decoder.py says in plain torch, by kernels that do several things each.

Kinds of step, to be set as `Decoder.step`:
    "torch"     decoder.py's own, on any device; the oracle of the others
    "fused"     the kernels, with torch's products
    "streamed"  the kernels, with product_kernels.py's products for up to MOST_ROWS rows
Each layer's `step` is built from what stands here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends.launching import on_device
from . import step_kernels
from .parts import RMSNorm
from .product_kernels import MOST_ROWS, product
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
    """The same with products of our own. Of one row, all that stands around is done on the way; of more, norms and
    factors are kernels of their own."""

    def after_norm(self, x: Tensor, norm: RMSNorm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._normed(x, norm, weight, x.new_empty(x.shape[0], weight.shape[0]), bias=bias)

    def swiglu(self, x: Tensor, norm: RMSNorm, gate_up: Tensor) -> Tensor:
        return self._normed(x, norm, gate_up, x.new_empty(x.shape[0], gate_up.shape[0] // 2), paired=True)

    def onto(
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, factor: Tensor | None = None
    ) -> None:
        if factor is not None and y.shape[0] > 1:
            y, factor = y * factor, None
        product(y, weight, x, bias=bias, factor=factor, add=True)

    def logits(self, x: Tensor, norm: RMSNorm, head: Tensor) -> Tensor:
        return self._normed(x, norm, head, x.new_empty((x.shape[0], head.shape[0]), dtype=torch.float32))

    def _normed(
        self, x: Tensor, norm: RMSNorm, weight: Tensor, out: Tensor, bias: Tensor | None = None, paired: bool = False
    ) -> Tensor:
        if x.shape[0] == 1:
            return product(x, weight, out, bias=bias, norm=(norm.weight, norm.eps), paired=paired)
        return product(step_kernels.norm(x, norm.weight, norm.eps), weight, out, bias=bias, paired=paired)


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
        rows = tokens.shape[0]
        ours = kind == "streamed" and (rows == 1 or (rows <= MOST_ROWS and embedding.dtype != torch.float32))
        self.products = StreamedProducts() if ours else TorchProducts()
        self.state = state
        self.x, self.positions, self.rotation = step_kernels.begin(
            tokens, embedding, frequencies, rope_scale, state.seq_lens
        )


def launches_on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Within it, kernels are launched on the tensor's device."""
    return on_device(tensor)
