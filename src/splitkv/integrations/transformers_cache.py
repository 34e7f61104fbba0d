"""SplitKVCache: ContiguousKVCache or PagedKVCache behind transformers' cache interface, for `past_key_values=`.

A layer writes new rows in place, in the storage type, and hands on its tensors whole: nothing is copied per step. They
travel to `attention` (transformers.py) as a `StoredKV` on the key tensor, because a model passes on plain tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer, get_layer_types_and_kwargs

from splitkv import ContiguousKVCache, PagedKVCache, UnsupportedError

MAX_DECODE_QUERIES = 16  # the longest q_len of decode_attention
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
STATE_LAYERS = ("linear_attention", "conv", "moe", "mlp")  # no rows per token; transformers' own layer holds the state
_STORED = "_splitkv_stored"


@dataclass(frozen=True)
class StoredKV:
    """The tensors behind a key that a model hands on, as `decode_attention` takes them.

    k_cache, v_cache: [batch, capacity, num_kv_heads, head_dim], or with block_table pages of it. seq_lens: [batch]
    int32, rows stored, or None where whoever holds this knows better. window: of the layer, 0 for none.
    """

    k_cache: Tensor
    v_cache: Tensor
    seq_lens: Tensor | None = None
    block_table: Tensor | None = None
    k_scale: Tensor | float | None = None
    v_scale: Tensor | float | None = None
    window: int = 0

    @property
    def capacity(self) -> int:
        return self.k_cache.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    def dense(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first `length` rows as [batch, num_kv_heads, length, head_dim] in `dtype`, for prefill; copies, unless
        they lie so already."""
        return (
            self._dense(self.k_cache, self.k_scale, length, dtype),
            self._dense(self.v_cache, self.v_scale, length, dtype),
        )

    def _dense(self, cache: Tensor, scale: Tensor | float | None, length: int, dtype: torch.dtype) -> Tensor:
        if self.block_table is None:
            rows = cache[:, :length]
        else:
            pages = self.block_table[:, : -(-length // cache.shape[1])].long()
            rows = _bits(cache)[pages].flatten(1, 2)[:, :length].view(cache.dtype)
        if isinstance(scale, Tensor):
            rows = (rows.float() * scale.reshape(-1, 1)).to(dtype)
        elif scale not in (None, 1.0):
            rows = (rows.float() * scale).to(dtype)
        return rows.to(dtype).transpose(1, 2)


def stored_behind(key: Tensor, value: Tensor) -> StoredKV | None:
    """The StoredKV that a layer of SplitKVCache put on the tensors it returned, if both are still those."""
    stored = getattr(key, _STORED, None)
    return stored if stored is getattr(value, _STORED, None) else None


class _Latents:
    """Stores whose values are the first columns of their keys, as latent attention has them: one tensor for both.

    `append` takes them as keys and as values all the same, and writes those columns twice with the same bytes.
    """

    def _allocate(self: Any, outer: int, tokens: int, *, heads_first: bool = False) -> tuple[Tensor, Tensor]:
        k_cache = self._memory((outer, tokens, 1, self.head_dim))
        return k_cache, k_cache[..., : self.v_head_dim]

    @property
    def bytes(self: Any) -> int:
        """Bytes of K, which V lies in."""
        return self.k_cache.numel() * self.k_cache.element_size()


class LatentRows(_Latents, ContiguousKVCache):
    pass


class LatentPages(_Latents, PagedKVCache):
    pass


class SplitKVLayer(CacheLayerMixin):
    """One attention layer's rows; see SplitKVCache. The store is made at the first update, which knows the shapes."""

    is_sliding = False  # rows before a window stay in place, so one set of lengths fits all layers
    is_croppable = True

    def __init__(
        self,
        max_length: int,
        *,
        window: int = 0,
        page_size: int | None = None,
        latent_dims: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.max_length, self.window, self.page_size = max_length, window, page_size
        self.latent_dims, self.options = latent_dims, options
        self.store: ContiguousKVCache | PagedKVCache | None = None
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate rows for keys like these: [batch, num_kv_heads, n, head_dim]."""
        batch, num_kv_heads, _, head_dim = key_states.shape
        v_head_dim = value_states.shape[-1]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_latent = num_kv_heads == 1 and (head_dim, v_head_dim) == self.latent_dims
        if self.is_latent:
            head_dim, v_head_dim = head_dim + v_head_dim, head_dim
        options = {"dtype": self.dtype} | self.options | {"device": self.device}
        options |= dict(num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
        if self.page_size is None:
            rows = LatentRows if self.is_latent else ContiguousKVCache
            self.store = rows(batch, self.max_length, **options)
        else:
            pages = -(-self.max_length // self.page_size)
            pool = LatentPages if self.is_latent else PagedKVCache
            options |= dict(max_batch=batch, max_pages_per_row=pages)
            self.store = pool(batch * pages, self.page_size, **options)
            for row in range(batch):
                self.store.reserve(row, self.max_length)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store n new rows, [batch, num_kv_heads, n, head_dim]; returns what attention reads.

        A first chunk of more than 16 rows is returned as it came: prefill needs nothing else. Raises ValueError where
        the cache is too short.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        store, before, new = self.store, self.length, key_states.shape[2]
        if store is None or key_states.shape[0] != store.batch:
            raise ValueError(f"key_states: expected batch {store and store.batch}, got {key_states.shape[0]}")
        if before + new > self.max_length:
            raise ValueError(
                f"past_key_values: expected up to {self.max_length} tokens (SplitKVCache's max_length), got {new} more "
                f"than {before}"
            )
        k, v = key_states.transpose(1, 2), value_states.transpose(1, 2)
        store.append(*((torch.cat((k, v), dim=-1), k) if self.is_latent else (k, v)))
        self.length += new
        if before == 0 and new > MAX_DECODE_QUERIES:
            return key_states, value_states
        stored = StoredKV(**store.arguments(), window=self.window)
        unscaled = all(isinstance(scale, float) and scale == 1.0 for scale in (store.k_scale, store.v_scale))
        k, v = store.k_cache, store.v_cache
        if self.is_latent:
            k, v = v, k[..., v.shape[-1] :]
        if self.page_size is None and store.dtype == self.dtype and unscaled:
            key, value = (cache[:, : self.length].transpose(1, 2) for cache in (k, v))
        else:
            key, value = self._stand_in(k), self._stand_in(v)
        for tensor in (key, value):
            setattr(tensor, _STORED, stored)
        return key, value

    def _stand_in(self, cache: Tensor) -> Tensor:
        """A tensor of the right shape without data, for rows that plain torch cannot read: touching it raises."""
        shape = (self.store.batch, cache.shape[2], self.length, cache.shape[3])  # type: ignore[union-attr]
        return torch.empty(shape, dtype=cache.dtype, device="meta")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.max_length

    def reset(self) -> None:
        """Empty all rows; the memory stays."""
        self._truncate(0)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forget the last -tokens_to_remove tokens, as speculative decoding does; above 0 it is the length to keep."""
        tokens_to_remove = int(tokens_to_remove)  # generate passes a tensor
        self._truncate(tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues row beam_idx[i]: copies rows, as beam search may take one twice."""
        if self.store is None:
            return
        beam_idx = beam_idx.to(self.device)
        for cache in (self.store.k_cache,) if self.is_latent else (self.store.k_cache, self.store.v_cache):
            bits = _bits(cache)
            if self.store.block_table is None:
                bits[:, : self.length] = bits[beam_idx, : self.length]
            else:
                pages = self.store.block_table[:, : -(-self.length // cache.shape[1])].long()
                bits[pages] = bits[pages[beam_idx]]

    def offload(self) -> None:
        raise UnsupportedError("offloading: expected False, as SplitKVCache stays on its device, got True")

    prefetch = offload

    def _truncate(self, length: int) -> None:
        self.length = max(min(self.length, length), 0)
        if self.store is not None:
            self.store.truncate(None, self.length)


class SplitKVCache(Cache):
    """A cache for `model(..., past_key_values=cache)` and `model.generate(..., past_key_values=cache)`.

    config: the model's. max_length: tokens that a row may hold, prompt and new ones; allocated at the first forward for
    the batch it has. dtype: storage, torch.float32, float16, bfloat16, float8_e4m3fn or float8_e5m2 (default: the
    model's). page_size: None for contiguous rows, or tokens per page. k_scale, v_scale: stored is k / k_scale and
    v / v_scale, in every layer.

    Layers with a window keep all rows too. A first prefill of more than 16 tokens attends to the rows as computed,
    before they are rounded to the storage type. The model needs `attn_implementation="splitkv"`, unless rows are
    contiguous in the model's own dtype. The host counts tokens: torch.compile makes a second graph with that number
    as a variable, and `generate` compiles for transformers' StaticCache only. A CUDA graph may hold a decode step,
    which goes by the device's lengths (`layer.length` does not see replays).

    Raises TypeError, ValueError, and UnsupportedError for kinds of layers that are not known here.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_length: int,
        *,
        dtype: torch.dtype | None = None,
        page_size: int | None = None,
        k_scale: Tensor | float = 1.0,
        v_scale: Tensor | float = 1.0,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config: expected a model's config, got {type(config).__name__}")
        for name, number in (("max_length", max_length), ("page_size", page_size)):
            if number is None and name == "page_size":
                continue
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"{name}: expected an int, got {type(number).__name__}")
            if number < 1:
                raise ValueError(f"{name}: expected at least 1, got {number}")
        text = config.get_text_config(decoder=True)
        kinds, sizes = get_layer_types_and_kwargs(text)
        unknown = sorted(set(kinds) - {*ATTENTION_LAYERS, *STATE_LAYERS})
        if unknown:
            raise UnsupportedError(
                f"config: supported layer types are {', '.join((*ATTENTION_LAYERS, *STATE_LAYERS))}, got "
                f"{', '.join(unknown)}; use transformers' own caches"
            )
        options: dict[str, Any] = {"page_size": page_size, "k_scale": k_scale, "v_scale": v_scale}
        if getattr(text, "kv_lora_rank", None) and getattr(text, "qk_rope_head_dim", None):
            options["latent_dims"] = (text.kv_lora_rank, text.qk_rope_head_dim)
            if not (k_scale is v_scale or (isinstance(k_scale, float) and k_scale == v_scale)):
                raise UnsupportedError(
                    f"v_scale: supported for latents, whose values lie in the keys, is k_scale {k_scale}, got {v_scale}"
                )
        if dtype is not None:
            options["dtype"] = dtype
        windows = {"sliding_attention": sizes.get("sliding_window", 0)}
        super().__init__(
            layers=[
                SplitKVLayer(max_length, window=windows.get(kind, 0), **options)
                if kind in ATTENTION_LAYERS
                else LinearAttentionLayer(number_of_states=sizes.get("number_of_states", 1))
                for kind in kinds
            ]
        )

    @property
    def bytes(self) -> int:
        """Bytes of K and V allocated so far."""
        stores = [layer.store for layer in self.layers if isinstance(layer, SplitKVLayer)]
        return sum(store.bytes for store in stores if store is not None)


def _bits(cache: Tensor) -> Tensor:
    """fp8 as bytes: torch does not index fp8 tensors everywhere."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache
