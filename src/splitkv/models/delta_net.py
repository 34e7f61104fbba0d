"""Gated delta-net layers (Qwen3.5): a state of fixed size per head instead of a cache.

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q / sqrt(key_dim)

with unit-length q and k. One token is this rule itself, on a GPU by delta_kernels.py; a chunk solves it for 64 tokens
at a time, on a GPU by fla-core's kernels where it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import DecoderConfig
from .parts import Part, RMSNorm, empty_weight, project
from .state import DecodeState

if TYPE_CHECKING:
    from .fused import FusedStep

CHUNK = 64
NORM_EPS = 1e-6
_Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@cache
def fla_kernels() -> Any | None:
    """fla's gated delta rule, or None where fla-core is not installed."""
    try:
        from fla.ops import gated_delta_rule
    except ImportError:
        return None
    return gated_delta_rule


def unit(x: Tensor) -> Tensor:
    """x with its last dimension scaled to length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token of every row; `state` is updated in place.

    q, k: [rows, heads, key_dim], any length. v: [rows, heads, value_dim]. g, beta: [rows, heads]. state: [rows,
    heads, key_dim, value_dim]. All f32. Returns [rows, heads, value_dim].
    """
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    state *= g.exp()[..., None, None]
    delta = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta[..., None]
    state += k[..., None] * delta[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, q)


def delta_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The same for a run of tokens of one row, 64 at a time; `state` [heads, key_dim, value_dim] is updated in place.

    q, k: [tokens, heads, key_dim]. v: [tokens, heads, value_dim]. g, beta: [tokens, heads]. All f32. Returns
    [tokens, heads, value_dim]. Within a chunk the corrections depend on each other through a unit triangular system.
    """
    tokens = q.shape[0]
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    out = torch.empty_like(v)
    for start in range(0, tokens, CHUNK):
        part = slice(start, min(start + CHUNK, tokens))
        qc, kc, vc = (t[part].transpose(0, 1) for t in (q, k, v))
        gc, bc = g[part].T, beta[part].T[..., None]
        log_decay = gc.cumsum(-1)
        decay = (log_decay[..., :, None] - log_decay[..., None, :]).tril().exp().tril()
        since_start = log_decay.exp()[..., None]
        system = (bc * kc) @ kc.mT * decay
        wanted = bc * (vc - since_start * (kc @ state))
        delta = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        out[part] = (since_start * (qc @ state) + (qc @ kc.mT * decay) @ delta).transpose(0, 1)
        to_end = (log_decay[..., -1:] - log_decay).exp()[..., None]
        state.mul_(log_decay[..., -1].exp()[..., None, None]).add_((to_end * kc).mT @ delta)
    return out


def _for_torch(parts: _Five) -> _Five:
    """In f32, with the key heads repeated for every value head that shares them; fla's kernels want neither."""
    q, k, v, g, beta = parts
    q, k = (t.float().repeat_interleave(v.shape[1] // t.shape[1], 1) for t in (q, k))
    return q, k, v.float(), g.float(), beta.float()


class DeltaNetMixer(nn.Module):
    """One gated delta-net layer: a short causal convolution over q, k and v, the delta rule, a gated norm."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        if config.delta is None:
            raise ValueError(f"{config.source}: expected the sizes of linear attention, got none")
        sizes = self.delta = config.delta
        self.eps, self.layer = config.norm_eps, layer
        values, heads = sizes.num_value_heads * sizes.value_dim, sizes.num_value_heads
        self.sizes = (sizes.channels, values, heads, heads)
        self.project = empty_weight(sum(self.sizes), config.hidden_size, dtype=dtype, device=device)
        self.conv = empty_weight(sizes.channels, sizes.kernel, dtype=dtype, device=device)
        self.rate, self.dt_bias = (empty_weight(heads, dtype=torch.float32, device=device) for _ in range(2))
        self.norm = empty_weight(sizes.value_dim, dtype=dtype, device=device)
        self.out = empty_weight(config.hidden_size, values, dtype=dtype, device=device)

    def _split(self, mixed: Tensor, a: Tensor, b: Tensor) -> _Five:
        """q, k [tokens, key heads, key_dim], v, log decay and beta of value heads, from the convolved columns."""
        delta = self.delta
        keys = delta.num_key_heads * delta.key_dim
        q, k, v = mixed.split((keys, keys, mixed.shape[-1] - 2 * keys), -1)
        q, k = (t.unflatten(-1, (-1, delta.key_dim)) for t in (q, k))
        log_decay = self.rate * F.softplus(a.float() + self.dt_bias)
        return q, k, v.unflatten(-1, (-1, delta.value_dim)), log_decay, b.sigmoid()

    def _gated(self, out: Tensor, z: Tensor) -> Tensor:
        normed = F.rms_norm(out.to(self.norm.dtype), self.norm.shape, self.norm, self.eps)
        gated = normed.float() * F.silu(z.float().unflatten(-1, (-1, self.delta.value_dim)))
        return gated.to(z.dtype).flatten(-2)

    def prefill(self, x: Tensor, rotation: Any, state: DecodeState, row: int, start: int) -> Tensor:
        """x [tokens, hidden] of one row, after `start` others."""
        qkv, z, b, a = project(x, self.project).split(self.sizes, -1)
        memory = state.memory[self.layer][row]
        held, kernel = state.conv[self.layer][row], self.delta.kernel
        places = torch.arange(start - kernel + 1, start, device=x.device)
        seen = torch.cat([held[places % kernel], qkv])
        held[(places + x.shape[0]) % kernel] = seen[1 - kernel :]
        seen = seen.T
        mixed = F.silu(F.conv1d(seen[None], self.conv[:, None], groups=seen.shape[0]))[0].T
        parts = self._split(mixed, a, b)
        # Not in f32: fla's chunks are products of tensor cores, which round that to TF32.
        if x.is_cuda and x.dtype != torch.float32 and (fla := fla_kernels()) is not None:
            q, k, v, g, beta = (t[None].contiguous() for t in parts)
            out, final = fla.chunk_gated_delta_rule(
                q, k, v, g=g, beta=beta, initial_state=memory[None], output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            memory.copy_(final[0])
            return project(self._gated(out[0], z), self.out)
        return project(self._gated(delta_chunks(*_for_torch(parts), memory), z), self.out)

    def decode(self, x: Tensor, rotation: Any, state: DecodeState) -> Tensor:
        """x [batch, hidden], one token a row, at the position before the state's length."""
        projected, conv, memory = project(x, self.project), state.conv[self.layer], state.memory[self.layer]
        return project(self.step_in_torch(projected, state.seq_lens - 1, conv, memory), self.out)

    def step(self, norm: RMSNorm, now: FusedStep) -> None:
        """x += decode(norm(x)), by the kernels."""
        from . import delta_kernels

        projected = now.products.after_norm(now.x, norm, self.project)
        held = now.state.conv[self.layer], now.state.memory[self.layer]
        mixed = delta_kernels.step(projected, now.positions, *held, **self.step_weights())
        now.products.onto(now.x, mixed, self.out)

    def step_weights(self) -> dict[str, Any]:
        """What delta_kernels.step takes of this layer."""
        weights = {"weight": self.conv, "rate": self.rate, "dt_bias": self.dt_bias, "norm": self.norm}
        return {**weights, "sizes": self.delta, "unit_eps": NORM_EPS, "norm_eps": self.eps}

    def step_in_torch(self, projected: Tensor, positions: Tensor, conv: Tensor, memory: Tensor) -> Tensor:
        """What delta_kernels.step does on a GPU, with the same tensors."""
        qkv, z, b, a = projected.split(self.sizes, -1)
        kernel, rows = self.delta.kernel, torch.arange(len(positions), device=positions.device)
        conv[rows, positions % kernel] = qkv
        order = (positions[:, None] + torch.arange(1 - kernel, 1, device=positions.device)) % kernel
        seen = conv[rows[:, None], order].mT
        mixed = F.silu((seen.float() * self.conv.float()).sum(-1)).to(qkv.dtype)
        return self._gated(delta_step(*_for_torch(self._split(mixed, a, b)), memory), z)

    def parts(self, name: str) -> Iterator[Part]:
        for suffix, rows in zip(("qkv", "z", "b", "a"), self.project.split(self.sizes), strict=True):
            yield Part(f"{name}.in_proj_{suffix}.weight", rows)
        yield Part(f"{name}.conv1d.weight", self.conv)
        yield Part(f"{name}.A_log", self.rate, lambda w: -w.float().exp())
        yield Part(f"{name}.dt_bias", self.dt_bias)
        yield Part(f"{name}.norm.weight", self.norm)
        yield Part(f"{name}.out_proj.weight", self.out)
