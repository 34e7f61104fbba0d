"""Launcher of backend "cuda": from checked tensors and a plan to the two kernels. Allocates and decides nothing."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..plan import DecodePlan
from ..tiles import cuda_rows, cuda_shared
from . import TENSORS
from .cuda_build import TYPES, Defines, Source, load_kernel
from .cuda_driver import Launches, launch_config
from .launching import addresses_of, steps

_SHARED = ("backends/cuda_basics.cuh", "backends/cuda_common.cuh")


def _split_source(tile: str) -> Source:
    parts = ("shape.cuh", "share.cuh", "load.cuh", "logits.cuh", tile, "split.cu")
    return Source("split", _SHARED + tuple(f"backends/cuda_{part}" for part in parts))


SPLIT, SPLIT_F32 = _split_source("tile.cuh"), _split_source("tile_f32.cuh")
MERGE = Source("merge", (*_SHARED, "backends/cuda_merge.cu"))
PARAMS = struct.Struct("=14q22q17i3f")
"""cuda_common.cuh's Params, field by field."""
LENGTH_AT = struct.calcsize("=14q22q")
BOOL_MASK, NO_MASK = 5, 6
MERGE_WARPS = 8
"""Of a merge block whose warps have a task each: cuda_merge.cu."""
INT32_MAX = 2**31 - 1
"""Lengths and capacities are 32-bit in the kernels: keys past this one are none that memory holds."""
STREAMS = 16
"""Streams whose launches one prepared call keeps."""
WORKSPACE = TENSORS.index("workspace")


def launch(*, q: Tensor, seq_lens: Tensor | int, **arguments: Any) -> None:
    """Split, then merge where the plan splits, on the current stream of q's device; as triton_launch.launch."""
    arguments |= dict(q=q, seq_lens=seq_lens)
    prepare(**arguments)(addresses_of(arguments), 0 if isinstance(seq_lens, Tensor) else min(seq_lens, INT32_MAX))


def prepare(**arguments: Any) -> CudaLaunch:
    """`launch` with all but addresses and a uniform length fixed (backends.PreparedLaunch)."""
    return CudaLaunch(**arguments)


class CudaLaunch:
    """The two kernels of one call. Compiles and loads at its first call; holds no tensor."""

    def __init__(
        self,
        *,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seq_lens: Tensor | int,
        block_table: Tensor | None,
        softmax_scale: float,
        window: int,
        softcap: float,
        mask: Tensor | None,
        k_scale: Tensor | float,
        v_scale: Tensor | float,
        out: Tensor,
        lse: Tensor | None,
        plan: DecodePlan,
        **_: Any,
    ) -> None:
        problem, rule = plan.problem, plan.rule
        vectors = problem.num_q_heads * problem.q_len
        self._device: int = q.device.index
        self._plan = plan
        self._offset = 4 * plan.max_units * vectors * problem.v_head_dim
        self._dependent = plan.splits and plan.device.capability >= (9, 0)
        self._params = PARAMS.pack(
            *(0,) * 14, *steps(q, 3), *steps(k_cache, 3), *steps(v_cache, 3), *steps(block_table, 1), *steps(mask, 4),
            *steps(out, 3), *steps(lse, 3), scale_step(k_scale), scale_step(v_scale),
            0, problem.batch, min(problem.capacity, INT32_MAX), k_cache.shape[0],
            problem.page_size or 1, page_shift(problem.page_size or 1), window,
            problem.num_kv_heads, problem.group_size, problem.q_len, plan.rows_per_block, plan.row_blocks,
            rule.target, rule.min_len, rule.quantum, plan.target_units, plan.blocks_at_once,
            softmax_scale if isinstance(k_scale, Tensor) else softmax_scale * k_scale,
            1.0 if isinstance(v_scale, Tensor) else v_scale, softcap,
        )  # fmt: skip
        wide_lens = isinstance(seq_lens, Tensor) and seq_lens.dtype == torch.int64
        common: Defines = (
            ("DV", problem.v_head_dim),
            ("OUT_TYPE", TYPES[q.dtype]),
            ("MAX_RUN", plan.max_run),
            ("LEAST_RUN_KEYS", plan.least_run_keys),
            ("UNEVEN_KEYS", plan.uneven_keys),
            ("WIDE_LENS", int(wide_lens)),
        )
        stages, self._shared_bytes = cuda_shared(
            problem, plan.rows_per_block, plan.device, plan.blocks_per_sm, plan.schedule.more_stages
        )
        self._source = SPLIT_F32 if plan.tile.compute == "f32" else SPLIT
        self._split: Defines = (
            *common,
            ("D", problem.head_dim),
            ("NT", plan.tile.block_m // 8),
            ("ROWS", cuda_rows(plan.rows_per_block)),
            ("KV_TYPE", TYPES[k_cache.dtype]),
            ("BK", plan.tile.block_n // plan.tile.num_warps),
            ("STAGES", stages),
            ("SHARED_BYTES", self._shared_bytes),
            ("PAGED", int(problem.page_size is not None)),
            ("VECTOR", int(loads_in_vectors(k_cache) and loads_in_vectors(v_cache))),
            ("CAUSAL", int(problem.q_len > 1)),
            ("SOFTCAP", int(softcap > 0.0)),
            ("MASK", NO_MASK if mask is None else TYPES.get(mask.dtype, BOOL_MASK)),
        )
        self._merge: Defines = (*common, ("COLUMNS", plan.merge_columns), ("TEAM", plan.merge_team))
        per_block = MERGE_WARPS if plan.merge_team == 1 else 1
        self._merge_grid = (-(-plan.merge_tasks // per_block), 1, 1)
        self._merge_threads = 32 * plan.merge_team * per_block
        self._free: dict[int, list[Launches]] = {}
        self.variant: Hashable = (self._split, self._merge if plan.splits else None)

    def __call__(self, addresses: Sequence[int], uniform_len: int) -> None:
        if torch._C._cuda_getDevice() == self._device:  # torch.cuda.current_device() takes twice as long
            self._launch(addresses, uniform_len)
        else:
            with torch.cuda.device(self._device):
                self._launch(addresses, uniform_len)

    def _launch(self, addresses: Sequence[int], uniform_len: int) -> None:
        free = self._free.get(stream := torch._C._cuda_getCurrentRawStream(self._device))
        if free is None:
            free = self._add_stream(stream)
        try:
            launches = free.pop()
        except IndexError:  # no thread launches this call on this stream right now, or all do
            launches = self._launches(stream)
        launches((*addresses, addresses[WORKSPACE] + self._offset), uniform_len)
        free.append(launches)

    def _add_stream(self, stream: int) -> list[Launches]:
        """Where launches on a stream wait for the next call."""
        if len(self._free) >= STREAMS:
            self._free = {}
        return self._free.setdefault(stream, [])

    def _launches(self, stream: int) -> Launches:
        """Both kernels on a stream, loaded, with arguments of their own."""
        plan, capability = self._plan, self._plan.device.capability
        split = load_kernel(self._source, self._split, capability, self._device, self._shared_bytes)
        threads = 32 * plan.tile.num_warps
        config = launch_config(plan.grid, threads, self._shared_bytes, stream, self._dependent, plan.cluster)
        kernels = [(config, split)]
        if plan.splits:
            merge = load_kernel(MERGE, self._merge, capability, self._device, 0)
            kernels.append((launch_config(self._merge_grid, self._merge_threads, 0, stream, self._dependent), merge))
        return Launches(self._device, kernels, self._params, len(TENSORS) + 1, LENGTH_AT)


def page_shift(page_size: int) -> int:
    """By how much the kernels shift a key's number to find its page; -1 where they divide: pages of no power of two."""
    return page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1


def scale_step(scale: Tensor | float) -> int:
    return scale.stride(0) if isinstance(scale, Tensor) else 0


def loads_in_vectors(cache: Tensor) -> bool:
    """Whether every key's row starts at a multiple of 16 bytes."""
    return cache.data_ptr() % 16 == 0 and all(step * cache.element_size() % 16 == 0 for step in steps(cache, 3))
