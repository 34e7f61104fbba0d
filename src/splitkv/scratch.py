"""Scratch for calls that bring none. It is kept from call to call, as an allocation costs 2.5 us of host time."""

from __future__ import annotations

import torch
from torch import Tensor

from .problem import MIB

LEAST_BYTES, MOST_BYTES = MIB, 8 * MIB
"""Of one tensor that is kept. A call that needs more lasts so long that its host time hides behind it."""
STREAMS = 32
"""Streams whose scratch is kept; with one more, all of it is let go."""


class Scratch:
    """Tensors that wait, by stream, for the next call on it.

    A call takes one for itself until its kernels are launched: no thread's kernels come between another's. Kernels of
    one stream run in turn, so whoever takes it next finds it free. A CUDA graph's scratch must stay the graph's, so
    nothing is kept of a stream that is being captured.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int | None, int], list[Tensor]] = {}

    def take(self, q: Tensor, device: int | None, least_bytes: int) -> tuple[Tensor, list[Tensor] | None]:
        """(scratch on q's device, where to append it once all is launched, or None). device: q's index on a GPU."""
        stream = _stream(device) if least_bytes <= MOST_BYTES else None
        if stream is None:
            return _allocate(q, least_bytes), None
        waiting = self._waiting.get((device, stream))
        if waiting is None:
            if len(self._waiting) >= STREAMS:
                self._waiting = {}
            waiting = self._waiting.setdefault((device, stream), [])
        try:
            scratch = waiting.pop()
        except IndexError:  # the first call on this stream, or other threads have all of it right now
            return _allocate(q, max(least_bytes, LEAST_BYTES)), waiting
        if scratch.numel() < least_bytes:
            scratch = _allocate(q, least_bytes)
        return scratch, waiting


def _stream(device: int | None) -> int | None:
    """A number for the current stream, 0 on a CPU; None for another than the current GPU, or inside a capture."""
    if device is None:
        return 0
    if torch._C._cuda_getDevice() != device or torch._C._cuda_isCurrentStreamCapturing():
        return None
    return torch._C._cuda_getCurrentRawStream(device)


def _allocate(q: Tensor, least_bytes: int) -> Tensor:
    return q.new_empty(least_bytes, dtype=torch.uint8)
