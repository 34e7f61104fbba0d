"""Products of a few rows with a weight matrix by cuda_product.cu: from Hopper on, where NVRTC is.

Against product_kernels.py it takes up to 16 rows, and its blocks stay: the weights of the next product are on their way
before the product in front has ended.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.cuda_build import TYPES, Defines, Kernel, Source, load_kernel
from ..backends.cuda_driver import launch_config, launch_once
from ..policy import ceil_div
from ..problem import DeviceSpec
from .launching import PDL_CAPABILITY, dependent_launch

SOURCE = Source("product", ("backends/cuda_basics.cuh", "models/cuda_product.cu"))
PARAMS = struct.Struct("=5q1q1i1f")
"""cuda_product.cu's Params, field by field."""
DTYPES = (torch.float16, torch.bfloat16)
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


class Variant(NamedTuple):
    """What one compiled kernel is for. norm_dtype: of the norm's weights, None without a norm; the rest as of
    `product`."""

    columns: int
    rows: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    norm_dtype: torch.dtype | None = None
    factor: bool = False
    bias: bool = False
    add: bool = False
    paired: bool = False

    def defines(self, place: Layout) -> Defines:
        return (
            ("TYPE", TYPES[self.dtype]),
            ("COLUMNS", self.columns),
            ("ROWS", self.rows),
            ("CHUNK", place.chunk),
            ("STAGES", place.stages),
            ("SHARED_BYTES", place.shared_bytes),
            ("NORM", int(self.norm_dtype is not None)),
            ("NORM_F32", int(self.norm_dtype == torch.float32)),
            ("FACTOR", int(self.factor)),
            ("BIAS", int(self.bias)),
            ("ADD", int(self.add)),
            ("PAIRED", int(self.paired)),
            ("OUT_F32", int(self.out_dtype == torch.float32)),
        )


@cache
def layout(columns: int, rows: int, paired: bool, shared_memory_bytes: int) -> Layout | None:
    """None where too many rows are too long for what a block may have of shared memory."""
    outputs = 2 if paired else 1
    rest = rows * (_multiple(2 * columns, 128) + 64 + 4 * WARPS + 2 * 4 * WARPS * outputs * GROUP)
    pieces_of = (LONG_PIECE, PIECE) if columns > LONG else (PIECE,)
    for piece in pieces_of if shared_memory_bytes >= ROOMY else (*pieces_of, PIECE // 2):
        pieces = ceil_div(columns, piece)
        chunk = columns if pieces == 1 else _multiple(ceil_div(columns, pieces), WARPS * 32)
        stage = GROUP * outputs * _multiple(2 * chunk, 128) + 2 * 8
        stages = (shared_memory_bytes - rest) // stage
        if stages >= LEAST_STAGES:
            return Layout(chunk, stages, rest + stages * stage)
    return None


def takes(x: Tensor, weight: Tensor, paired: bool = False) -> bool:
    """Whether `product` takes x [rows, columns] and a weight; other devices and dtypes, and more rows, are others'."""
    if x.dtype not in DTYPES or not x.is_cuda or x.shape[0] > MOST_ROWS:
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
    index, size = x.device.index, out.shape[1]
    norm_dtype = None if norm is None else norm[0].dtype
    options = (norm_dtype, factor is not None, bias is not None, add, paired)
    kernel = _kernel(index, Variant(x.shape[1], x.shape[0], x.dtype, out.dtype, *options))
    if norm is not None:
        factor = norm[0]
    addresses = (0 if t is None else t.data_ptr() for t in (x, weight, bias, factor, out))
    params = PARAMS.pack(*addresses, x.stride(0) // 8, size, 0.0 if norm is None else norm[1])
    device, stream = _device(index), torch.cuda.current_stream(x.device).cuda_stream
    # All shared memory, even where the stages take less: a small kernel's blocks that began beside a product's held its
    # loads up (docs/lab-notes.md).
    shared_bytes, dependent = device.shared_memory_bytes, dependent_launch(x)[0]
    grid = (min(ceil_div(size, GROUP), device.sm_count), 1, 1)
    launch_once(index, launch_config(grid, 32 * (WARPS + 1), shared_bytes, stream, dependent), kernel, params)
    return out


@cache
def _kernel(index: int, variant: Variant) -> Kernel:
    """Loaded on the device `index`, with room for all its shared memory."""
    device = _device(index)
    place = layout(variant.columns, variant.rows, variant.paired, device.shared_memory_bytes)
    if place is None:
        raise ValueError(
            f"x: expected rows that fit a multiprocessor's memory, got {variant.rows} of {variant.columns} columns"
        )
    return load_kernel(SOURCE, variant.defines(place), device.capability, index, device.shared_memory_bytes)


_device = cache(DeviceSpec.current)


def _multiple(number: int, of: int) -> int:
    return ceil_div(number, of) * of
