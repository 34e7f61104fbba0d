"""`torch.ops.splitkv.decode_attention`: the call as an operator, for torch.compile and opcheck.

One functional operator: it mutates nothing and returns (out, lse). Scales come as a tensor or as a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import decode_attention


@torch.library.custom_op("splitkv::decode_attention", mutates_args=())
def _decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor | None,
    uniform_len: int,
    block_table: Tensor | None,
    softmax_scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    starts: Tensor | None,
    mask: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scale_value: float | None,
    v_scale_value: float | None,
    policy: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return decode_attention(  # type: ignore[return-value]
        q,
        k_cache,
        v_cache,
        uniform_len if seq_lens is None else seq_lens,
        block_table=block_table,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        starts=starts,
        mask=mask,
        k_scale=k_scale_value if k_scale is None else k_scale,
        v_scale=v_scale_value if v_scale is None else v_scale,
        policy=policy,
        backend=backend,
        return_lse=True,
    )


@_decode_attention.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)
