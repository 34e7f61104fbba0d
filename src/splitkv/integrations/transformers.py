"""transformers' attention interface: `register()`, then load any model with `attn_implementation="splitkv"`.

Two functions under one name. `decode_mask` is asked first, once per forward and kind of layer: for up to 16 queries
that see all keys before them (causal, or one query under a window; left padding too) it answers with each row's
bounds, an int32 tensor [batch, 1, 17, 1 or 2], instead of a mask over all keys; for everything else with sdpa's mask.
`attention` then runs in every layer: bounds, or a single query, go to `decode_attention`; the rest is prefill and goes
to torch's SDPA, or to the same sum in blocks of queries where a softcap or sinks rule SDPA out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from splitkv import UnsupportedError, decode_attention

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function
    from transformers.utils.import_utils import is_cuda_stream_capturing, is_tracing

    from .transformers_cache import MAX_DECODE_QUERIES, SplitKVCache, StoredKV, stored_behind
    from .transformers_latent import absorb_latents, absorbed_query, expand, is_absorbed, joined, projected
except ImportError as error:
    raise ImportError(
        "splitkv.integrations.transformers: expected transformers 5.16 or later (pip install 'splitkv[transformers]' "
        f"brings it), got: {error}"
    ) from error

__all__ = ["SplitKVCache", "absorb_latents", "register"]

NAME = "splitkv"
BOUNDS_ROWS = MAX_DECODE_QUERIES + 1  # of bounds; a model that combines them with a mask gets no valid mask out of it
PREFILL_BLOCK_BYTES = 128 * 2**20  # scores of one block of queries, float32


def register(name: str = NAME) -> None:
    """Make `attn_implementation=name` mean splitkv, for every model that uses the attention interface.

    Safe to call twice. Raises ValueError for a name that transformers would look up on its Hub, or has already.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {type(name).__name__}")
    functions = {AttentionInterface: attention, AttentionMaskInterface: decode_mask}
    taken = any(kind._global_mapping.get(name, ours) is not ours for kind, ours in functions.items())
    if taken or not name.isidentifier():
        raise ValueError(f"name: expected an identifier that transformers does not use itself, got {name!r}")
    for kind, ours in functions.items():
        kind.register(name, ours)


def decode_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Bounds of what each row sees, where that is all there is to say; else what sdpa's mask function returns.

    Bounds are int32 [batch, 1, 17, 1]: the number of valid keys, or [batch, 1, 17, 2]: the first visible key and the
    number of valid keys, counted in the key tensor that the layer will get; 17 times the same. Arguments are those
    that transformers passes: q_offset, tokens before this forward's first, is a live 0-d tensor for static caches.
    attention_mask is the 2-D padding mask. Where values are at hand a padding mask that is not left padding alone is
    found out (as sdpa does: one synchronisation); in a trace it always becomes sdpa's mask.
    """
    window = _window(mask_function, local_size)
    bounded = window is not None and q_length <= MAX_DECODE_QUERIES and (window == 0 or q_length == 1)
    end = q_offset + q_length
    first: Tensor | int | None = 0
    if bounded and attention_mask is not None:
        first = None if is_tracing(attention_mask) else _left_padding(attention_mask, end)
    if not bounded or first is None:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            device=device,
            **kwargs,
        )
    rows = torch.zeros(batch_size, dtype=torch.int32, device=device)
    ends = rows + (end - kv_offset)
    if window:
        first = rows + (end - window) if isinstance(first, int) else torch.maximum(first, rows + (end - window))
    elif isinstance(first, int):
        if q_length == 1 and allow_is_causal_skip and isinstance(end, int) and end - kv_offset == kv_length:
            return None  # one query that sees every key it is given
        return ends.view(-1, 1, 1, 1).expand(-1, 1, BOUNDS_ROWS, 1)
    starts = (first - kv_offset).clamp(min=0).to(torch.int32)
    both = torch.stack((starts, ends))  # batch innermost, so each half is a contiguous vector
    return both.T[:, None, None].expand(-1, 1, BOUNDS_ROWS, 2)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer.

    query: [batch, num_q_heads, q_len, head_dim]; key, value: [batch, num_kv_heads, keys, head_dim], any strides with
    the last dimension contiguous. attention_mask: what `decode_mask` returned, or the caller's own 4-D mask, bool or
    additive. s_aux: sinks, [num_q_heads]. Returns ([batch, q_len, num_q_heads, v_head_dim], None).

    Raises UnsupportedError for attention weights, dropout, gradients and sparse attention; else what
    decode_attention raises.
    """
    _refuse(query, dropout, kwargs)
    bounds = attention_mask is not None and _check_mask(attention_mask, query)
    sinks = None if s_aux is None else s_aux.reshape(-1).float()
    stored, absorbed = stored_behind(key, value), is_absorbed(module)
    if stored is None and (key.is_meta or value.is_meta) and not query.is_meta:
        raise UnsupportedError(
            f"past_key_values: {type(module).__name__} changes keys or values after the cache; supported for it is a "
            "SplitKVCache without pages and scales, in the model's dtype, got another one"
        )
    if (
        stored is not None
        and attention_mask is not None
        and not bounds
        and not torch.compiler.is_compiling()
        and is_cuda_stream_capturing()
    ):
        raise UnsupportedError(
            "attention_mask: supported in the capture of a step over SplitKVCache is None, as a replay would use this "
            f"length's mask again, got shape {tuple(attention_mask.shape)}"
        )
    if bounds or query.shape[2] == 1:
        if stored is None:
            stored = joined(key, value) if absorbed else StoredKV(key.transpose(1, 2), value.transpose(1, 2))
        query = absorbed_query(module, query) if absorbed else query
        out = _decode(query, stored, key.shape[2], attention_mask, bounds, scaling, softcap, sinks, position_bias)
        return projected(module, out) if absorbed else out, None
    if stored is not None:
        key, value = stored.dense(key.shape[2], query.dtype)
        if absorbed:
            key, value = key.split((value.shape[3], key.shape[3] - value.shape[3]), dim=-1)
    if absorbed:
        key, value = expand(module, key, value)
    if softcap is None and sinks is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, position_bias=position_bias
        )
    elif position_bias is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out = _blockwise(query, key, value, attention_mask, is_causal, scaling, softcap, sinks)
    else:
        raise UnsupportedError("position_bias: supported without softcap and sinks, got it with one of them")
    return out, None


def _check_mask(attention_mask: Tensor, query: Tensor) -> bool:
    """Whether these are bounds. Raises ValueError for what is neither bounds nor a mask of these queries."""
    shape = tuple(attention_mask.shape)
    bounds = attention_mask.dtype == torch.int32
    fits = len(shape) == 4 and (
        shape[2] == BOUNDS_ROWS and shape[3] <= 2 if bounds else shape[2] in (1, query.shape[2])
    )
    if not fits:
        raise ValueError(
            f"attention_mask: expected bool or floating [batch, heads, {query.shape[2]}, keys], or decode_mask's "
            f"bounds as they are, got {attention_mask.dtype} of shape {shape}; for a model that changes masks use "
            "attn_implementation='sdpa'"
        )
    return bounds


def _refuse(query: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions: expected False, as splitkv never forms the weights, got True; use "
            "attn_implementation='eager'"
        )
    if dropout:
        raise UnsupportedError(
            f"dropout: expected 0, as splitkv is for inference, got {dropout}; call model.eval(), or train with 'sdpa'"
        )
    if torch.is_grad_enabled() and query.requires_grad:
        raise UnsupportedError(
            "query: expected no gradient, as splitkv has no backward, got one that requires it; run under "
            "torch.inference_mode() or torch.no_grad(), or train with attn_implementation='sdpa'"
        )
    for name in ("indices", "block_indices"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"{name}: expected None, as splitkv reads all keys, got sparse attention; use "
                "attn_implementation='sdpa'"
            )


def _window(mask_function: Callable, local_size: int | None) -> int | None:
    """0 for a plain causal mask, n for causal within the last n keys, None for any other mask.

    The window's function is a closure, told by its parts; under torch.compile, which cannot read them, it counts as
    another mask.
    """
    if mask_function is causal_mask_function:
        return 0
    if local_size is None or torch.compiler.is_compiling():
        return None
    return local_size if _parts(mask_function) == _parts(sliding_window_causal_mask_function(local_size)) else None


def _parts(function: Any) -> Any:
    """A closure as comparable values: its code, and the parts of what it closes over."""
    if isinstance(function, tuple):
        return tuple(_parts(item) for item in function)
    if not callable(function):
        return function
    cells = getattr(function, "__closure__", None) or ()
    return getattr(function, "__code__", function), tuple(_parts(cell.cell_contents) for cell in cells)


def _left_padding(attention_mask: Tensor, end: int | Tensor) -> Tensor | int | None:
    """First visible key of each row [batch], 0 if that is the first key of all, None if there are gaps after it.

    attention_mask: bool [batch, columns]; columns from `end` on are not keys yet. Reads values: synchronises.
    """
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    visible = attention_mask & (columns < end)
    first = visible.int().argmax(-1)
    gaps = visible.sum(-1) != end - first
    has_gaps, is_padded = torch.stack((gaps.any(), first.any())).tolist()
    if has_gaps:
        return None
    return first.to(torch.int32) if is_padded else 0


def _decode(
    query: Tensor,
    stored: StoredKV,
    keys: int,
    attention_mask: Tensor | None,
    bounds: bool,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    position_bias: Tensor | None,
) -> Tensor:
    """decode_attention over the first `keys` rows that are stored, as far as the mask shows them."""
    seq_lens: Tensor | int = keys
    starts, mask = None, position_bias
    if bounds:
        seq_lens = attention_mask[:, 0, 0, -1].contiguous()  # type: ignore[index]
        if attention_mask.shape[-1] == 2:  # type: ignore[union-attr]
            starts = attention_mask[:, 0, 0, 0].contiguous()  # type: ignore[index]
    elif attention_mask is not None:
        mask = attention_mask
        if mask.dtype == torch.bool:
            starts, seq_lens = _bounds_of(mask, query.shape[0])
        if position_bias is not None:
            mask = position_bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else position_bias + mask
    if stored.seq_lens is not None:
        seq_lens = stored.seq_lens  # the device's, which moves on in a captured graph too
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, stored.capacity - mask.shape[-1]))
    q = query.transpose(1, 2)
    return decode_attention(  # type: ignore[return-value]
        q if q.stride(-1) == 1 else q.contiguous(),
        stored.k_cache,
        stored.v_cache,
        seq_lens,
        block_table=stored.block_table,
        softmax_scale=scaling,
        window=stored.window,
        softcap=softcap,
        sinks=sinks,
        starts=starts,
        mask=mask,
        k_scale=stored.k_scale,
        v_scale=stored.v_scale,
    )


def _bounds_of(mask: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """First visible key and keys up to the last visible one, each [batch] int32, of a bool mask of one query.

    They let the kernel leave out a static cache's unused rows. Nothing visible gives 0 and all keys.
    """
    visible = mask.any(1)[:, -1].expand(batch, -1).to(torch.int32)
    return visible.argmax(-1).to(torch.int32), (mask.shape[-1] - visible.flip(-1).argmax(-1)).to(torch.int32)


def _blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Prefill with a softcap or sinks: softmax over float32 scores, in blocks of queries so that they fit in memory.

    A missing mask means what it means to sdpa: query i sees keys up to i if is_causal, else all.
    """
    batch, num_q_heads, q_len, head_dim = query.shape
    num_kv_heads, keys = key.shape[1:3]
    scaling = head_dim**-0.5 if scaling is None else scaling
    grouped = query.unflatten(1, (num_kv_heads, -1))
    out = query.new_empty(batch, q_len, num_q_heads, value.shape[-1])
    block = max(PREFILL_BLOCK_BYTES // (batch * num_q_heads * keys * 4), 1)
    lowest = torch.finfo(torch.float32).min
    for start in range(0, q_len, block):
        rows = slice(start, min(start + block, q_len))
        queries = grouped[..., rows, :]
        scores = (queries.flatten(2, 3) @ key.transpose(2, 3)).float().view(batch, num_q_heads, -1, keys) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if attention_mask is not None:
            mask = attention_mask[..., rows, :] if attention_mask.shape[-2] > 1 else attention_mask
            scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
        elif is_causal:
            seen = torch.arange(rows.start, rows.stop, device=key.device)[:, None]
            scores = scores.masked_fill(torch.arange(keys, device=key.device) > seen, lowest)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
        weights = scores.softmax(-1)[..., :keys].to(value.dtype)
        part = weights.view(batch, num_kv_heads, -1, keys) @ value
        out[:, rows] = part.view(batch, num_q_heads, -1, value.shape[-1]).transpose(1, 2)
    return out
