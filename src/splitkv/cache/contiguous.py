"""ContiguousKVCache: every row has its own stretch of `capacity` tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device_checks import capturing
from .storage import KVCache, size


class ContiguousKVCache(KVCache):
    """K and V of [batch, capacity, num_kv_heads, head_dim], for `decode_attention(q, **cache.arguments())`.

    v_head_dim: of V (default: head_dim). dtype: torch.float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
    device: default the current CUDA device, else the CPU. k_scale, v_scale: stored is k / k_scale and v / v_scale: a
    number above 0, or f32 of one or num_kv_heads on the device. check: `append` reads the lengths first (which waits
    for the GPU) and raises ValueError where it would drop tokens; left out in the capture of a graph.

    A token's place is behind the row's last, below the capacity. generation: changes when `grow` replaces the
    tensors; graphs captured before then hold the old ones. Raises TypeError, ValueError, UnsupportedError.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        k_scale: Tensor | float = 1.0,
        v_scale: Tensor | float = 1.0,
        check: bool = False,
    ) -> None:
        super().__init__(
            batch,
            capacity,
            num_kv_heads,
            head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            device=device,
            k_scale=k_scale,
            v_scale=v_scale,
            check=check,
        )
        self.generation = 0
        self.k_cache, self.v_cache = self._allocate(self.batch, self.capacity)

    def grow(self, capacity: int) -> None:
        """Room for `capacity` tokens a row, in new tensors, with all that rows hold; seq_lens stays the same tensor.

        Graphs captured before still read the old tensors: capture again when `generation` has changed. Raises
        ValueError for a capacity below the present one, RuntimeError in a capture.
        """
        capacity = size("capacity", capacity)
        if capacity < self.capacity:
            raise ValueError(f"capacity: expected at least {self.capacity} (the present one), got {capacity}")
        if capturing(self.device):
            raise RuntimeError("grow: expected no capture of a CUDA graph, as it replaces the tensors")
        if capacity == self.capacity:
            return
        grown = self._allocate(self.batch, capacity)
        for source, target in zip((self.k_cache, self.v_cache), grown, strict=True):
            target[:, : self.capacity] = source
        self.k_cache, self.v_cache = grown
        self.capacity = capacity
        self.generation += 1

    def free(self, row: int) -> None:
        """Empty a row, for the next sequence."""
        self.truncate(self._row(row), 0)
