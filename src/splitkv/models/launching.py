"""What the launches of a decode step's kernels share.

A kernel lets the next one begin when its own wait is over, never before. So while a kernel has not waited yet, only the
one before it may still run, and it may read what all earlier ones wrote: the states of the step before among it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PDL_CAPABILITY = (9, 0)


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def dependent_launch(tensor: Tensor) -> tuple[bool, dict[str, Any]]:
    """Whether a kernel may start before the one before it has ended (it then waits for that one's results itself), and
    Triton's options for it. Of Hopper on."""
    if not tensor.is_cuda or _capability(tensor.device.index) < PDL_CAPABILITY:
        return False, {}
    return True, {"launch_pdl": True}


@triton.jit
def take_turn(PDL: tl.constexpr) -> None:
    """Wait until the kernel before has ended, and let the next one begin. PDL: of dependent_launch; without, there is
    nothing to wait for. A kernel before attention waits only: attention may read lengths at once."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
