"""What the layers share: weights that know which checkpoint tensor fills them, and the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends.cpu_product import product as cpu_product
from ..cache.allocation import empty


@dataclass(frozen=True)
class Part:
    """Where a checkpoint's tensor goes: into `dest`, after `change` if there is one.

    shape: of the checkpoint's tensor, where it is not that of `dest`.
    """

    name: str
    dest: Tensor
    change: Callable[[Tensor], Tensor] | None = None
    shape: tuple[int, ...] | None = None


def empty_weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised weight; no gradients."""
    return nn.Parameter(empty(shape, dtype, device), requires_grad=False)


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x: [rows, columns]; weight: [out, columns]. A few rows on a CPU by our own kernel."""
    made = cpu_product(x, weight, bias) if x.device.type == "cpu" else None
    return F.linear(x, weight, bias) if made is None else made


class RMSNorm(nn.Module):
    """x / rms(x) * weight. offset: added to the stored weight; f32, as numbers near 0 have more digits than near 1."""

    def __init__(self, size: int, eps: float, offset: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = empty_weight(size, dtype=torch.float32 if offset else dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.weight.dtype)
        return F.rms_norm(wide, self.weight.shape, self.weight, self.eps).to(x.dtype)

    def parts(self, name: str) -> Iterator[Part]:
        yield Part(f"{name}.weight", self.weight, lambda w: w.float() + self.offset if self.offset else w)
