"""What a decoder remembers of its rows: a KV cache per attention layer, a state per delta-net layer, the lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from splitkv import ContiguousKVCache, DecodeAttention

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
        kv_heads = (config.num_kv_heads, config.head_dim)
        self.problem = DecodeProblem(
            batch, config.num_q_heads, *kv_heads, capacity=capacity, q_dtype=short_name(dtype), kv_dtype=kv_dtype
        )
        self.attention = DecodeAttention(self.problem, policy, device)
        self.caches: dict[int, ContiguousKVCache] = {}
        self.conv: dict[int, Tensor] = {}
        self.memory: dict[int, Tensor] = {}
        for layer, kind in enumerate(config.layer_types):
            if kind != "linear_attention":
                stored = torch_dtype(kv_dtype)
                self.caches[layer] = ContiguousKVCache(batch, capacity, *kv_heads, dtype=stored, device=device)
            elif (delta := config.delta) is not None:
                sizes = (batch, delta.num_value_heads, delta.key_dim, delta.value_dim)
                self.conv[layer] = torch.zeros((batch, delta.kernel, delta.channels), dtype=dtype, device=device)
                self.memory[layer] = torch.zeros(sizes, dtype=torch.float32, device=device)
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
        out = self.attention.run(q, **self.caches[layer].arguments(), window=window)
        return out if isinstance(out, Tensor) else out[0]

    def bytes_per_step(self, seq_len: int) -> int:
        """Bytes that one step moves when every row holds `seq_len` tokens: K and V, windows aside, states twice."""
        states = sum(t.numel() * t.element_size() for t in (*self.conv.values(), *self.memory.values()))
        return len(self.caches) * self.problem.kv_bytes(seq_len) + 2 * states
