"""FlashAttention-3 from the wheels that hold its forward pass: tokenspeed-fa3, and fa3-fwd for head sizes 192/128.

FA3 multiplies fp8 keys by an fp8 query, so on an fp8 cache the query is rounded to e4m3 first (outside the timed
call) and the error is ten times that of the kernels that keep it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from .attention_cases import AttentionCase
from .attention_data import CaseTensors
from .contender import Contender, first_reason, installed
from .timing import Call

PAGED_MODULE, UNEVEN_MODULE = "flash_attn_interface", "fa3_fwd_interface"
"""Of tokenspeed-fa3 (pages, f16, bf16, e4m3) and of fa3-fwd (bf16, e4m3, no pages, K and V of different sizes)."""


def _module(case: AttentionCase) -> str:
    return UNEVEN_MODULE if case.v_dim != case.head_dim or not installed(PAGED_MODULE) else PAGED_MODULE


def _unable(case: AttentionCase) -> str | None:
    package = "fa3-fwd" if case.v_dim != case.head_dim else "tokenspeed-fa3"
    return first_reason(
        (not installed(_module(case)), f"{package} is not installed"),
        (case.kv_dtype == "f32", "does not run f32"),
    )


def _unable_contiguous(case: AttentionCase) -> str | None:
    return _unable(case) or first_reason((case.page_size is not None, "this contender reads contiguous caches"))


def _unable_paged(case: AttentionCase) -> str | None:
    return _unable(case) or first_reason((_module(case) == UNEVEN_MODULE, "fa3-fwd has no pages"))


def _attend(tensors: CaseTensors) -> tuple[Any, dict[str, Any]]:
    """The function and the arguments that both layouts share."""
    case = tensors.case
    attend = importlib.import_module(_module(case)).flash_attn_with_kvcache
    q = tensors.q4.to(torch.float8_e4m3fn) if case.kv_dtype == "fp8_e4m3" else tensors.q4
    return attend, {"q": q, "softmax_scale": case.head_dim**-0.5, "causal": case.q_len > 1}


def _contiguous(tensors: CaseTensors) -> Call:
    attend, shared = _attend(tensors)

    def call(i: int) -> Tensor:
        k, v = tensors.valid_rows(i)
        return attend(k_cache=k, v_cache=v, **shared).view(tensors.out_shape)

    return call


def _paged(tensors: CaseTensors) -> Call:
    attend, shared = _attend(tensors)
    lens, table = tensors.seq_lens, tensors.pages.block_table

    def call(i: int) -> Tensor:
        k, v = tensors.pool(i)
        return attend(k_cache=k, v_cache=v, cache_seqlens=lens, page_table=table, **shared).view(tensors.out_shape)

    return call


CONTENDERS = (
    Contender(
        "fa3",
        "FlashAttention-3 flash_attn_with_kvcache, contiguous, lengths known to the host",
        _unable_contiguous,
        _contiguous,
        ("tokenspeed-fa3", "fa3-fwd"),
        quantises=True,
    ),
    Contender(
        "fa3-paged",
        "FlashAttention-3 flash_attn_with_kvcache, page_table and cache_seqlens on the device",
        _unable_paged,
        _paged,
        ("tokenspeed-fa3",),
        quantises=True,
    ),
)
