"""Products of a few rows with a weight matrix by cuda_product.cu: from Hopper on, where NVRTC is.

Against product_kernels.py it takes up to 16 rows, and its blocks stay: the weights of the next product are on their way
before the product in front has ended.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..backends.cuda_build import Defines, Source, load_kernel
from ..backends.cuda_driver import launch_config, launch_once
from ..problem import DeviceSpec
from .launching import PDL_CAPABILITY, dependent_launch

_device = cache(DeviceSpec.current)

SOURCE = Source("product", ("backends/cuda_basics.cuh", "models/cuda_product.cu"))
PARAMS = struct.Struct("=5q1q1if")
"""cuda_product.cu's Params, field by field."""
TYPES = {torch.float16: 0, torch.bfloat16: 1}
MOST_ROWS = 16
WARPS, GROUP = 8, 8
LEAST_STAGES = 3
LONG, PIECE, LONG_PIECE = 8192, 1024, 2048
"""Rows of weights longer than LONG columns come in pieces of LONG_PIECE columns at most, others of PIECE. A piece is
one order to the copy engine: on an H200 pieces of 512 columns are 20 % slower, larger ones make too few stages."""
ROOMY = 128 << 10
"""Shared memory of a block from which on pieces are never smaller."""


@dataclass(frozen=True)
class Layout:
    """How a block uses its shared memory. chunk: columns per stage."""

    chunk: int
    stages: int
    shared_bytes: int


def layout(columns: int, rows: int, paired: bool, shared_memory_bytes: int) -> Layout | None:
    """None where too many rows are too long for what a block may have of shared memory."""
    outputs = 2 if paired else 1
    rest = rows * (_multiple(2 * columns, 128) + 64 + 4 * WARPS + 2 * 4 * WARPS * outputs * GROUP)
    pieces_of = (LONG_PIECE, PIECE) if columns > LONG else (PIECE,)
    for piece in pieces_of if shared_memory_bytes >= ROOMY else (*pieces_of, PIECE // 2):
        pieces = -(-columns // piece)
        chunk = columns if pieces == 1 else _multiple(-(-columns // pieces), WARPS * 32)
        stage = GROUP * outputs * _multiple(2 * chunk, 128) + 2 * 8
        stages = (shared_memory_bytes - rest) // stage
        if stages >= LEAST_STAGES:
            return Layout(chunk, stages, rest + stages * stage)
    return None


def takes(x: Tensor, weight: Tensor, paired: bool = False) -> bool:
    """Whether `product` takes x [rows, columns] and a weight; other devices and dtypes, and more rows, are others'."""
    if x.dtype not in TYPES or not x.is_cuda or x.shape[0] > MOST_ROWS:
        return False
    device = _device(x.device.index)
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 == x.shape[1] % 8
    if device.capability < PDL_CAPABILITY or not device.compiles_cuda or not aligned:
        return False
    return layout(x.shape[1], x.shape[0], paired, device.shared_memory_bytes) is not None


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    factor: Tensor | None = None,
    add: bool = False,
    paired: bool = False,
) -> Tensor:
    """out = x @ weight.T + bias, and `out`: product_kernels.product for `rows` rows, where `takes` says so.

    x, factor: [rows, columns], f16 or bf16; out: [rows, size] of the same dtype or f32. What is multiplied is rounded
    to x's dtype after the norm or the factor. A row's result depends neither on other rows nor on their number.
    """
    device = _device(x.device.index)
    kernel, blocks = _kernel(
        device, x.device.index, x.shape[0], x.shape[1], out.shape[1], x.dtype, out.dtype,
        None if norm is None else norm[0].dtype, factor is not None, bias is not None, add, paired,
    )  # fmt: skip
    if norm is not None:
        factor = norm[0]
    addresses = (0 if t is None else t.data_ptr() for t in (x, weight, bias, factor, out))
    params = PARAMS.pack(*addresses, x.stride(0) // 8, out.shape[1], 0.0 if norm is None else norm[1])
    stream = torch.cuda.current_stream(x.device).cuda_stream
    # All shared memory, even where the stages take less: a small kernel's blocks that began beside a product's held its
    # loads up (docs/lab-notes.md).
    shared_bytes, dependent = device.shared_memory_bytes, dependent_launch(x)[0]
    config = launch_config((blocks, 1, 1), 32 * (WARPS + 1), shared_bytes, stream, dependent)
    launch_once(x.device.index, config, kernel, params)
    return out


@cache
def _kernel(
    device: DeviceSpec, index: int, rows: int, columns: int, size: int, dtype: torch.dtype, out_dtype: torch.dtype,
    norm_dtype: torch.dtype | None, factor: bool, bias: bool, add: bool, paired: bool,
) -> tuple[object, int]:  # fmt: skip
    """(the loaded kernel, its blocks)."""
    place = layout(columns, rows, paired, device.shared_memory_bytes)
    if place is None:
        raise ValueError(f"x: expected rows that fit a multiprocessor's memory, got {rows} of {columns} columns")
    options = defines(place, columns, rows, dtype, out_dtype, norm_dtype, factor, bias, add, paired)
    kernel = load_kernel(SOURCE, options, device.capability, index, device.shared_memory_bytes)
    return kernel, min(-(-size // GROUP), device.sm_count)


def defines(
    place: Layout, columns: int, rows: int, dtype: torch.dtype, out_dtype: torch.dtype,
    norm_dtype: torch.dtype | None, factor: bool, bias: bool, add: bool, paired: bool,
) -> Defines:  # fmt: skip
    """What one variant of the kernel is compiled with."""
    return (
        ("TYPE", TYPES[dtype]),
        ("COLUMNS", columns),
        ("ROWS", rows),
        ("CHUNK", place.chunk),
        ("STAGES", place.stages),
        ("SHARED_BYTES", place.shared_bytes),
        ("NORM", int(norm_dtype is not None)),
        ("NORM_F32", int(norm_dtype == torch.float32)),
        ("FACTOR", int(factor)),
        ("BIAS", int(bias)),
        ("ADD", int(add)),
        ("PAIRED", int(paired)),
        ("OUT_F32", int(out_dtype == torch.float32)),
    )


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
