"""What launchers share."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import TENSORS


def steps(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    """The first `count` strides, in elements; 0 for a dimension of one element, whose stride may be anything, and would
    make another kernel, and for no tensor."""
    if tensor is None:
        return (0,) * count
    return tuple(step if size > 1 else 0 for size, step in zip(tensor.shape[:count], tensor.stride(), strict=False))


def addresses_of(arguments: Mapping[str, Any]) -> list[int]:
    """Of a launch's tensors, in the order of TENSORS; 0 for what is absent or is a number."""
    return [value.data_ptr() if isinstance(value := arguments[name], Tensor) else 0 for name in TENSORS]


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Kernels launch on the current device: make it the tensor's, where it is not."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
