"""FlashInfer (flashinfer-python 0.6): CUDA-core decode, tensor-core decode, and XQA.

It compiles a module per combination of dtypes, head size and (XQA) page and group size with nvcc and ninja; `build`
compiles those of a whole run side by side before anything is timed. A module takes minutes of a core, so what bf16 and
pages of 16 show already is not compiled again for f16 (but on CUDA cores) and for XQA on other pages. `plan` runs
outside the timed call, once, as a server runs it once per step for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from .attention_cases import PAGE_OF_PEERS, AttentionCase
from .attention_data import CaseTensors
from .cases import torch_dtype
from .contender import Contender, first_reason, installed
from .timing import Call

PACKAGE = "flashinfer-python"
WORKSPACE_BYTES = 384 << 20
"""Scratch given to each wrapper; its documentation recommends 128 MiB."""
BUILDS_AT_ONCE, BUILD_MESSAGE = 4, 400
"""Modules compiled at a time, each in up to ten processes of about a gigabyte; characters kept of a complaint."""
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
CUDA, TENSOR, XQA = "flashinfer-cuda", "flashinfer-tensor", "flashinfer-xqa"


def _unable(case: AttentionCase) -> str | None:
    return first_reason(
        (not installed("flashinfer"), f"{PACKAGE} is not installed"),
        (case.kv_dtype == "f32", "does not run f32"),
    )


def _unable_on_cuda_cores(case: AttentionCase) -> str | None:
    group = case.num_q_heads // case.num_kv_heads
    return _unable(case) or first_reason(
        (case.q_len > 1, "one query per row only"),
        (case.v_dim != case.head_dim, "runs equal head sizes of K and V only"),
        (group not in CUDA_CORE_GROUPS, f"runs groups of {CUDA_CORE_GROUPS} heads, not {group}"),
    )


def _unable_on_tensor_cores(case: AttentionCase) -> str | None:
    return _unable(case) or first_reason((case.kv_dtype == "f16", "compiled for bf16 and fp8 caches only, here"))


def _unable_in_xqa(case: AttentionCase) -> str | None:
    return _unable_on_tensor_cores(case) or first_reason(
        (case.pool_page != PAGE_OF_PEERS, f"compiled for pages of {PAGE_OF_PEERS} only, here"),
        (case.q_len > 1, "one query per row only, here"),
        (case.v_dim != case.head_dim, "runs equal head sizes of K and V only"),
    )


def _workspace(tensors: CaseTensors) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=tensors.device)


def _dtypes(case: AttentionCase) -> dict[str, torch.dtype]:
    return {"q_data_type": torch_dtype(case.q_dtype), "kv_data_type": torch_dtype(case.kv_dtype)}


def _new_out(tensors: CaseTensors) -> Tensor:
    """[batch * q_len, num_q_heads, v_head_dim], written by every call."""
    case = tensors.case
    shape = (case.batch * case.q_len, case.num_q_heads, case.v_dim)
    return torch.empty(shape, dtype=tensors.q.dtype, device=tensors.device)


def _decode(tensor_cores: bool) -> Any:
    def make(tensors: CaseTensors) -> Call:
        case, pages = tensors.case, tensors.pages
        if case.q_len > 1 or case.v_dim != case.head_dim:
            return _append(tensors)
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        backend = "fa2" if tensor_cores else "auto"
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            _workspace(tensors), "NHD", use_tensor_cores=tensor_cores, backend=backend
        )
        heads = (case.num_q_heads, case.num_kv_heads, case.head_dim)
        lists = (pages.indptr, pages.indices, pages.last_page_len)
        wrapper.plan(*lists, *heads, case.pool_page, **_dtypes(case))
        out = _new_out(tensors)

        def call(i: int) -> Tensor:
            wrapper.run(tensors.q, tensors.pool(i), out=out)
            return out

        return call

    return make


def _append(tensors: CaseTensors) -> Call:
    """Several queries per row, or head sizes that differ: the tensor-core kernels through the prefill wrapper."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    case, pages = tensors.case, tensors.pages
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(tensors), "NHD", backend="fa2")
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=tensors.device) * case.q_len
    lists = (starts, pages.indptr, pages.indices, pages.last_page_len)
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim)
    wrapper.plan(*lists, *heads, case.pool_page, head_dim_vo=case.v_dim, causal=case.q_len > 1, **_dtypes(case))
    q, out = tensors.q4.flatten(0, 1), _new_out(tensors)

    def call(i: int) -> Tensor:
        wrapper.run(q, tensors.pool(i), out=out)
        return out.view(tensors.out_shape)

    return call


def _xqa(tensors: CaseTensors) -> Call:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    case, table = tensors.case, tensors.pages.block_table
    workspace, out = _workspace(tensors), _new_out(tensors)
    lens = tensors.seq_lens.view(torch.uint32)
    longest = table.shape[1] * case.pool_page

    def call(i: int) -> Tensor:
        cache = tensors.pool(i)
        scale = case.head_dim**-0.5
        xqa_batch_decode_with_kv_cache(tensors.q, cache, workspace, table, lens, longest, scale, 1.0, out=out)
        return out

    return call


CONTENDERS = (
    Contender(
        CUDA,
        "FlashInfer BatchDecodeWithPagedKVCacheWrapper on CUDA cores",
        _unable_on_cuda_cores,
        _decode(False),
        (PACKAGE,),
    ),
    Contender(
        TENSOR,
        "FlashInfer tensor-core decode (fa2); BatchPrefillWithPagedKVCacheWrapper for several queries or 192/128",
        _unable_on_tensor_cores,
        _decode(True),
        (PACKAGE,),
    ),
    Contender(XQA, "FlashInfer xqa_batch_decode_with_kv_cache", _unable_in_xqa, _xqa, (PACKAGE,), quantises=True),
)


def build(contenders: Sequence[Contender], cases: Sequence[AttentionCase]) -> dict[str, str | None]:
    """Compile every module that these contenders need for these cases; returns what was raised by module, or None.

    Modules built before (FlashInfer keeps them on disk) cost a moment. A module that fails is met again by its case.
    """
    names = {contender.name for contender in contenders}
    specs = {spec.name: spec for name in (TENSOR, XQA, CUDA) if name in names for spec in _specs(name, cases)}
    with ThreadPoolExecutor(BUILDS_AT_ONCE) as pool:
        return dict(zip(specs, pool.map(_built, specs.values()), strict=True))


def _built(spec: Any) -> str | None:
    try:
        if not spec.is_aot:
            spec.build(verbose=False)
    except Exception as failure:  # a compiler's complaint, whatever its form, must not end the run
        return f"{type(failure).__name__}: {failure}"[-BUILD_MESSAGE:]
    return None


def _specs(name: str, cases: Sequence[AttentionCase]) -> list[Any]:
    unable = next(contender.unable for contender in CONTENDERS if contender.name == name)
    able = [case for case in cases if not case.cost_only and unable(case) is None]
    if not able:
        return []
    from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.xqa import gen_xqa_module

    specs = []
    for case in able:
        q, kv = torch_dtype(case.q_dtype), torch_dtype(case.kv_dtype)
        attention = (q, kv, q, torch.int32, case.head_dim, case.v_dim, 0, False, False)
        if name == CUDA:
            specs.append(gen_batch_decode_module(*attention))
        elif name == TENSOR:
            specs.append(gen_batch_prefill_module("fa2", *attention, False))
        else:
            group = case.num_q_heads // case.num_kv_heads
            specs.append(gen_xqa_module(q, kv, case.pool_page, case.head_dim, group, False, q, 1))
    return specs
