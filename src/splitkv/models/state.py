"""What a decoder remembers of its rows: keys and values of attention layers, states of delta-net layers, lengths."""

from __future__ import annotations

import torch
from torch import Tensor

import splitkv

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
    """Memory of `batch` rows of up to `capacity` tokens; all of it allocated here, zeroed, at fixed addresses.

    keys, values: per layer [batch, capacity, num_kv_heads, head_dim] in kv_dtype, None for linear layers. conv:
    per layer [batch, channels, kernel - 1] in the activations' dtype. memory: per layer [batch, value heads,
    key_dim, value_dim] f32. seq_lens: [batch] int32 on the device, tokens held by each row.
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
        self.policy = policy
        heads = (config.num_q_heads, config.num_kv_heads, config.head_dim)
        self.problem = DecodeProblem(batch, *heads, capacity=capacity, q_dtype=short_name(dtype), kv_dtype=kv_dtype)
        self.attention = splitkv.DecodeAttention(self.problem, policy, device)
        shape = (batch, capacity, config.num_kv_heads, config.head_dim)
        self.keys: list[Tensor | None] = []
        self.values: list[Tensor | None] = []
        self.conv: list[Tensor | None] = []
        self.memory: list[Tensor | None] = []
        for kind in config.layer_types:
            linear = kind == "linear_attention"
            for store in (self.keys, self.values):
                store.append(None if linear else torch.zeros(shape, dtype=torch_dtype(kv_dtype), device=device))
            conv = memory = None
            if linear and config.delta is not None:
                delta = config.delta
                conv = torch.zeros((batch, delta.channels, delta.kernel - 1), dtype=dtype, device=device)
                memory = torch.zeros(
                    (batch, delta.num_value_heads, delta.key_dim, delta.value_dim), dtype=torch.float32, device=device
                )
            self.conv.append(conv)
            self.memory.append(memory)
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self._rows = torch.arange(batch, device=device)
        self._positions = torch.zeros(batch, dtype=torch.int64, device=device)

    def advance(self) -> None:
        """One more token in every row, on the device: its place is the old length."""
        self._positions.copy_(self.seq_lens)
        self.seq_lens += 1

    def clear(self) -> None:
        """Every row empty again. Keys and values stay: what is beyond a row's length is never read."""
        self.seq_lens.zero_()
        for store in (*self.conv, *self.memory):
            if store is not None:
                store.zero_()

    def recurrent(self, layer: int) -> tuple[Tensor, Tensor]:
        """The convolution's inputs and the memory of a linear layer."""
        conv, memory = self.conv[layer], self.memory[layer]
        if conv is None or memory is None:
            raise ValueError(f"layer: expected a linear layer, got {layer}")
        return conv, memory

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of an attention layer."""
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            raise ValueError(f"layer: expected an attention layer, got {layer}")
        return keys, values

    def write_chunk(self, layer: int, k: Tensor, v: Tensor, row: int, start: int) -> tuple[Tensor, Tensor]:
        """Store k, v [tokens, num_kv_heads, head_dim] at start, .. of a row; all that the row's cache now holds."""
        end = start + k.shape[0]
        keys, values = (store[row] for store in self.cache(layer))
        keys[start:end] = _storable(k, keys.dtype)
        values[start:end] = _storable(v, values.dtype)
        return keys[:end], values[:end]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """Store one k, v [batch, num_kv_heads, head_dim] of every row and attend with q; shape and dtype of q."""
        keys, values = self.cache(layer)
        keys.index_put_((self._rows, self._positions), _storable(k, keys.dtype))
        values.index_put_((self._rows, self._positions), _storable(v, values.dtype))
        if torch.compiler.is_compiling():
            out = splitkv.decode_attention(q, keys, values, self.seq_lens, window=window, policy=self.policy)
        else:
            out = self.attention.run(q, keys, values, self.seq_lens, window=window)
        if not isinstance(out, Tensor):
            raise TypeError("decode_attention: expected one tensor")
        return out

    def state_bytes_per_token(self) -> int:
        """Bytes of recurrent state that a step of all rows reads and writes."""
        return 2 * sum(t.numel() * t.element_size() for t in [*self.conv, *self.memory] if t is not None)

    def kv_bytes(self, seq_len: int) -> int:
        """Bytes of keys and values that a step reads when every row holds `seq_len` tokens, windows aside."""
        layers = sum(keys is not None for keys in self.keys)
        return layers * self.problem.kv_bytes(seq_len)


def _storable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the cache's dtype; what is out of its range becomes its largest number instead of an infinity or NaN."""
    if x.dtype == dtype:
        return x
    if dtype not in (torch.float32, torch.bfloat16):
        top = torch.finfo(dtype).max
        x = x.clamp(-top, top)
    return x.to(dtype)
