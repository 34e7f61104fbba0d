"""The read-only sweep for GPUs: every block loads its share at once and writes the sum of it.

No block loops: 16 to 64 KiB of loads per block are in flight together, and the SM holds several blocks, so
the memory's latency is covered without a pipeline. Triton is needed to import this file.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read_sweep(data, sums, count, block: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    offsets = program * block + tl.arange(0, block)
    values = tl.load(data + offsets, mask=offsets < count, other=0)
    tl.store(sums + program, tl.sum(values, axis=0))


def launch_read_sweep(data: Tensor, sums: Tensor, *, block: int, num_warps: int) -> None:
    """Read all of `data` (int32, contiguous, CUDA) and write each block's sum, modulo 2**32, to `sums`."""
    _read_sweep[(sums.numel(),)](data, sums, data.numel(), block=block, num_warps=num_warps)
