"""Launcher of backend "cuda": from checked tensors and a plan to the two kernels. Allocates and decides nothing."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..plan import DecodePlan
from ..tiles import cuda_shared
from . import TENSORS
from .cuda_build import Defines, load_kernel
from .launching import steps

PARAMS = struct.Struct("=14q22q17i3f")
"""cuda_common.cuh's Params, field by field."""
POINTERS, LENGTH_AT = struct.Struct("=14q"), struct.calcsize("=14q22q")
TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3, torch.float32: 4}
BOOL_MASK, NO_MASK = 5, 6
MERGE_COLUMNS = 64
MERGE_WARPS, MERGE_WARPS_LOADED = 16, 8
"""Of one query vector's columns, and of eight vectors': cuda_merge.cu."""
INT32_MAX = 2**31 - 1
"""Lengths and capacities are 32-bit in the kernels: keys past this one are none that memory holds."""
STREAMS = 16
"""Streams whose launch configurations one prepared call keeps."""
WORKSPACE = TENSORS.index("workspace")


def launch(*, q: Tensor, seq_lens: Tensor | int, **arguments: Any) -> None:
    """Split, then merge where the plan splits, on the current stream of q's device; as triton_launch.launch."""
    arguments |= dict(q=q, seq_lens=seq_lens)
    addresses = [t.data_ptr() if isinstance(t := arguments[name], Tensor) else 0 for name in TENSORS]
    prepare(**arguments)(addresses, 0 if isinstance(seq_lens, Tensor) else min(seq_lens, INT32_MAX))


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
            0, problem.batch, min(problem.capacity, INT32_MAX), k_cache.shape[0], problem.page_size or 1, window,
            problem.num_kv_heads, problem.group_size, problem.q_len, plan.rows_per_block, plan.row_blocks,
            rule.target, rule.min_len, rule.quantum, plan.target_units, plan.max_run, plan.grid[1],
            softmax_scale if isinstance(k_scale, Tensor) else softmax_scale * k_scale,
            1.0 if isinstance(v_scale, Tensor) else v_scale, softcap,
        )  # fmt: skip
        wide_lens = isinstance(seq_lens, Tensor) and seq_lens.dtype == torch.int64
        common: Defines = (
            ("DV", problem.v_head_dim),
            ("OUT_TYPE", TYPES[q.dtype]),
            ("MAX_RUN", plan.max_run),
            ("LEAST_RUN_KEYS", plan.least_run_keys),
            ("WIDE_LENS", int(wide_lens)),
        )
        columns = plan.tile.block_m
        stages, self._shared_bytes = cuda_shared(problem, columns, plan.device)
        self._split: Defines = (
            *common,
            ("D", problem.head_dim),
            ("NT", columns // 8),
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
        self._merge = common
        tasks = problem.batch * vectors * -(-problem.v_head_dim // MERGE_COLUMNS)
        per_block = 1 if plan.max_run == 1 else MERGE_WARPS_LOADED
        self._merge_grid = (-(-tasks // per_block), 1, 1)
        self._configs: dict[int, list[tuple[Any, Any]]] = {}
        self.variant: Hashable = (self._split, self._merge if plan.splits else None)

    def __call__(self, addresses: Sequence[int], uniform_len: int) -> None:
        if torch.cuda.current_device() == self._device:
            self._launch(addresses, uniform_len)
        else:
            with torch.cuda.device(self._device):
                self._launch(addresses, uniform_len)

    def _launch(self, addresses: Sequence[int], uniform_len: int) -> None:
        from cuda.bindings.driver import cuLaunchKernelEx

        stream = torch._C._cuda_getCurrentRawStream(self._device)
        launches = self._configs.get(stream)
        if launches is None:
            launches = self._configure(stream)
        params = ctypes.create_string_buffer(self._params, PARAMS.size)
        POINTERS.pack_into(params, 0, *addresses, addresses[WORKSPACE] + self._offset)
        ctypes.c_int.from_buffer(params, LENGTH_AT).value = uniform_len
        pointer = ctypes.c_void_p(ctypes.addressof(params))
        for config, function in launches:
            (status,) = cuLaunchKernelEx(config, function, ctypes.addressof(pointer), 0)
            if status.value:
                raise RuntimeError(f"CUDA: {status.name}")

    def _configure(self, stream: int) -> list[tuple[Any, Any]]:
        """(configuration, function) of each kernel on a stream; loads them."""
        plan = self._plan
        split = load_kernel("split", self._split, plan.device.capability, self._device, self._shared_bytes)
        launches = [(self._config(plan.grid, plan.tile.num_warps, self._shared_bytes, stream), split)]
        if plan.splits:
            merge = load_kernel("merge", self._merge, plan.device.capability, self._device, 0)
            warps = MERGE_WARPS if plan.max_run == 1 else MERGE_WARPS_LOADED
            launches.append((self._config(self._merge_grid, warps, 0, stream), merge))
        if len(self._configs) >= STREAMS:
            self._configs = {}
        self._configs[stream] = launches
        return launches

    def _config(self, grid: tuple[int, int, int], warps: int, shared_bytes: int, stream: int) -> Any:
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = 32 * warps, 1, 1
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        if self._dependent:  # start while the kernel before ends: both wait for it before they read
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        return config


def scale_step(scale: Tensor | float) -> int:
    return scale.stride(0) if isinstance(scale, Tensor) else 0


def loads_in_vectors(cache: Tensor) -> bool:
    """Whether every key's row starts at a multiple of 16 bytes."""
    return cache.data_ptr() % 16 == 0 and all(step * cache.element_size() % 16 == 0 for step in steps(cache, 3))
