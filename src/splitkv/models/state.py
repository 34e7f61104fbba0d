"""What a decoder remembers of its rows: a KV cache per attention layer, a state per delta-net layer, the lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from splitkv import ContiguousKVCache, DecodeAttention

from ..cache.allocation import empty
from ..problem import DecodeProblem
from .config import DecoderConfig

TORCH_DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of problem.DTYPE_BYTES."""
    return TORCH_DTYPES[name]


def short_name(dtype: torch.dtype) -> str:
    """The reverse of torch_dtype."""
    return next(name for name, known in TORCH_DTYPES.items() if known == dtype)


class LatentKVCache(ContiguousKVCache):
    """Values are the first columns of their keys, as latent attention has them: one tensor holds both.

    `append` takes both all the same, and writes those columns twice with the same bytes.
    """

    def _allocate(self, outer: int, tokens: int, *, heads_first: bool = False) -> tuple[Tensor, Tensor]:
        k_cache = self._memory((outer, tokens, self.num_kv_heads, self.head_dim))
        return k_cache, k_cache[..., : self.v_head_dim]


class DecodeState:
    """Memory of `batch` rows of up to `capacity` tokens; all of it allocated here, at fixed addresses.

    caches: per layer, in kv_dtype; None for linear layers. conv: per linear layer, [batch, kernel, channels] in dtype,
    that of the activations: the convolution's last inputs, that of position p in p % kernel. memory: per linear layer,
    [batch, value heads, key_dim, value_dim] f32. seq_lens: [batch] int32 on the device, tokens held by each row; every
    cache counts the same.
    """

    def __init__(
        self,
        config: DecoderConfig,
        batch: int,
        capacity: int,
        kv_dtype: str,
        dtype: torch.dtype,
        device: torch.device | str,
        policy: str = "auto",
    ) -> None:
        device = torch.device(device)
        self.batch, self.capacity, self.kv_dtype = batch, capacity, kv_dtype
        self.problem = DecodeProblem(
            batch, config.num_q_heads, *config.cache_heads, capacity=capacity, q_dtype=short_name(dtype),
            kv_dtype=kv_dtype,
        )  # fmt: skip
        self._windows = [config.window if kind == "sliding_attention" else None for kind in config.layer_types]
        self._logits: dict[str, Any] = {"softmax_scale": config.softmax_scale, "softcap": config.attention_softcap}
        self.attention = DecodeAttention(self.problem, policy, device)
        self.caches: dict[int, ContiguousKVCache] = {}
        self.conv: dict[int, Tensor] = {}
        self.memory: dict[int, Tensor] = {}
        for layer, kind in enumerate(config.layer_types):
            if kind != "linear_attention":
                heads, head_dim, v_head_dim = config.cache_heads
                rows = ContiguousKVCache if config.latent is None else LatentKVCache
                self.caches[layer] = rows(
                    batch, capacity, heads, head_dim, v_head_dim=v_head_dim, dtype=torch_dtype(kv_dtype), device=device
                )
            elif (delta := config.delta) is not None:
                sizes = (batch, delta.num_value_heads, delta.key_dim, delta.value_dim)
                self.conv[layer] = torch.zeros((batch, delta.kernel, delta.channels), dtype=dtype, device=device)
                self.memory[layer] = empty(sizes, torch.float32, device).zero_()
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self._row_ids = torch.arange(batch, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """Every row empty again. Keys and values stay: what is beyond a row's length is never read."""
        self.seq_lens.zero_()
        for cache in self.caches.values():
            cache.seq_lens.zero_()
        for store in (*self.conv.values(), *self.memory.values()):
            store.zero_()

    def clear_row(self, row: int) -> None:
        """The same for one row."""
        self.seq_lens[row] = 0
        for cache in self.caches.values():
            cache.free(row)
        for store in (*self.conv.values(), *self.memory.values()):
            store[row].zero_()

    def write_chunk(self, layer: int, k: Tensor, v: Tensor, row: int, start: int) -> tuple[Tensor, Tensor]:
        """Store k, v [tokens, num_kv_heads, head_dim] behind a row's `start` tokens; all that its cache now holds."""
        cache = self.caches[layer]
        cache.append(k[None], v[None], self._row_ids[row : row + 1])
        end = start + k.shape[0]
        return cache.k_cache[row, :end], cache.v_cache[row, :end]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """Store one k, v [batch, num_kv_heads, head_dim] of every row and attend with q; q's shape and dtype."""
        self.caches[layer].append(k, v)
        return self.attend_held(layer, q, window)

    def attend_held(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        """Attend with q [batch, num_q_heads, head_dim] to all that a layer's cache holds; q's shape and dtype."""
        out = self.attention.run(q, **self.caches[layer].arguments(), window=window, **self._logits)
        return out if isinstance(out, Tensor) else out[0]

    def bytes_per_step(self, seq_len: int) -> int:
        """Bytes that one step moves when every row holds `seq_len` tokens: K and V in sight, states twice."""
        states = sum(t.numel() * t.element_size() for t in (*self.conv.values(), *self.memory.values()))
        return sum(self._kv_bytes(layer, seq_len) for layer in self.caches) + 2 * states

    def _kv_bytes(self, layer: int, seq_len: int) -> int:
        cache, window = self.caches[layer], self._windows[layer]
        columns = cache.head_dim + (0 if isinstance(cache, LatentKVCache) else cache.v_head_dim)
        seen = seq_len if window is None else min(seq_len, window)
        return self.batch * seen * cache.num_kv_heads * columns * cache.k_cache.element_size()
