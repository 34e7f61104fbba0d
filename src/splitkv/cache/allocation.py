"""Memory for what a decode step reads from end to end: K, V and weights.

On a CPU it comes in huge pages (Linux, x86: 2 MiB), where the machine lets a program ask for them, which
/sys/kernel/mm/transparent_hugepage/enabled says: "madvise" or "always". One translation then covers what 512 do in
pages of 4 KiB, and the processor's own prefetching does not stop at each of them. docs/cpu.md has what it gains.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
"""Of x86, and of ARM with base pages of 4 KiB."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """torch.empty(shape, dtype=dtype, device=device); on a CPU, from 2 MiB on, in huge pages where it has them.

    Only whole huge pages within the tensor are asked for, so a tensor that is full takes no byte more than otherwise.
    The memory is given back when the last tensor on it dies. Raises what torch.empty raises, where memory is short too.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if torch.compiler.is_compiling() or torch.device(device).type != "cpu" or size_bytes < HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    tensor = torch.empty(0, dtype=dtype, device=device)
    pages = _huge_pages(size_bytes) if type(tensor) is Tensor else None  # not where tensors are only pretended
    if pages is None:
        return torch.empty(shape, dtype=dtype, device=device)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return tensor.set_(pages.untyped_storage(), 0, shape, strides)


def _huge_pages(size_bytes: int) -> Tensor | None:
    """[size_bytes] uint8 from a huge page's start on; None where the system has none to ask for, or no memory."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return None
    try:
        # A huge page more of addresses, as older kernels start a mapping anywhere; what lies before stays untouched.
        mapping = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
        mapping.madvise(advice, 0, start + size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    except (OSError, OverflowError):
        return None
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=size_bytes)
