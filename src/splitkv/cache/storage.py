"""What both caches share: K and V, a length per row on the device, and append.

Lengths are moved on by the device, so a CUDA graph that holds an append writes the next token at every replay, and
nothing here ever waits for them, except with `check`.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..checks import (
    DTYPE_NAMES,
    Q_DTYPES,
    as_integer,
    check_devices,
    check_head_dims,
    check_last_stride,
    check_scale,
    dtype_list,
)
from ..device_checks import capturing, checks_wanted
from .allocation import empty
from .store import store

INDEX_DTYPES = (torch.int32, torch.int64)
MAX_INT32 = 2**31 - 1


def size(name: str, value: Any) -> int:
    """A whole number from 1 to what an int32 holds: lengths and page ids are int32."""
    number = as_integer(name, value, "an int")
    if not 1 <= number <= MAX_INT32:
        raise ValueError(f"{name}: expected 1..{MAX_INT32}, got {value}")
    return number


class KVCache:
    """Keys and values of `batch` rows of up to `capacity` tokens; see ContiguousKVCache and PagedKVCache.

    k_cache, v_cache: as `decode_attention` takes them. seq_lens: [batch] int32, tokens held. dropped: [batch] int64,
    tokens that `append` was given and found no place for. k_scale, v_scale: as given.
    """

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor | None = None
    _bounds: Tensor | None = None
    """[batch, 2] int32: first and end of the positions that a row may write, where they are not 0 and the capacity."""

    def __init__(
        self,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
        k_scale: Tensor | float,
        v_scale: Tensor | float,
        check: bool,
    ) -> None:
        self.batch, self.capacity = size("batch", batch), size("capacity", capacity)
        self.num_kv_heads, self.head_dim = size("num_kv_heads", num_kv_heads), size("head_dim", head_dim)
        self.v_head_dim = self.head_dim if v_head_dim is None else size("v_head_dim", v_head_dim)
        check_head_dims(self.head_dim, self.v_head_dim)
        if dtype not in DTYPE_NAMES:
            raise TypeError(f"dtype: expected {dtype_list(DTYPE_NAMES)}, got {dtype}")
        if not isinstance(check, bool):
            raise TypeError(f"check: expected a bool, got {type(check).__name__}")
        self.dtype, self.check = dtype, check
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=default if device is None else device)
        self.device = self.seq_lens.device
        self.dropped = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.k_scale, self.v_scale = k_scale, v_scale
        self._scales = tuple(self._divisor(name, getattr(self, name)) for name in ("k_scale", "v_scale"))

    def append(
        self,
        k: Tensor,
        v: Tensor,
        rows: Tensor | Iterable[int] | None = None,
        lens: Tensor | Iterable[int] | None = None,
    ) -> None:
        """Store tokens behind those that the rows hold, as k / k_scale and v / v_scale, and move seq_lens on.

        k: [rows, n, num_kv_heads, head_dim], or [rows, num_kv_heads, head_dim] for one token each; f32, f16 or bf16;
            any strides with the last dimension contiguous. v: the same with v_head_dim.
        rows: which rows, all different (default: all, in order). lens: how many of its n tokens each row takes, from
            the first (default: n). Tensors of int32 or int64 on the cache's device, or ints, which are copied there.

        A token without a place (see the class) is dropped, nothing else is written, and `dropped` counts it; rows
        outside the cache are skipped. With `check=True` or SPLITKV_CHECK=1 both raise ValueError before anything is
        written.
        fp8 rounds to nearest even, saturates (Inf too) and keeps NaN; other dtypes convert as torch does.
        On a GPU: one launch (and one for the lengths of a long prefill), no allocation, no wait, so graphs may hold it.
        Raises TypeError, ValueError.
        """
        k, v = self._tokens("k", k, self.head_dim), self._tokens("v", v, self.v_head_dim)
        if k.dtype != v.dtype:
            raise TypeError(f"v: expected k's dtype {k.dtype}, got {v.dtype}")
        if k.shape[:2] != v.shape[:2]:
            raise ValueError(f"v: expected k's {tuple(k.shape[:2])} rows and tokens, got {tuple(v.shape[:2])}")
        given, n = k.shape[:2]
        if n < 1:
            raise ValueError(f"k: expected at least 1 token, got shape {tuple(k.shape)}")
        if given != self.batch if rows is None else given > self.batch:
            raise ValueError(f"k: expected {'' if rows is None else 'up to '}{self.batch} rows, got {given}")
        rows = None if rows is None else self._indices("rows", rows, given, self.batch - 1)
        lens = None if lens is None else self._indices("lens", lens, given, n)
        check_devices({"k": k, "v": v, "seq_lens": self.seq_lens})
        if not torch.compiler.is_compiling() and (
            (self.check and not capturing(self.device)) or checks_wanted(self.device)
        ):
            self._check_places(given, n, rows, lens)
        if not given:
            return
        store(
            k=k,
            v=v,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            seq_lens=self.seq_lens,
            dropped=self.dropped,
            rows=rows,
            lens=lens,
            block_table=self.block_table,
            bounds=self._bounds,
            k_scale=self._scales[0],
            v_scale=self._scales[1],
        )

    def arguments(self) -> dict[str, Any]:
        """What `decode_attention(q, **cache.arguments())` takes of this cache."""
        names = ("k_cache", "v_cache", "seq_lens", "k_scale", "v_scale")
        return {name: getattr(self, name) for name in names}

    def truncate(self, row: int | None, length: int | Tensor) -> None:
        """Forget the tokens of a row from `length` on, as speculative decoding does with those it rejects.

        row None: all rows, and length may be a [batch] int32 tensor on the device, in a CUDA graph too. A row that is
        shorter stays as it is. Raises TypeError, ValueError.
        """
        if row is not None:
            self._row(row)
        if isinstance(length, Tensor):
            if row is not None or length.dtype != torch.int32 or length.shape != self.seq_lens.shape:
                raise ValueError(
                    f"length: expected an int, or with row None int32 of shape ({self.batch},), got {length.dtype} of "
                    f"shape {tuple(length.shape)} with row {row}"
                )
            check_devices({"length": length, "seq_lens": self.seq_lens})
            torch.minimum(self.seq_lens, length, out=self.seq_lens).clamp_(min=0)
            return
        (self.seq_lens if row is None else self.seq_lens[row]).clamp_(max=as_integer("length", length, "an int"))

    def reset(self, rows: Iterable[int] | None = None) -> None:
        """Empty these rows (default: all); see `truncate`."""
        for row in range(self.batch) if rows is None else rows:
            self.truncate(row, 0)

    @property
    def bytes(self) -> int:
        """Bytes of K and V."""
        return sum(cache.numel() * cache.element_size() for cache in (self.k_cache, self.v_cache))

    def _row(self, row: Any, name: str = "row") -> int:
        if isinstance(row, bool) or not isinstance(row, Integral):
            raise TypeError(f"{name}: expected an int, got {type(row).__name__}")
        number = int(row)
        if not 0 <= number < self.batch:
            raise ValueError(f"{name}: expected 0..{self.batch - 1}, got {number}")
        return number

    def _allocate(self, outer: int, tokens: int, *, heads_first: bool = False) -> tuple[Tensor, Tensor]:
        """K and V of [outer, tokens, num_kv_heads, dim]; what they hold before it is written never matters."""
        inner = (self.num_kv_heads, tokens) if heads_first else (tokens, self.num_kv_heads)
        k_cache, v_cache = (self._memory((outer, *inner, dim)) for dim in (self.head_dim, self.v_head_dim))
        return (k_cache.transpose(1, 2), v_cache.transpose(1, 2)) if heads_first else (k_cache, v_cache)

    def _memory(self, shape: tuple[int, ...]) -> Tensor:
        """Of the cache's dtype, on its device; in huge pages on a CPU."""
        return empty(shape, self.dtype, self.device)

    def _divisor(self, name: str, scale: Tensor | float) -> Tensor | float:
        """As the append functions take it: a float, or a contiguous f32 per KV head."""
        checked = check_scale(name, scale, self.num_kv_heads)
        if isinstance(checked, Tensor):
            check_devices({name: checked, "seq_lens": self.seq_lens})
            return checked.contiguous()
        if checked <= 0.0:
            raise ValueError(f"{name}: expected a scale above 0, got {scale}")
        return checked

    def _tokens(self, name: str, tensor: Tensor, dim: int) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in Q_DTYPES:
            raise TypeError(f"{name}: expected dtype {dtype_list(Q_DTYPES)}, got {tensor.dtype}")
        if tensor.ndim not in (3, 4) or tensor.shape[-2:] != (self.num_kv_heads, dim):
            raise ValueError(
                f"{name}: expected [rows, n, {self.num_kv_heads}, {dim}] (n may be left out for 1), got shape "
                f"{tuple(tensor.shape)}"
            )
        check_last_stride(name, tensor)
        return tensor if tensor.ndim == 4 else tensor.unsqueeze(1)

    def _indices(self, name: str, values: Tensor | Iterable[int], size: int, largest: int) -> Tensor:
        """rows or lens on the device. Ints are checked, as the host knows them; a tensor's values are the device's."""
        if isinstance(values, Tensor):
            if values.dtype not in INDEX_DTYPES:
                raise TypeError(f"{name}: expected dtype {dtype_list(INDEX_DTYPES)}, got {values.dtype}")
            if values.shape != (size,):
                raise ValueError(f"{name}: expected shape ({size},), one for each of k's, got {tuple(values.shape)}")
            check_devices({name: values, "seq_lens": self.seq_lens})
            return values.contiguous()
        if capturing(self.device):
            raise RuntimeError(f"{name}: expected a tensor on {self.device} in a CUDA graph's capture, got ints")
        if not isinstance(values, Iterable):
            raise TypeError(f"{name}: expected ints or a torch.Tensor, got {type(values).__name__}")
        numbers = [as_integer(name, value, "ints or a torch.Tensor") for value in values]
        if len(numbers) != size:
            raise ValueError(f"{name}: expected {size} ints, one for each of k's rows, got {len(numbers)}")
        if any(number > largest for number in numbers):
            raise ValueError(f"{name}: expected ints in 0..{largest}, got {max(numbers)}")
        if name == "rows" and len(set(numbers)) < size:
            raise ValueError(f"rows: expected all different, got {numbers}")
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def _check_places(self, given: int, n: int, rows: Tensor | None, lens: Tensor | None) -> None:
        """Read what only the device knows, and refuse what append would drop."""
        numbers = list(range(given)) if rows is None else rows.tolist()
        counts = [n] * given if lens is None else lens.tolist()
        held = self.seq_lens.tolist()
        bounds = [(0, self.capacity)] * self.batch if self._bounds is None else self._bounds.tolist()
        if len(set(numbers)) < given:
            raise ValueError(f"rows: expected all different, got {numbers}")
        for row, count in zip(numbers, counts, strict=True):
            if not 0 <= row < self.batch:
                raise ValueError(f"rows: expected 0..{self.batch - 1}, got {row}")
            if not 0 <= count <= n:
                raise ValueError(f"lens: expected 0..{n} (k's tokens), got {count} for row {row}")
            first, end = bounds[row]
            if count and not first <= held[row] <= end - count:
                raise ValueError(
                    f"seq_lens: expected a place for {count} more tokens in row {row}, whose places are {first} to "
                    f"{end - 1}, got a length of {held[row]}"
                )
