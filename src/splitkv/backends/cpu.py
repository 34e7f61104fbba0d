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
from array import array
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import record_function

from . import TENSORS, cpu_fallback
from .cpu_build import BuildError, Library, load_library
from .launching import addresses_of

if TYPE_CHECKING:
    from ..plan import DecodePlan

DTYPES = {  # numbered as in cpu_rows.h
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.bool: 5,
    torch.int32: 6,
    torch.int64: 7,
}
_NUMBERS: dict[type, int] = {ctypes.c_float: DTYPES[torch.float32], ctypes.c_int64: DTYPES[torch.int64]}
NO_MEMORY, _PLAN_TOO_SMALL = 1, 2  # enum status of cpu_kernel.c

_ABSENT = (0,) * 6
_CALL = struct.Struct("@" + 12 * "6q" + "q" + "17q" + "2d")
"""`struct call` of cpu_call.h: 12 views (address, 4 strides in bytes, dtype), the workspace, integers, floats."""
_VIEWS = (
    "q", "k_cache", "v_cache", "seq_lens", "block_table", "starts", "mask", "sinks", "k_scale", "v_scale", "out", "lse",
)  # fmt: skip
_WORDS_OF_VIEW = 6
_ADDRESSES = slice(0, len(_VIEWS) * _WORDS_OF_VIEW + 1, _WORDS_OF_VIEW)
"""Of the views and, behind the last of them, of the workspace, in 64-bit words."""
_SOURCES = tuple(TENSORS.index(name) for name in (*_VIEWS, "workspace"))
_LENS = _VIEWS.index("seq_lens")
_NUM_THREADS = len(_VIEWS) * _WORDS_OF_VIEW + 17


def launch(*, seq_lens: Tensor | int, **arguments: Any) -> None:
    """Fill out [batch, q_len, num_q_heads, v_head_dim] and lse [batch, q_len, num_q_heads].

    Arguments are checked and normalised already: q is [batch, q_len, num_q_heads, head_dim]; window 0 and
    softcap 0.0 stand for none; the mask is expanded to [batch, num_q_heads, q_len, capacity]; scales are numbers
    or f32 [num_kv_heads]. The workspace holds `plan.workspace_bytes`, or is None where the plan never splits.
    """
    arguments |= dict(seq_lens=seq_lens)
    prepared = prepare(**arguments)
    if prepared is None:
        _attend_in_torch(**arguments)
        return
    prepared(addresses_of(arguments), 0 if isinstance(seq_lens, Tensor) else seq_lens)


def prepare(**arguments: Any) -> CpuLaunch | None:
    """`launch` with all but addresses and a uniform length fixed (backends.PreparedLaunch); None without a compiler."""
    library = _library()
    return None if isinstance(library, str) else CpuLaunch(library, **arguments)


class CpuLaunch:
    """One call of the native kernel. Holds no tensor."""

    def __init__(
        self,
        library: Library,
        *,
        q: Tensor,
        v_cache: Tensor,
        seq_lens: Tensor | int,
        block_table: Tensor | None,
        softmax_scale: float,
        window: int,
        softcap: float,
        plan: DecodePlan,
        **tensors: Any,
    ) -> None:
        self._functions = library.functions
        self._max_units = plan.max_units
        tensors |= dict(q=q, v_cache=v_cache, block_table=block_table)
        tensors["seq_lens"] = seq_lens if isinstance(seq_lens, Tensor) else ctypes.c_int64(0)
        for name in ("k_scale", "v_scale"):
            if not isinstance(tensors[name], Tensor):
                tensors[name] = ctypes.c_float(tensors[name])
        self._numbers = [(i, value) for i, name in enumerate(_VIEWS) if type(value := tensors[name]) in _NUMBERS]
        batch, q_len, num_q_heads, head_dim = q.shape
        num_pages, page_size, num_kv_heads, v_head_dim = v_cache.shape
        capacity = page_size * (1 if block_table is None else block_table.shape[1])
        rule = plan.rule
        self._call = _CALL.pack(
            *itertools.chain.from_iterable(_view(tensors[name]) for name in _VIEWS),
            0,
            *(batch, q_len, num_q_heads, num_kv_heads, head_dim, v_head_dim),
            *(capacity, max(page_size, 1), num_pages, window),
            *(rule.target, rule.min_len, rule.quantum, plan.max_run, plan.target_units, plan.max_units),
            1,
            softmax_scale,
            softcap,
        )
        self._threads: bool = self._functions.splitkv_cpu_has_threads()
        self.variant: Hashable = "cpu"

    def __call__(self, addresses: Sequence[int], uniform_len: int) -> None:
        """Raises MemoryError, ValueError (a workspace that is too small for what its lengths make of a plan)."""
        length = ctypes.c_int64(uniform_len)
        views = [addresses[source] for source in _SOURCES]
        for i, number in self._numbers:
            views[i] = ctypes.addressof(length if i == _LENS else number)
        call = bytearray(self._call)
        words = memoryview(call).cast("q")
        words[_ADDRESSES] = array("q", views)
        if self._threads:
            words[_NUM_THREADS] = torch.get_num_threads()
        with in_profiles("splitkv::cpu_decode"):
            status = self._functions.splitkv_cpu_decode(bytes(call))
        if status == NO_MEMORY:
            raise MemoryError("cpu backend: no memory for the threads' scratch")
        if status == _PLAN_TOO_SMALL:
            raise ValueError(f"workspace: this call needs more than the plan's {self._max_units} partial results")


def _attend_in_torch(*, k_cache: Tensor, v_cache: Tensor, plan: DecodePlan, workspace: Any, **arguments: Any) -> None:
    cpu_fallback.attend(k=k_cache, v=v_cache, rule=plan.rule, **arguments)


def _view(argument: Any) -> tuple[int, ...]:
    """A tensor, or one number for all rows or heads (strides 0), or nothing, as `struct view`."""
    if argument is None:
        return _ABSENT
    if not isinstance(argument, Tensor):
        return (ctypes.addressof(argument), 0, 0, 0, 0, _NUMBERS[type(argument)])
    size, strides = argument.element_size(), argument.stride()
    padding = _ABSENT[: 4 - len(strides)]
    return (argument.data_ptr(), *(stride * size for stride in strides), *padding, DTYPES[argument.dtype])


def cpu_status() -> tuple[str, str]:
    """("native", what was compiled, by what, and where it lies) or ("fallback", why there is no native kernel)."""
    library = _library()
    if isinstance(library, str):
        return "fallback", library
    isa = library.functions.splitkv_cpu_isa().decode()
    threads = "OpenMP" if library.functions.splitkv_cpu_has_threads() else "one thread, as the compiler has no OpenMP"
    return "native", f"{isa}, {threads}, {library.compiler}, {library.path}"


def in_profiles(name: str) -> AbstractContextManager[Any]:
    """A call of the library under a name of its own, where somebody profiles: torch sees none of its own in it."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


def native_functions() -> ctypes.CDLL | None:
    """What the compiled library exports, or None where there is none."""
    library = _library()
    return None if isinstance(library, str) else library.functions


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
