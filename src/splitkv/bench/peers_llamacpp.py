"""llama.cpp's CPU attention: ggml_flash_attn_ext over the benchmark's own memory, through the libraries that come
inside llama-cpp-python.

A graph of one node for each KV set, made outside the call; the call is ggml_backend_graph_compute, as in llama.cpp's
decode. Keys lie as in llama.cpp's cache, [keys, num_kv_heads, head_dim]. There is no mask, which llama.cpp always has
and reads. ggml ends the process on what it does not expect, so what it cannot do is refused here.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .attention_cases import AttentionCase
from .attention_data import CaseTensors
from .contender import Contender, first_reason, installed
from .llamacpp_worker import KV_TYPES
from .machine import usable_cores
from .timing import Call

PACKAGE = "llama-cpp-python"
_ALIGNMENT = 32
_NODES = 16
"""Tensors of one graph, with room to spare."""
_SIZES = (ctypes.c_int64,) * 4
_POINTER = ctypes.c_void_p


class _InitParams(ctypes.Structure):
    """ggml_init_params: bytes of the context, memory for it, and whether tensors get none there."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", _POINTER), ("no_alloc", ctypes.c_bool))


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_POINTER, (_InitParams,)),
    "ggml_tensor_overhead": (ctypes.c_size_t, ()),
    "ggml_graph_overhead": (ctypes.c_size_t, ()),
    "ggml_new_tensor_4d": (_POINTER, (_POINTER, ctypes.c_int, *_SIZES)),
    "ggml_view_4d": (_POINTER, (_POINTER, _POINTER, *_SIZES, *(ctypes.c_size_t,) * 4)),
    "ggml_permute": (_POINTER, (_POINTER, _POINTER, *(ctypes.c_int,) * 4)),
    "ggml_flash_attn_ext": (_POINTER, (_POINTER, *(_POINTER,) * 4, *(ctypes.c_float,) * 3)),
    "ggml_new_graph": (_POINTER, (_POINTER,)),
    "ggml_build_forward_expand": (None, (_POINTER, _POINTER)),
    "ggml_backend_cpu_buffer_from_ptr": (_POINTER, (_POINTER, ctypes.c_size_t)),
    "ggml_backend_tensor_alloc": (ctypes.c_int, (_POINTER, _POINTER, _POINTER)),
    "ggml_backend_graph_compute": (ctypes.c_int, (_POINTER, _POINTER)),
    "ggml_backend_cpu_init": (_POINTER, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_POINTER, ctypes.c_int)),
    "ggml_free": (None, (_POINTER,)),
    "ggml_backend_free": (None, (_POINTER,)),
    "ggml_backend_buffer_free": (None, (_POINTER,)),
}


@cache
def _ggml() -> Any:
    """An object with the functions above. RuntimeError where the libraries are not as expected."""
    spec = importlib.util.find_spec("llama_cpp")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    libraries = [ctypes.CDLL(str(Path(folders[0]) / "lib" / f"lib{name}.so")) for name in ("ggml-base", "ggml-cpu")]
    found = type("Ggml", (), {})()
    for name, (result, arguments) in _FUNCTIONS.items():
        function = next((getattr(library, name) for library in libraries if hasattr(library, name)), None)
        if function is None:
            raise RuntimeError(f"{name}: not in the libraries of {PACKAGE}")
        function.restype, function.argtypes = result, arguments
        setattr(found, name, function)
    return found


class _Graphs:
    """One graph for each KV set of a case, all with the same query and output, and the backend that runs them."""

    def __init__(self, tensors: CaseTensors) -> None:
        case, self._lib = tensors.case, _ggml()
        self._backend: Any = None
        self._contexts: list[Any] = []
        self._buffers: list[Any] = []
        self._kept = [tensors.q4.float().contiguous()]
        self.out = torch.empty((case.batch, case.q_len, case.num_q_heads, case.v_dim))
        self._backend = self._lib.ggml_backend_cpu_init()
        self._lib.ggml_backend_cpu_set_n_threads(self._backend, usable_cores())
        self._graphs = [self._graph(case, *tensors.rows(i)) for i in range(tensors.sets)]

    def run(self, i: int) -> Tensor:
        """Attention over set i."""
        if status := self._lib.ggml_backend_graph_compute(self._backend, self._graphs[i]):
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
        return self.out

    def _graph(self, case: AttentionCase, k: Tensor, v: Tensor) -> Any:
        lib, overhead = self._lib, self._lib.ggml_tensor_overhead()
        context = lib.ggml_init(_InitParams(_NODES * overhead + lib.ggml_graph_overhead(), None, True))
        self._contexts.append(context)
        q = self._placed(context, self._kept[0], "f32")
        keys, values = (self._placed(context, t, case.kv_dtype, case.seq_len) for t in (k, v))
        scale = case.head_dim**-0.5
        node = lib.ggml_flash_attn_ext(context, q, keys, values, None, scale, 0.0, 0.0)
        self._put(node, self.out)
        graph = lib.ggml_new_graph(context)
        lib.ggml_build_forward_expand(graph, node)
        return graph

    def _placed(self, context: Any, t: Tensor, dtype: str, length: int | None = None) -> Any:
        """A tensor [batch, tokens, heads, dim] as ggml has it for attention, the first `length` tokens of each row."""
        lib, (batch, tokens, heads, dim) = self._lib, t.shape
        whole = lib.ggml_new_tensor_4d(context, KV_TYPES[dtype], dim, heads, tokens, batch)
        self._put(whole, t)
        strides = [stride * t.element_size() for stride in (t.stride(2), t.stride(1), t.stride(0))]
        part = lib.ggml_view_4d(context, whole, dim, heads, length or tokens, batch, *strides, 0)
        return lib.ggml_permute(context, part, 0, 2, 1, 3)

    def _put(self, tensor: Any, t: Tensor) -> None:
        """Give a ggml tensor the memory of a contiguous torch tensor."""
        if t.data_ptr() % _ALIGNMENT or not t.is_contiguous():
            raise RuntimeError(f"ggml wants contiguous memory on {_ALIGNMENT} bytes, got {t.data_ptr():#x}")
        buffer = self._lib.ggml_backend_cpu_buffer_from_ptr(t.data_ptr(), t.numel() * t.element_size())
        self._buffers.append(buffer)
        if status := self._lib.ggml_backend_tensor_alloc(buffer, tensor, t.data_ptr()):
            raise RuntimeError(f"ggml_backend_tensor_alloc returned {status}")

    def __del__(self) -> None:
        for context in self._contexts:
            self._lib.ggml_free(context)
        for buffer in self._buffers:
            self._lib.ggml_backend_buffer_free(buffer)
        self._lib.ggml_backend_free(self._backend)


def _unable(case: AttentionCase) -> str | None:
    return first_reason(
        (not installed("llama_cpp"), f"{PACKAGE} is not installed"),
        (case.kv_dtype not in KV_TYPES, "does not read fp8"),
        (bool(case.lens), "does not run rows of different lengths"),
        (case.page_size is not None, "does not read pages"),
        (bool(case.capacity), "not run over rows that share their spare capacity"),
        (case.q_len > 1, "several queries need its mask, not built here"),
    )


def _make(tensors: CaseTensors) -> Call:
    graphs = _Graphs(tensors)
    return lambda i: graphs.run(i).view(tensors.out_shape)


CONTENDERS = (
    Contender(
        "llama.cpp",
        "ggml_flash_attn_ext of llama.cpp on the CPU: q in f32, no mask, all cores",
        _unable,
        _make,
        (PACKAGE,),
        ("cpu",),
        half_sums=True,
    ),
)
