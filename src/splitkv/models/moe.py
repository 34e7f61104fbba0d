"""Feed-forwards that are mixtures of experts: a router chooses a few of many for each token.

Experts that every token passes are kept behind the others, so that they are chosen ones with places of their own: one
that is n times as wide as the others is n of them, as a feed-forward's columns are independent until they are added.

A step of a few tokens on a GPU is four kernels (moe_kernels.py) that read the chosen experts' bytes only. Many tokens
are sorted by expert; each expert is then a product of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Experts
from .parts import Part, RMSNorm, empty_weight, project

if TYPE_CHECKING:
    from .fused import FusedStep

FEW_TOKENS = 16
"""Up to this many tokens of a step, few experts are chosen twice, and each is read for each token."""


class ExpertMLP(nn.Module):
    """The router and all experts of one layer. Router's last row: the gate of the shared experts, if it is there.

    counted: None, or a list to which `decode` adds how many different experts it read, which waits for the device.
    """

    def __init__(self, experts: Experts, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.experts = experts
        self.counted: list[int] | None = None
        total = experts.count + experts.shared
        self.router = empty_weight(experts.count + experts.gated, hidden, dtype=dtype, device=device)
        self.gate_up = empty_weight(total, 2 * experts.width, hidden, dtype=dtype, device=device)
        self.down = empty_weight(total, hidden, experts.width, dtype=dtype, device=device)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights f32 and places of each token's experts, the shared ones last: [tokens, chosen + shared]."""
        experts = self.experts
        logits = F.linear(x.float(), self.router.float())
        scores = logits[:, : experts.count].softmax(-1)
        if experts.chosen_groups < experts.groups:
            in_groups = scores.unflatten(-1, (experts.groups, -1))
            best = in_groups.amax(-1).topk(experts.chosen_groups).indices
            kept = torch.zeros(in_groups.shape[:-1], dtype=torch.bool, device=x.device).scatter_(-1, best, True)
            scores = in_groups.masked_fill(~kept[..., None], -1.0).flatten(-2)
        weights, ids = scores.topk(experts.chosen)
        if experts.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * experts.scale
        if experts.shared:
            always = torch.arange(experts.count, experts.count + experts.shared, device=x.device)
            ids = torch.cat([ids, always.expand(len(x), -1)], -1)
            own = logits[:, -1:].sigmoid() if experts.gated else torch.ones_like(weights[:, :1])
            weights = torch.cat([weights, own.expand(-1, experts.shared)], -1)
        return weights, ids

    def prefill(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] to the experts' weighted sum, the same shape and dtype. May wait for the device."""
        routed = self.route(x)
        return self.grouped(x, *routed) if self._can_group(x) else self.one_by_one(x, *routed)

    def decode(self, x: Tensor) -> Tensor:
        """The same for one token a row, without waiting: a CUDA graph may hold it."""
        if self.counted is not None:
            self.counted.append(int(self.route(x)[1].unique().numel()))
        if not x.is_cuda:
            return self.one_by_one(x, *self.route(x))
        if x.shape[0] > FEW_TOKENS and self._can_group(x):
            return self.grouped(x, *self.route(x))
        from .moe_kernels import step

        with torch.cuda.device(x.device):
            return step(x, self.router, self.gate_up, self.down, self.experts)

    def step(self, norm: RMSNorm, now: FusedStep) -> None:
        """x += decode(norm(x)), by the kernels."""
        x = now.x
        if x.shape[0] > FEW_TOKENS and self._can_group(x):
            normed = norm(x)
            x += self.grouped(normed, *self.route(normed))
            return
        from .moe_kernels import step

        step(x, self.router, self.gate_up, self.down, self.experts, norm=(norm.weight, norm.eps), add=True)

    def _can_group(self, x: Tensor) -> bool:
        """torch's grouped product is for bf16 on GPUs, with rows of a multiple of 16 bytes."""
        aligned = x.shape[1] % 8 == 0 and self.experts.width % 8 == 0
        return x.is_cuda and x.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")

    def one_by_one(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Each chosen expert with its tokens in turn."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            token, place = torch.where(ids == expert)
            gate, up = project(x[token], self.gate_up[expert]).chunk(2, -1)
            made = project(F.silu(gate) * up, self.down[expert])
            out.index_add_(0, token, made.float() * weights[token, place, None])
        return out.to(x.dtype)

    def grouped(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """All chosen experts in two products; nothing waits for the device."""
        each = ids.shape[1]
        sorted_ids, order = ids.flatten().sort(stable=True)
        experts = torch.arange(self.gate_up.shape[0], device=x.device)
        ends = torch.searchsorted(sorted_ids, experts, right=True).to(torch.int32)
        gate, up = F.grouped_mm(x[order // each], self.gate_up.mT, offs=ends).chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends)
        places = order.argsort().unflatten(0, (-1, each))
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for i in range(each):  # one at a time, as all in f32 would be the largest tensor of a chunk
            out.addcmul_(made[places[:, i]].float(), weights[:, i, None])
        return out.to(x.dtype)

    def bytes_read(self, experts: float) -> int:
        """Bytes of weights that a step reads which reads this many experts, the shared ones included."""
        one = (self.gate_up[0].numel() + self.down[0].numel()) * self.gate_up.element_size()
        return self.router.numel() * self.router.element_size() + round(experts * one)

    def parts(self, name: str) -> Iterator[Part]:
        experts, (_, hidden, width) = self.experts, self.down.shape
        yield Part(f"{name}.gate.weight", self.router[: experts.count])
        for i in range(experts.count):
            gate, up = self.gate_up[i].chunk(2)
            yield Part(f"{name}.experts.{i}.gate_proj.weight", gate)
            yield Part(f"{name}.experts.{i}.up_proj.weight", up)
            yield Part(f"{name}.experts.{i}.down_proj.weight", self.down[i])
        if not experts.shared:
            return
        rows = experts.shared * width
        own = f"{name}.shared_expert" if experts.gated else f"{name}.shared_experts"
        if experts.gated:
            yield Part(f"{own}_gate.weight", self.router[-1:])
        for proj, dest in zip(("gate", "up"), self.gate_up[experts.count :].chunk(2, 1), strict=True):
            yield Part(f"{own}.{proj}_proj.weight", dest, shape=(rows, hidden))
        yield Part(
            f"{own}.down_proj.weight",
            self.down[experts.count :],
            lambda w: w.unflatten(1, (experts.shared, width)).transpose(0, 1),
            (hidden, rows),
        )
