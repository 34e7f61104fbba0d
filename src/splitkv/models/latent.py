"""Latent attention (DeepSeek-V2): a token is kept as one latent c and one rotated key r, which all heads share.

Keys and values of a head are W_k c and W_v c. A chunk makes them; one token does not: q (W_k c) = (W_k^T q) c and
sum p (W_v c) = W_v sum p c, so it attends to the latents themselves, as one KV head with keys [c, r] and values c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attending import chunk_attention, rotate
from .config import DecoderConfig
from .parts import Part, RMSNorm, empty_weight, project
from .state import DecodeState

if TYPE_CHECKING:
    from .fused import FusedStep

EXPANDED_BYTES = 256 << 20
"""Of keys and values that a chunk makes at a time: as many heads as that, at least one. 160,000 tokens have 3 GiB of
them in DeepSeek-V2-Lite."""


class LatentAttention(nn.Module):
    """Self-attention of one layer on latents. `project`: of the query, or what it is squeezed to, of latent and key."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        if config.latent is None:
            raise ValueError(f"{config.source}: expected the sizes of latent attention, got none")
        sizes = self.latent = config.latent
        self.layer, self.heads, self.scale = layer, config.num_q_heads, config.softmax_scale
        q = self.heads * config.head_dim
        self.sizes = (q if sizes.q_rank is None else sizes.q_rank, sizes.rank, sizes.rope_dim)
        self.project = empty_weight(sum(self.sizes), config.hidden_size, dtype=dtype, device=device)
        self.norm = RMSNorm(sizes.rank, sizes.eps, 0.0, dtype, device)
        self.q_norm = self.q_b = None
        if sizes.q_rank is not None:
            self.q_norm = RMSNorm(sizes.q_rank, sizes.eps, 0.0, dtype, device)
            self.q_b = empty_weight(q, sizes.q_rank, dtype=dtype, device=device)
        self.kv_b = empty_weight(self.heads, sizes.nope_dim + sizes.v_dim, sizes.rank, dtype=dtype, device=device)
        self.out = empty_weight(config.hidden_size, self.heads * sizes.v_dim, dtype=dtype, device=device)

    def _split(self, projected: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Each head's query [tokens, heads, ..], unrotated and rotated, and what the cache keeps [tokens, 1, ..]."""
        sizes = self.latent
        q, latent, k_rope = projected.split(self.sizes, -1)
        if self.q_norm is not None and self.q_b is not None:
            q = project(self.q_norm(q), self.q_b)
        q_nope, q_rope = q.unflatten(-1, (self.heads, -1)).split((sizes.nope_dim, sizes.rope_dim), -1)
        kept = torch.cat([self.norm(latent)[:, None], rotate(k_rope[:, None], *rotation)], -1)
        return q_nope, rotate(q_rope, *rotation), kept

    def prefill(self, x: Tensor, rotation: tuple[Tensor, Tensor], state: DecodeState, row: int, start: int) -> Tensor:
        """x [tokens, hidden] at positions start, start + 1, .. of a row."""
        sizes = self.latent
        q_nope, q_rope, kept = self._split(project(x, self.project), rotation)
        held = state.write_chunk(self.layer, kept, kept[..., : sizes.rank], row, start)[0].to(x.dtype)
        latents, turned = held[:, 0, : sizes.rank].contiguous(), held[..., sizes.rank :]
        q = torch.cat([q_nope, q_rope], -1)
        wide = 2 * (sizes.nope_dim + sizes.rope_dim + sizes.v_dim) * held.shape[0] * x.element_size()
        some = max(EXPANDED_BYTES // wide, 1)  # heads
        attended = [
            self._expanded(q[:, i : i + some], latents, turned, self.kv_b[i : i + some])
            for i in range(0, self.heads, some)
        ]
        return project(torch.cat(attended, 1).flatten(-2), self.out)

    def _expanded(self, q: Tensor, latents: Tensor, turned: Tensor, kv_b: Tensor) -> Tensor:
        """A chunk's attention by some heads, whose keys and values are made: [tokens, heads, v_dim]."""
        sizes = self.latent
        expanded = project(latents, kv_b.flatten(0, 1)).unflatten(-1, (len(kv_b), -1))
        k_nope, v = expanded.split((sizes.nope_dim, sizes.v_dim), -1)
        k = torch.cat([k_nope, turned.expand(-1, len(kv_b), -1)], -1)
        padded = F.pad(v, (0, max(q.shape[-1] - sizes.v_dim, 0)))  # flash attention wants values as wide as keys
        return chunk_attention(q, k, padded, None, self.scale)[..., : sizes.v_dim]

    def decode(self, x: Tensor, rotation: tuple[Tensor, Tensor], state: DecodeState) -> Tensor:
        """x [batch, hidden], one token a row, at the position before the state's length."""
        sizes = self.latent
        q_nope, q_rope, kept = self._split(project(x, self.project), rotation)
        w_k, w_v = self.kv_b.split((sizes.nope_dim, sizes.v_dim), 1)
        absorbed = torch.bmm(q_nope.transpose(0, 1), w_k).transpose(0, 1)
        q = torch.cat([absorbed, q_rope], -1)
        attended = state.attend(self.layer, q, kept, kept[..., : sizes.rank], None)
        values = torch.bmm(attended.transpose(0, 1), w_v.mT).transpose(0, 1)
        return project(values.flatten(-2), self.out)

    def step(self, norm: RMSNorm, now: FusedStep) -> None:
        """x += decode(norm(x)), by the kernels."""
        from .latent_kernels import absorb, values

        projected = now.products.after_norm(now.x, norm, self.project)
        queries, latents = projected[:, : self.sizes[0]], projected[:, self.sizes[0] :]
        if self.q_norm is not None and self.q_b is not None:
            queries = now.products.after_norm(queries, self.q_norm, self.q_b)
        own = self.norm.weight, self.norm.eps
        cache = now.state.caches[self.layer]
        q = absorb(queries, latents, self.kv_b, own, now.rotation, now.positions, cache, self.latent)
        attended = now.state.attend_held(self.layer, q, None)
        now.products.onto(now.x, values(attended, self.kv_b, self.latent), self.out)

    def parts(self, name: str) -> Iterator[Part]:
        sizes, own = self.latent, self.project.split(self.sizes)
        turned = _halves_of_each_head(self.heads, sizes.rope_dim)
        if self.q_norm is not None and self.q_b is not None:
            yield Part(f"{name}.q_a_proj.weight", own[0])
            yield from self.q_norm.parts(f"{name}.q_a_layernorm")
            yield Part(f"{name}.q_b_proj.weight", self.q_b, turned)
        else:
            yield Part(f"{name}.q_proj.weight", own[0], turned)
        kv_a = self.project[self.sizes[0] :]
        yield Part(f"{name}.kv_a_proj_with_mqa.weight", kv_a, _halves_of_each_head(1, sizes.rope_dim))
        yield from self.norm.parts(f"{name}.kv_a_layernorm")
        yield Part(f"{name}.kv_b_proj.weight", self.kv_b, shape=(self.kv_b[:, :, 0].numel(), sizes.rank))
        yield Part(f"{name}.o_proj.weight", self.out)


def _halves_of_each_head(heads: int, rope_dim: int) -> Callable[[Tensor], Tensor]:
    """A head's last `rope_dim` rows from x0 y0 x1 y1 .., as these checkpoints have them, to x0 x1 .. y0 y1 ..

    Queries and keys are turned alike, so no product of theirs changes.
    """

    def change(w: Tensor) -> Tensor:
        each = w.unflatten(0, (heads, -1))
        plain, pairs = each[:, :-rope_dim], each[:, -rope_dim:]
        halves = pairs.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return torch.cat([plain, halves], 1).flatten(0, 1)

    return change
