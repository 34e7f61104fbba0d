"""splitkv itself and what PyTorch has: scaled_dot_product_attention by backend, and flex_attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import splitkv

from ..tuning import Schedule
from .attention_cases import AttentionCase
from .attention_data import HEAD_MAJOR, CaseTensors
from .contender import OURS, Contender, Make, Unable, first_reason
from .timing import Call

FLEX_LONGEST = 8192
"""Keys beyond which flex_attention is left out: it takes milliseconds there, and seconds to compile each shape."""
MATH_MOST_KEYS = 1 << 17
"""Keys in all rows beyond which PyTorch's fallback is left out."""


def make_ours(tensors: CaseTensors, schedule: Schedule | None = None) -> Call:
    """DecodeAttention with policy auto: workspace and merge inside the call, which takes options of `run` too."""
    case = tensors.case
    attention = splitkv.DecodeAttention(case.problem, device=tensors.device, schedule=schedule)
    out = torch.empty(tensors.out_shape, dtype=tensors.q.dtype, device=tensors.device)
    cache = tensors.pool if case.page_size else tensors.rows
    table = tensors.pages.block_table if case.page_size else None

    def call(i: int, **options: Any) -> Any:
        k, v = cache(i)
        return attention.run(tensors.q, k, v, tensors.seq_lens, block_table=table, out=out, **options)

    return call


def _unable_in_torch(case: AttentionCase) -> str | None:
    return first_reason(
        (case.kv_dtype.startswith("fp8"), "does not read fp8"),
        (bool(case.lens), "does not run rows of different lengths"),
        (case.page_size is not None, "does not read pages"),
    )


def _unable_in_flash(case: AttentionCase) -> str | None:
    return _unable_in_torch(case) or first_reason(
        (case.kv_dtype == "f32", "does not run f32"),
        (case.v_dim != case.head_dim, "runs equal head sizes of K and V only"),
    )


def _unable_in_cudnn(case: AttentionCase) -> str | None:
    return _unable_in_torch(case) or first_reason((case.kv_dtype == "f32", "does not run f32"))


def _unable_in_math(case: AttentionCase) -> str | None:
    return _unable_in_torch(case) or first_reason(
        (case.kv_dtype != "f32", "PyTorch's fallback, run for f32 alone"),
        (case.seq_len * case.batch > MATH_MOST_KEYS, f"copies keys per query head: over {MATH_MOST_KEYS} left out"),
    )


def _unable_in_flex(case: AttentionCase) -> str | None:
    return _unable_in_torch(case) or first_reason(
        (case.seq_len > FLEX_LONGEST, f"takes milliseconds: over {FLEX_LONGEST} keys left out"),
        (case.q_len > 1 or case.batch > 1 or case.kv_dtype == "f32", "compiles for seconds: one 16-bit query only"),
    )


def _sdpa(backend: str | None) -> Make:
    """Head-major contiguous caches, the layout of PyTorch's own caches; `backend` names an SDPBackend."""

    def make(tensors: CaseTensors) -> Call:
        return lambda i: _attend(tensors, backend, *tensors.head_major(i))

    return make


def _attend(tensors: CaseTensors, backend: str | None, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    case = tensors.case
    q = tensors.q4.transpose(1, 2)
    mask: Any = tensors.causal
    if mask is not None and backend == "FLASH_ATTENTION":  # it takes no tensor as a mask
        mask = causal_lower_right(case.q_len, case.seq_len)
    attend = torch.nn.functional.scaled_dot_product_attention
    if backend is None:
        out = attend(q, k, v, attn_mask=mask, enable_gqa=True)
    else:
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            out = attend(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).reshape(tensors.out_shape)


def _flex(tensors: CaseTensors) -> Call:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    q = tensors.q4.transpose(1, 2)

    def call(i: int) -> Tensor:
        return compiled(q, *tensors.head_major(i), enable_gqa=True).transpose(1, 2).reshape(tensors.out_shape)

    return call


def _torch(name: str, what: str, unable: Unable, make: Make, device: str = "cuda") -> Contender:
    return Contender(name, what, unable, make, devices=(device,), layout=HEAD_MAJOR)


_SDPA = "torch scaled_dot_product_attention(enable_gqa=True), head-major caches"
CONTENDERS = (
    Contender(
        OURS,
        "splitkv.DecodeAttention.run, policy auto, with its workspace and merge",
        lambda case: None,
        make_ours,
        ("splitkv",),
        ("cuda", "cpu"),
    ),
    _torch("sdpa", f"{_SDPA}, PyTorch's own choice", _unable_in_torch, _sdpa(None), device="cpu"),
    _torch("sdpa-flash", f"{_SDPA}, FLASH_ATTENTION", _unable_in_flash, _sdpa("FLASH_ATTENTION")),
    _torch("sdpa-cudnn", f"{_SDPA}, CUDNN_ATTENTION", _unable_in_cudnn, _sdpa("CUDNN_ATTENTION")),
    _torch("sdpa-math", f"{_SDPA}, MATH", _unable_in_math, _sdpa("MATH")),
    _torch("flex", "torch flex_attention, compiled per shape, head-major caches", _unable_in_flex, _flex),
)
