"""What the launches of a decode step's kernels share.

A kernel lets the next one begin when its own wait is over, never before. So while a kernel has not waited yet, only the
one before it may still run, and it may read what all earlier ones wrote: the states of the step before among it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

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
