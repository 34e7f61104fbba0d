"""Products of a few rows with a weight on the CPU, by the C library of cpu.py: as fast as the weight can be read."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from .cpu import DTYPES, NO_MEMORY, in_profiles, native_functions

PRODUCT_ROWS = 4
"""Most rows; PRODUCT_ROWS of cpu_product.h."""
PRODUCT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CALL = struct.Struct("@10q")
"""`struct product_call` of cpu_product.h."""
_LEAST_BYTES_PER_THREAD = 32 * 1024
"""Of weight: what takes less time to read than a thread to start."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """x [rows, columns] @ weight [outs, columns].T + bias [outs], summed in f32 and rounded once; None where this does
    not take them: rows above PRODUCT_ROWS, other dtypes, shapes that do not fit, a weight that is not contiguous, no C
    compiler.

    Bytes of a row do not depend on the other rows, nor on the number of threads. Raises MemoryError.
    """
    rows, columns = x.shape
    dtype = x.dtype
    if not 0 < rows <= PRODUCT_ROWS or dtype not in PRODUCT_DTYPES or weight.dtype != dtype or x.stride(1) != 1:
        return None
    if weight.shape[1] != columns or weight.device != x.device or not weight.is_contiguous():
        return None
    if bias is not None and (bias.dtype != dtype or bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        return None
    functions = native_functions()
    if functions is None:
        return None
    outs = weight.shape[0]
    out = x.new_empty(rows, outs)
    size = x.element_size()
    threads = max(min(torch.get_num_threads(), outs * columns * size // _LEAST_BYTES_PER_THREAD), 1)
    call = _CALL.pack(
        weight.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        rows, columns, outs, x.stride(0) * size, DTYPES[dtype], threads,
    )  # fmt: skip
    with in_profiles("splitkv::cpu_product"):
        status = functions.splitkv_cpu_product(call)
    if status == NO_MEMORY:
        raise MemoryError("cpu product: no memory for its rows in f32")
    return out
