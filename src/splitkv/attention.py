"""The public functions: look the call up, or check, plan and launch it. Where policy and kernels meet."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .backends import LAUNCHERS
from .checks import DecodeInputs, UnsupportedError, check_inputs, check_out, check_vector_layout, check_workspace
from .plan import DecodePlan, plan_decode
from .policy import SplitPolicy, resolve_backend
from .prepared import INTERPRET_VARIABLE, NO_KEY, CallMemo, FirstCall, call_key
from .problem import DecodeProblem, DeviceSpec
from .tiles import compute_dtype
from .tuning import Schedule

FP8_CAPABILITY = (8, 9)
MAX_GRID_ROWS = 65_535  # CUDA's limit on a grid's third dimension

_CALLS = CallMemo()
"""Calls that `decode_attention` has checked before: a bounded memo that never changes an answer (prepared.py)."""


def decode_attention(
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
    policy: str | SplitPolicy = "auto",
    backend: str = "auto",
    out: Tensor | None = None,
    return_lse: bool = False,
    workspace: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one new token (or up to 16) per row over a KV cache.

    q: [batch, num_q_heads, head_dim] or [batch, q_len, num_q_heads, head_dim]; f32, f16 or bf16.
    k_cache, v_cache: [batch, capacity, num_kv_heads, head_dim], or with block_table [num_pages, page_size,
        num_kv_heads, head_dim]; f32, f16, bf16, float8_e4m3fn or float8_e5m2; any strides with the last
        dimension contiguous. K and V may differ in strides and head size. Where backend triton takes f32, strides
        must be multiples of 16 elements and addresses of 16 bytes (docs/one-answer.md).
    seq_lens: [batch] int32 or int64, or one int: valid keys per row, the queries' own included. Query i of
        q_len sees keys below seq_len - q_len + 1 + i. Lengths above the capacity count as the capacity.
    block_table: [batch, max_pages] int32, the page of each logical page. Keys on pages outside the pool are
        absent; entries past a row's length are never read.
    softmax_scale: default head_dim ** -0.5. window: keys that a query sees, its own included (None or 0: all).
    softcap: c * tanh(logit / c), before masking (None or 0: off). sinks: [num_q_heads] f32, one more logit in
        each head's denominator. starts: [batch] int32, first visible key. mask: broadcastable to [batch,
        num_q_heads, q_len, capacity]; bool (True: visible) or additive, on top of the causal rule.
    k_scale, v_scale: what stored keys and values are multiplied by: a number, or f32 of one or num_kv_heads.
    policy: how rows are split (see SplitPolicy). backend: auto, cuda, triton, rowwise (all three on a GPU) or cpu.
    out: where to write. workspace: 1-D scratch of at least plan_decode(...).workspace_bytes, for callers that own
        theirs; two streams must not share one.

    Returns out (q's shape with V's head size, q's dtype), and with return_lse also the log-sum-exp of the
    logits, sinks included: natural log, f32, out's shape without the last dimension. A row with nothing to see
    gives 0 and -inf. Bytes of a row do not depend on the other rows, the capacity or the pages ("one answer",
    docs/one-answer.md). No gradients.

    Raises TypeError (types, dtypes), ValueError (shapes, strides, devices, ranges), UnsupportedError.
    """
    if is_compiling():
        return _decode_compiled(
            q, k_cache, v_cache, seq_lens, block_table, softmax_scale, window, softcap, sinks, starts, mask, k_scale,
            v_scale, policy, backend, out, return_lse, workspace,
        )  # fmt: skip
    key: tuple[Any, ...] | None = None
    try:
        settings = (policy, backend, bool(return_lse))
        key, addresses, uniform_len = call_key(
            q, k_cache, v_cache, seq_lens, out, workspace, settings, block_table, softmax_scale, window, softcap, sinks,
            starts, mask, k_scale, v_scale,
        )  # fmt: skip
        known = _CALLS.find(key, uniform_len)
    except NO_KEY:
        key = known = None
    if known is not None:
        return known.run(q, addresses, uniform_len, out, workspace)
    inputs = check_inputs(
        q,
        k_cache,
        v_cache,
        seq_lens,
        block_table=block_table,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        starts=starts,
        mask=mask,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    check_out(out, q, inputs.problem.v_head_dim)
    name = choose_backend(backend, inputs)
    plan = plan_for(inputs.problem, q.device, policy, name)
    check_workspace(workspace, plan.workspace_bytes, q)
    first = FirstCall(name, inputs, plan, q, out, return_lse, workspace)
    result = first.run()
    _CALLS.keep(key, first.kept())
    return result


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from the attention over each.

    outs: [parts, ..., v_head_dim], normalised outputs. lses: [parts, ...] f32, natural-log sums. Returns
    (out, lse) without the first dimension, out in outs' dtype. Parts with lse -inf are left out whatever their
    out holds; all empty gives (0, -inf). Raises TypeError, ValueError.
    """
    if not isinstance(outs, Tensor) or not isinstance(lses, Tensor):
        raise TypeError(f"outs, lses: expected tensors, got {type(outs).__name__} and {type(lses).__name__}")
    if outs.ndim < 2 or outs.shape[0] < 1:
        raise ValueError(f"outs: expected [parts, ..., v_head_dim] of at least 1 part, got {tuple(outs.shape)}")
    if outs.shape[:-1] != lses.shape:
        raise ValueError(
            f"lses: expected outs' shape {tuple(outs.shape)} without its last dimension, got {tuple(lses.shape)}"
        )
    if not outs.is_floating_point() or lses.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"outs, lses: expected floating outs, float32 or float64 lses, got {outs.dtype}, {lses.dtype}")
    if outs.device != lses.device:
        raise ValueError(f"tensors: expected all on one device, got outs on {outs.device}, lses on {lses.device}")
    top = lses.amax(0)
    weights = torch.exp(lses - torch.where(top == -torch.inf, 0.0, top))
    total = weights.sum(0)
    parts = torch.where((weights > 0).unsqueeze(-1), outs.to(lses.dtype), 0.0)
    summed = (parts * weights.unsqueeze(-1)).sum(0)
    out = summed / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return out.to(outs.dtype), top + torch.log(total)


def choose_backend(backend: str, inputs: DecodeInputs) -> str:
    """The backend for these inputs. SPLITKV_BACKEND overrides `auto`; a choice that cannot run is refused."""
    if not isinstance(backend, str):
        raise TypeError(f"backend: expected a str, got {type(backend).__name__}")
    backend, on_cuda = resolve_backend(backend), inputs.q.is_cuda
    if backend == "auto":
        backend = plan_decode(inputs.problem, _device_spec(inputs.q.device)).backend if on_cuda else "cpu"
    if backend not in LAUNCHERS:
        raise ValueError(f"backend: expected auto, {', '.join(LAUNCHERS)}, got {backend!r}")
    if backend == "cpu":
        if inputs.q.device.type != "cpu":
            raise ValueError(f"backend: cpu expects tensors on the CPU, got {inputs.q.device}")
        return backend
    if not on_cuda and (backend == "cuda" or not _interpreting()):
        raise ValueError(f"backend: {backend} expects CUDA tensors, got {inputs.q.device}")
    _check_gpu_limits(backend, inputs)
    return backend


def _check_gpu_limits(backend: str, inputs: DecodeInputs) -> None:
    """Refuse what contract and CPU know and the GPU backend does not."""
    problem = inputs.problem
    if backend == "cuda":
        _check_cuda(problem, inputs.q.device)
        return
    if compute_dtype(problem.q_dtype, problem.kv_dtype) == "f32":
        for name in ("k_cache", "v_cache") + (("q",) if problem.head_dim != problem.v_head_dim else ()):
            check_vector_layout(name, getattr(inputs, name))
    if problem.batch > MAX_GRID_ROWS:
        raise UnsupportedError(f"q: backend {backend} supports up to {MAX_GRID_ROWS} rows, got {problem.batch}")
    _check_fp8(backend, problem, inputs.q.device)


def _check_fp8(backend: str, problem: DecodeProblem, on: torch.device) -> None:
    device = _device_spec(on)
    if problem.kv_dtype == "fp8_e4m3" and not device.is_cpu and device.capability < FP8_CAPABILITY:
        raise UnsupportedError(
            f"k_cache: backend {backend} supports float8_e4m3fn from compute capability 8.9 on; supported on this "
            "GPU: float32, float16, bfloat16, float8_e5m2"
        )


def _check_cuda(problem: DecodeProblem, device: torch.device) -> None:
    if not _device_spec(device).compiles_cuda:
        raise UnsupportedError(
            "backend: cuda needs cuda-bindings and NVRTC (pip install 'splitkv[gpu]'); triton is here"
        )
    try:
        plan_decode(problem, _device_spec(device), backend="cuda")
    except ValueError:
        raise UnsupportedError(
            "backend: cuda supports head_dim up to 256 and up to 8 query vectors per KV head (16 up to head_dim 128 "
            "over 16-bit and fp8 caches), f32 queries over f32 caches alone, from compute capability 8.0 on; "
            f"supported for {problem}: triton"
        ) from None
    _check_fp8("cuda", problem, device)


def plan_for(
    problem: DecodeProblem,
    device: torch.device,
    policy: str | SplitPolicy,
    backend: str = "auto",
    schedule: Schedule | None = None,
) -> DecodePlan:
    """The plan that a call on this device and backend uses. Raises TypeError, ValueError (no such policy)."""
    if not isinstance(policy, (str, SplitPolicy)):
        raise TypeError(f"policy: expected a SplitPolicy or a str, got {type(policy).__name__}")
    if isinstance(policy, str) and SplitPolicy.parse(policy) is None:
        raise ValueError(
            "policy: expected a SplitPolicy or one of auto, waves, capacity, length, legacy, off, or a number of "
            f"splits, got {policy!r}"
        )
    return plan_decode(problem, _device_spec(device), policy, backend, schedule=schedule)


@cache
def _device_spec(device: torch.device) -> DeviceSpec:
    return DeviceSpec.current(device.index) if device.type == "cuda" else DeviceSpec.cpu()


def _interpreting() -> bool:
    return os.environ.get(INTERPRET_VARIABLE) == "1"


def _decode_compiled(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor | int,
    block_table: Tensor | None,
    softmax_scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    starts: Tensor | None,
    mask: Tensor | None,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
    policy: str | SplitPolicy,
    backend: str,
    out: Tensor | None,
    return_lse: bool,
    workspace: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same call through the registered operator (ops.py), which torch.compile takes as one node."""
    check_out(out, q, v_cache.shape[-1])  # here, as copy_ would convert and broadcast
    uniform = not isinstance(seq_lens, Tensor)
    result, lse = torch.ops.splitkv.decode_attention(
        q,
        k_cache,
        v_cache,
        None if uniform else seq_lens,
        seq_lens if uniform else 0,
        block_table,
        softmax_scale,
        window,
        softcap,
        sinks,
        starts,
        mask,
        k_scale if isinstance(k_scale, Tensor) else None,
        v_scale if isinstance(v_scale, Tensor) else None,
        None if isinstance(k_scale, Tensor) else k_scale,
        None if isinstance(v_scale, Tensor) else v_scale,
        policy if isinstance(policy, str) else policy.label,
        backend,
    )
    if out is not None:
        out.copy_(result)
        result = out
    return (result, lse) if return_lse else result
