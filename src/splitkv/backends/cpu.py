"""Decode attention on the CPU: a C kernel compiled for this machine, or the same splits and tree in torch.

`launch` hands tensors and a plan to cpu_kernel.c (splits, units and the merge tree are described there), which
runs on torch's own OpenMP threads without the GIL. Where no compiler works, it warns once and cpu_fallback.py
answers; `cpu_status` says which and why.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
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
_NUMBERS: dict[type, int] = {ctypes.c_float: _DTYPES[torch.float32], ctypes.c_int64: _DTYPES[torch.int64]}
_NO_MEMORY, _PLAN_TOO_SMALL = 1, 2  # enum status of cpu_kernel.c

_ABSENT = (0,) * 6
_CALL = struct.Struct("@" + 12 * "6q" + "q" + "17q" + "2d")
"""`struct call` of cpu_call.h: 12 views (address, 4 strides in bytes, dtype), the workspace, integers, floats."""


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
    arguments: dict[str, Any] = {
        "q": q,
        "k": k_cache,
        "v": v_cache,
        "seq_lens": seq_lens,
        "block_table": block_table,
        "starts": starts,
        "mask": mask,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "out": out,
        "lse": lse,
    }
    if isinstance(library, str):
        cpu_fallback.attend(**arguments, softmax_scale=softmax_scale, window=window, softcap=softcap, rule=plan.rule)
        return
    if not isinstance(seq_lens, Tensor):
        arguments["seq_lens"] = ctypes.c_int64(seq_lens)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not isinstance(scale, Tensor):
            arguments[name] = ctypes.c_float(scale)
    batch, q_len, num_q_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, v_head_dim = v_cache.shape
    functions = library.functions
    capacity = page_size * (1 if block_table is None else block_table.shape[1])
    rule, max_run, target_units, max_units = plan.rule, plan.max_run, plan.target_units, plan.max_units
    call = _CALL.pack(
        *itertools.chain.from_iterable(map(_view, arguments.values())),
        0 if workspace is None else workspace.data_ptr(),
        *(batch, q_len, num_q_heads, num_kv_heads, head_dim, v_head_dim),
        *(capacity, max(page_size, 1), num_pages, window),
        *(rule.target, rule.min_len, rule.quantum, max_run, target_units, max_units),
        torch.get_num_threads() if functions.splitkv_cpu_has_threads() else 1,
        softmax_scale,
        softcap,
    )
    status = functions.splitkv_cpu_decode(call)
    if status == _NO_MEMORY:
        raise MemoryError("cpu backend: no memory for the threads' scratch")
    if status == _PLAN_TOO_SMALL:
        raise ValueError(f"workspace: this call needs more than the plan's {max_units} partial results")


def _view(argument: Any) -> tuple[int, ...]:
    """A tensor, or one number for all rows or heads (strides 0), or nothing, as `struct view`."""
    if argument is None:
        return _ABSENT
    if not isinstance(argument, Tensor):
        return (ctypes.addressof(argument), 0, 0, 0, 0, _NUMBERS[type(argument)])
    size, strides = argument.element_size(), argument.stride()
    padding = _ABSENT[: 4 - len(strides)]
    return (argument.data_ptr(), *(stride * size for stride in strides), *padding, _DTYPES[argument.dtype])


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
        if functions.splitkv_cpu_call_bytes() != _CALL.size:
            raise BuildError("cpu.py and cpu_call.h disagree about the layout of a call")
    except BuildError as error:
        warnings.warn(
            f"splitkv: no native CPU kernel, attention runs in plain torch and is slow: {error}", stacklevel=3
        )
        return str(error)
    return library
