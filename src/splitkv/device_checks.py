"""SPLITKV_CHECK=1: read lengths and block tables before a launch, and refuse what the kernels would skip.

Kernels never leave the cache: keys past the capacity or on pages outside the pool count as absent. That keeps a
server up, and hides its bug. This check names the row and the value; it waits for the GPU, so it is off by default
and skipped while a CUDA graph is being captured.
"""

from __future__ import annotations

import os

import torch

from .checks import DecodeInputs
from .policy import parse_switch

CHECK_VARIABLE = "SPLITKV_CHECK"


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a CUDA graph."""
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int:
    """A number for the device's current stream: its handle, or 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return torch._C._cuda_getCurrentRawStream(device.index)  # torch.cuda.current_stream() takes 1.5 us


def checks_asked() -> bool:
    return parse_switch(os.environ.get(CHECK_VARIABLE, ""), declared=False)


def checks_wanted(device: torch.device) -> bool:
    return checks_asked() and not capturing(device)


def check_values(inputs: DecodeInputs) -> None:
    """Raises ValueError for a length outside 0..capacity or a needed page id outside the pool."""
    problem = inputs.problem
    if isinstance(inputs.seq_lens, int):
        lens = [inputs.seq_lens] * problem.batch
    else:
        lens = inputs.seq_lens.tolist()
    for row, length in enumerate(lens):
        if not 0 <= length <= problem.capacity:
            raise ValueError(f"seq_lens: expected 0..{problem.capacity} (the capacity), got {length} in row {row}")
    if inputs.block_table is None or problem.page_size is None:
        return
    starts = [0] * problem.batch if inputs.starts is None else inputs.starts.tolist()
    num_pages = inputs.k_cache.shape[0]
    for row, (table, length, start) in enumerate(zip(inputs.block_table.tolist(), lens, starts, strict=True)):
        if inputs.window:
            start = max(start, length - problem.q_len + 1 - inputs.window)
        first, last = max(start, 0) // problem.page_size, -(-length // problem.page_size)
        for column in range(first, last):
            if not 0 <= table[column] < num_pages:
                raise ValueError(
                    f"block_table: expected page ids in 0..{num_pages - 1}, got {table[column]} in row {row}, "
                    f"column {column}"
                )
