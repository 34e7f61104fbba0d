"""Problems for the CPU backend, and one launch of them inside guarded memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from splitkv.backends import cpu
from splitkv.checks import check_inputs
from splitkv.plan import DecodePlan, plan_decode
from splitkv.problem import DeviceSpec
from splitkv.reference import reference_attention

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KV_DTYPES = [F32, F16, BF16, E4M3, E5M2]
NAN = math.nan
CANARY = 173


BACKENDS = ["native", "fallback"]


def use_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if name == "fallback":
        monkeypatch.setattr(cpu, "_library", lambda: "switched off by the test")
    else:
        assert cpu.cpu_status()[0] == "native", cpu.cpu_status()
    return name


def decode(
    q: Tensor, k: Tensor, v: Tensor, lens: Tensor | int, *, policy: Any = "auto", schedule: Any = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """out and lse of one launch with a NaN-filled workspace between canaries; schedule: (max_run, target_units)."""
    inputs = check_inputs(q, k, v, lens, **options)
    plan = plan_decode(inputs.problem, DeviceSpec.cpu(), policy)
    if schedule:
        every_split = inputs.problem.batch * plan.max_splits
        plan = replace(plan, max_run=schedule[0], target_units=schedule[1], max_units=every_split)
    out = torch.full((*inputs.q.shape[:-1], v.shape[-1]), NAN, dtype=q.dtype)
    lse = torch.full(inputs.q.shape[:-1], NAN)
    launch(inputs, plan, out, lse)
    return (out, lse) if q.ndim == 4 else (out[:, 0], lse[:, 0])


def launch(inputs: Any, plan: DecodePlan, out: Tensor, lse: Tensor | None) -> None:
    guarded = torch.full((plan.workspace_bytes + 512,), CANARY, dtype=torch.uint8)
    workspace = guarded[256:-256]
    workspace.view(F32).fill_(NAN)
    cpu.launch(**inputs.launch_arguments(), out=out, lse=lse, workspace=workspace if plan.splits else None, plan=plan)
    assert (guarded[:256] == CANARY).all() and (guarded[-256:] == CANARY).all()


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(
    lens: tuple[int, ...] = (300, 0, 41),
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    q_len: int = 1,
    q_dtype: torch.dtype = F32,
    kv_dtype: torch.dtype = F32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k_cache, v_cache, seq_lens; the capacity is a little over the longest row."""
    capacity = max(lens) + 3
    q = random(len(lens), q_len, heads[0], dims[0], dtype=q_dtype, seed=seed)
    k = random(len(lens), capacity, heads[1], dims[0], dtype=kv_dtype, seed=seed + 1)
    v = random(len(lens), capacity, heads[1], dims[1], dtype=kv_dtype, seed=seed + 2)
    return q, k, v, torch.tensor(lens, dtype=torch.int32)


def assert_right(case: tuple[Tensor, ...], policy: Any = "auto", lse_error: float = 1e-5, **options: Any) -> None:
    """1e-5 of the oracle, plus the rounding of a 16-bit output."""
    out, lse = decode(*case, policy=policy, **options)
    expected, expected_lse = reference_attention(*case, return_lse=True, **options)
    rounding = {F32: 2e-6, F16: 2**-10, BF16: 2**-7}[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=rounding, equal_nan=True)
    torch.testing.assert_close(lse.double(), expected_lse, atol=lse_error, rtol=1e-6, equal_nan=True)


def assert_same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
