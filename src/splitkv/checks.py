"""Validation at the public edge: every bad argument is refused here, before anything is launched.

Messages name the argument, what was expected and what came. Nothing here reads a value that lives on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .problem import DecodeProblem

MAX_Q_LEN = 16
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 256, 16
VECTOR_BYTES, VECTOR_STRIDE = 16, 16
LATENT_HEAD_DIMS = (576, 512)
"""K and V head sizes of absorbed multi-head latent attention."""

DTYPE_NAMES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
Q_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MASK_DTYPES = (torch.bool, *Q_DTYPES)
MAX_FLOAT = torch.finfo(torch.float32).max


class UnsupportedError(ValueError):
    """A request that could exist but is not supported here; the message lists what is."""


@dataclass(frozen=True)
class DecodeInputs:
    """Checked arguments of one call in the form that launchers take (see backends/triton_launch.launch)."""

    problem: DecodeProblem
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    seq_lens: Tensor | int
    block_table: Tensor | None
    softmax_scale: float
    window: int
    softcap: float
    sinks: Tensor | None
    starts: Tensor | None
    mask: Tensor | None
    k_scale: Tensor | float
    v_scale: Tensor | float

    def launch_arguments(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "problem"}


def check_inputs(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor | int,
    *,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> DecodeInputs:
    """The arguments of `decode_attention`, checked and normalised. Raises TypeError, ValueError, UnsupportedError."""
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    optional = dict(
        seq_lens=seq_lens,
        block_table=block_table,
        sinks=sinks,
        starts=starts,
        mask=mask,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    tensors |= {name: value for name, value in optional.items() if isinstance(value, Tensor)}
    check_devices(tensors)
    _check_dtypes(q, k_cache, v_cache)
    problem = _check_shapes(q, k_cache, v_cache, block_table)
    for name in ("q", "k_cache", "v_cache"):
        check_last_stride(name, tensors[name])
    if isinstance(seq_lens, Tensor):
        check_vector("seq_lens", seq_lens, problem.batch, "batch", (torch.int32, torch.int64))
    else:
        seq_lens = as_integer("seq_lens", seq_lens, "an int or a torch.Tensor", problem.capacity)
    if starts is not None:
        check_vector("starts", starts, problem.batch, "batch", (torch.int32,))
    if sinks is not None:
        check_vector("sinks", sinks, problem.num_q_heads, "num_q_heads", (torch.float32,))
    window = 0 if window is None else as_integer("window", window, "an int")
    return DecodeInputs(
        problem=problem,
        q=q if q.ndim == 4 else q.unsqueeze(1),
        k_cache=k_cache,
        v_cache=v_cache,
        seq_lens=seq_lens,
        block_table=block_table,
        softmax_scale=_number("softmax_scale", problem.head_dim**-0.5 if softmax_scale is None else softmax_scale),
        window=min(window, problem.capacity),  # a wider one shows no more keys, and may not fit 64 bits
        softcap=_number("softcap", 0.0 if softcap is None else softcap, least=0.0),
        sinks=sinks,
        starts=starts,
        mask=_check_mask(mask, problem),
        k_scale=check_scale("k_scale", k_scale, problem.num_kv_heads),
        v_scale=check_scale("v_scale", v_scale, problem.num_kv_heads),
    )


def check_out(out: Tensor | None, q: Tensor, v_head_dim: int) -> None:
    """`out` where the caller gives it: q's shape with V's head size, q's dtype and device, no element twice."""
    if out is None:
        return
    expected = (*q.shape[:-1], v_head_dim)
    if not isinstance(out, Tensor):
        raise TypeError(f"out: expected a torch.Tensor, got {type(out).__name__}")
    if out.dtype != q.dtype:
        raise TypeError(f"out: expected q's dtype {q.dtype}, got {out.dtype}")
    if tuple(out.shape) != expected:
        raise ValueError(f"out: expected shape {expected}, got {tuple(out.shape)}")
    check_devices({"q": q, "out": out})
    check_last_stride("out", out)
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out: expected no stride of 0, got strides {out.stride()}")


def check_workspace(workspace: Tensor | None, needed: int, q: Tensor) -> None:
    """`workspace` where the caller gives it: 1-D, contiguous, 16-byte aligned, on q's device, large enough."""
    if workspace is None:
        return
    if not isinstance(workspace, Tensor):
        raise TypeError(f"workspace: expected a torch.Tensor, got {type(workspace).__name__}")
    check_devices({"q": q, "workspace": workspace})
    if workspace.ndim != 1:  # launchers cut it by bytes
        raise ValueError(f"workspace: expected a 1-D tensor, got shape {tuple(workspace.shape)}")
    if not workspace.is_contiguous():
        raise ValueError(f"workspace: expected a contiguous tensor, got strides {workspace.stride()}")
    size = workspace.numel() * workspace.element_size()
    if size < needed:
        raise ValueError(f"workspace: expected at least {needed} bytes, got {size}")
    if needed and workspace.data_ptr() % 16:
        raise ValueError(f"workspace: expected a 16-byte aligned address, got {workspace.data_ptr():#x}")


def check_vector_layout(name: str, tensor: Tensor) -> None:
    """For kernels that sum float32 products in the layout of their loads: one answer needs one layout, that of whole
    16-byte vectors. Raises UnsupportedError for a tensor that cannot be read in them."""
    strides = [step for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
    if tensor.data_ptr() % VECTOR_BYTES or any(step % VECTOR_STRIDE for step in strides):
        raise UnsupportedError(
            f"{name}: supported where products are in float32 are addresses in multiples of {VECTOR_BYTES} bytes and "
            f"strides of {VECTOR_STRIDE} elements, got address {tensor.data_ptr():#x}, strides {tensor.stride()}"
        )


def check_devices(tensors: dict[str, Tensor]) -> None:
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"tensors: expected all on one device, got {where}")


def _check_dtypes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if q.dtype not in Q_DTYPES:
        raise TypeError(f"q: expected dtype {dtype_list(Q_DTYPES)}, got {q.dtype}")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name}: expected dtype {dtype_list(DTYPE_NAMES)}, got {tensor.dtype}")
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(f"v_cache: expected k_cache's dtype {k_cache.dtype}, got {v_cache.dtype}")


def _check_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> DecodeProblem:
    if q.ndim not in (3, 4):
        raise ValueError(
            f"q: expected [batch, heads, head_dim] or [batch, q_len, heads, head_dim], got shape {tuple(q.shape)}"
        )
    layout = "[batch, capacity" if block_table is None else "[num_pages, page_size"
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.ndim != 4:
            raise ValueError(f"{name}: expected {layout}, num_kv_heads, head_dim], got shape {tuple(tensor.shape)}")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"v_cache: expected k_cache's shape {tuple(k_cache.shape[:3])} before head_dim, "
            f"got {tuple(v_cache.shape[:3])}"
        )
    batch, num_q_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    q_len = 1 if q.ndim == 3 else q.shape[1]
    num_kv_heads, v_head_dim = v_cache.shape[2], v_cache.shape[3]
    if k_cache.shape[3] != head_dim:
        raise ValueError(f"k_cache: expected q's head_dim {head_dim}, got {k_cache.shape[3]}")
    if num_q_heads < 1 or num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"q: expected a multiple of {num_kv_heads} KV heads, got {num_q_heads} query heads")
    check_head_dims(head_dim, v_head_dim)
    if not 1 <= q_len <= MAX_Q_LEN:
        raise UnsupportedError(f"q: supported q_len is 1 to {MAX_Q_LEN}, got {q_len}")
    page_size = None
    capacity = k_cache.shape[1]
    if block_table is not None:
        page_size = capacity
        if page_size < 1:
            raise ValueError("k_cache: expected page_size of at least 1, got 0")
        capacity = _check_table(block_table, batch) * page_size
    elif k_cache.shape[0] != batch:
        raise ValueError(f"k_cache: expected batch {batch} as in q, got {k_cache.shape[0]}")
    if batch < 1:
        raise ValueError("q: expected at least 1 row, got batch 0")
    return DecodeProblem(
        batch=batch,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        q_len=q_len,
        capacity=capacity,
        q_dtype=DTYPE_NAMES[q.dtype],
        kv_dtype=DTYPE_NAMES[k_cache.dtype],
        page_size=page_size,
    )


def check_head_dims(head_dim: int, v_head_dim: int) -> None:
    if (head_dim, v_head_dim) == LATENT_HEAD_DIMS:
        return
    for name, size in (("k_cache", head_dim), ("v_cache", v_head_dim)):
        if size % HEAD_DIM_STEP or not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            raise UnsupportedError(
                f"{name}: supported head_dim is a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to "
                f"{MAX_HEAD_DIM}, or 576 with a v_head_dim of 512, got {size} (K {head_dim}, V {v_head_dim})"
            )


def _check_table(block_table: Tensor, batch: int) -> int:
    """Columns of the block table."""
    if not isinstance(block_table, Tensor):
        raise TypeError(f"block_table: expected a torch.Tensor, got {type(block_table).__name__}")
    if block_table.dtype != torch.int32:
        raise TypeError(f"block_table: expected dtype torch.int32, got {block_table.dtype}")
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ValueError(f"block_table: expected shape [{batch}, max_pages], got {tuple(block_table.shape)}")
    check_last_stride("block_table", block_table)
    return block_table.shape[1]


def check_last_stride(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected the last dimension contiguous (stride 1), got strides {tensor.stride()}")


def check_vector(name: str, tensor: Tensor, size: int, meaning: str, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {dtype_list(dtypes)}, got {tensor.dtype}")
    if tuple(tensor.shape) != (size,):
        raise ValueError(f"{name}: expected shape ({size},), one per {meaning}, got {tuple(tensor.shape)}")
    check_last_stride(name, tensor)


def as_integer(name: str, value: Any, kinds: str, capacity: int | None = None) -> int:
    """An int of at least 0, numpy's too. No tensor: reading its value would wait for the GPU."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected {kinds}, got {type(value).__name__}")
    number = int(value)
    if number < 0 or (capacity is not None and number > capacity):
        limit = "at least 0" if capacity is None else f"0..{capacity} (the capacity)"
        raise ValueError(f"{name}: expected {limit}, got {value}")
    return number


def _number(name: str, value: Any, least: float = -math.inf) -> float:
    """A float that stays finite in the kernels' float32. No tensor: reading its value would wait for the GPU."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # an int of hundreds of digits
        number = math.inf
    if not max(least, -MAX_FLOAT) <= number <= MAX_FLOAT:
        limit = "a finite float32" if least == -math.inf else f"a finite float32, at least {least:g}"
        raise ValueError(f"{name}: expected {limit}, got {value}")
    return number


def _check_mask(mask: Tensor | None, problem: DecodeProblem) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected a torch.Tensor, got {type(mask).__name__}")
    if mask.dtype not in MASK_DTYPES:
        raise TypeError(f"mask: expected dtype {dtype_list(MASK_DTYPES)}, got {mask.dtype}")
    full = (problem.batch, problem.num_q_heads, problem.q_len, problem.capacity)
    try:
        return mask.expand(full)
    except RuntimeError:
        raise ValueError(f"mask: expected a shape broadcastable to {full}, got {tuple(mask.shape)}") from None


def check_scale(name: str, scale: Tensor | float | None, num_kv_heads: int) -> Tensor | float:
    """1.0, a float, or a float32 tensor of one value per KV head (a 0-d tensor repeats by stride 0)."""
    if scale is None:
        return 1.0
    if not isinstance(scale, Tensor):
        return _number(name, scale)
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: expected dtype torch.float32, got {scale.dtype}")
    if scale.ndim > 1 or scale.numel() not in (1, num_kv_heads):
        shape = tuple(scale.shape)
        raise ValueError(f"{name}: expected a scalar or shape ({num_kv_heads},), one per KV head, got {shape}")
    return scale.reshape(-1).expand(num_kv_heads)


def dtype_list(dtypes: Any) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
