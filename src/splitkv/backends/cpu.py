"""Decode attention on the CPU: a C kernel compiled for this machine, or the same splits and tree in torch.

`launch` hands tensors and a plan to cpu_kernel.c (splits, units and the merge tree are described there), which
runs on torch's own OpenMP threads without the GIL. Where no compiler works, it warns once and cpu_fallback.py
answers; `cpu_status` says which and why.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import cpu_fallback
from .cpu_build import BuildError, Library, load_library

if TYPE_CHECKING:
    from ..plan import DecodePlan

_DTYPES = {  # numbered as in cpu_rows.h
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.bool: 5,
    torch.int32: 6,
    torch.int64: 7,
}


class _View(ctypes.Structure):
    """`struct view` of cpu_call.h; all zeros stand for an argument that is absent."""

    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 4), ("dtype", ctypes.c_int64)]

    def show(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.data = tensor.data_ptr()
        self.stride[: tensor.ndim] = [stride * size for stride in tensor.stride()]
        self.dtype = _DTYPES[tensor.dtype]


_VIEWS = ("q", "k", "v", "seq_lens", "block_table", "starts", "mask", "sinks", "k_scale", "v_scale", "out", "lse")
_INTEGERS = (
    *("batch", "q_len", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim"),
    *("capacity", "page_size", "num_pages", "window"),
    *("rule_target", "rule_min_len", "rule_quantum", "max_run", "target_units", "max_units"),
    "num_threads",
)


class _Call(ctypes.Structure):
    """`struct call` of cpu_call.h."""

    _fields_ = [
        *((name, _View) for name in _VIEWS),
        ("workspace", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _INTEGERS),
        ("softmax_scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
    ]


def launch(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor | int,
    block_table: Tensor | None,
    softmax_scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    starts: Tensor | None,
    mask: Tensor | None,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor | None,
    plan: DecodePlan,
) -> None:
    """Fill out [batch, q_len, num_q_heads, v_head_dim] and lse [batch, q_len, num_q_heads].

    Arguments are checked and normalised already: q is [batch, q_len, num_q_heads, head_dim]; window 0 and
    softcap 0.0 stand for none; the mask is expanded to [batch, num_q_heads, q_len, capacity]; scales are numbers
    or f32 [num_kv_heads]. The workspace holds `plan.workspace_bytes`, or is None where the plan never splits.
    """
    library = _library()
    batch, q_len, num_q_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, v_head_dim = v_cache.shape
    heads = (num_kv_heads,)
    tensors: dict[str, Any] = {
        "q": q,
        "k": k_cache,
        "v": v_cache,
        "seq_lens": _expanded(seq_lens, (batch,), torch.int64),
        "block_table": block_table,
        "starts": starts,
        "mask": mask,
        "sinks": sinks,
        "k_scale": _expanded(k_scale, heads, torch.float32),
        "v_scale": _expanded(v_scale, heads, torch.float32),
        "out": out,
        "lse": lse,
    }
    if isinstance(library, str):
        cpu_fallback.attend(**tensors, softmax_scale=softmax_scale, window=window, softcap=softcap, rule=plan.rule)
        return
    call = _Call(
        workspace=None if workspace is None else workspace.data_ptr(),
        batch=batch,
        q_len=q_len,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        capacity=page_size * (1 if block_table is None else block_table.shape[1]),
        page_size=max(page_size, 1),
        num_pages=num_pages,
        window=window,
        rule_target=plan.rule.target,
        rule_min_len=plan.rule.min_len,
        rule_quantum=plan.rule.quantum,
        max_run=plan.max_run,
        target_units=plan.target_units,
        max_units=plan.max_units,
        num_threads=torch.get_num_threads() if library.functions.splitkv_cpu_has_threads() else 1,
        softmax_scale=softmax_scale,
        softcap=softcap,
    )
    for name, tensor in tensors.items():
        if tensor is not None:
            getattr(call, name).show(tensor)
    _raise_for(library.functions.splitkv_cpu_decode(ctypes.byref(call)), plan)


def cpu_status() -> tuple[str, str]:
    """("native", what was compiled, by what, and where it lies) or ("fallback", why there is no native kernel)."""
    library = _library()
    if isinstance(library, str):
        return "fallback", library
    isa = library.functions.splitkv_cpu_isa().decode()
    threads = "OpenMP" if library.functions.splitkv_cpu_has_threads() else "one thread, as the compiler has no OpenMP"
    return "native", f"{isa}, {threads}, {library.compiler}, {library.path}"


@functools.cache
def _library() -> Library | str:
    """The compiled kernel, or the reason why there is none; found, and complained about, once per process."""
    try:
        library = load_library()
        functions = library.functions
        functions.splitkv_cpu_isa.restype = ctypes.c_char_p
        functions.splitkv_cpu_call_bytes.restype = ctypes.c_int64
        if functions.splitkv_cpu_call_bytes() != ctypes.sizeof(_Call):
            raise BuildError("cpu.py and cpu_call.h disagree about the layout of a call")
    except BuildError as error:
        warnings.warn(
            f"splitkv: no native CPU kernel, attention runs in plain torch and is slow: {error}", stacklevel=3
        )
        return str(error)
    return library


def _expanded(value: Tensor | float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype).expand(shape)


def _raise_for(status: int, plan: DecodePlan) -> None:
    if status == 1:
        raise MemoryError("cpu backend: no memory for the threads' scratch")
    if status == 2:
        raise ValueError(f"workspace: this call needs more than the plan's {plan.max_units} partial results")
