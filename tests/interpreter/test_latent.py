"""Absorbed MLA in the interpreter: head_dim 576, V the first 512 columns of K, in its memory or apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from helpers import (
    NAN,
    assert_parity,
    assert_same,
    int32,
    launch_plan,
    make_inputs,
    page_order,
    poison_tails,
    reschedule,
    to_pages,
    with_small_splits,
)

from splitkv import DecodeProblem, DeviceSpec, SplitPolicy, decode_attention, plan_decode, reference_attention
from splitkv.backends import rowwise, triton_launch

F32, F16 = torch.float32, torch.float16
K_DIM, V_DIM = 576, 512
both_dtypes = pytest.mark.parametrize("dtype", [F32, F16], ids=["f32", "f16"])
both_backends = pytest.mark.parametrize("backend", ["triton", "rowwise"])


def latent(batch: int, heads: int, capacity: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q, K and the V that is a view of K's first columns."""
    q, k, _ = make_inputs(batch, heads, 1, K_DIM, capacity, **options)
    return q, k, k[..., :V_DIM]


def attend(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return decode_attention(*tensors, return_lse=True, **options)  # type: ignore[return-value]


def oracle(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return reference_attention(*tensors, return_lse=True, **options)  # type: ignore[return-value]


@both_backends
@both_dtypes
@pytest.mark.parametrize("heads", [2, 16])
def test_v_within_k_and_v_apart_are_one_answer(heads: int, dtype: torch.dtype, backend: str) -> None:
    """2 heads stand twice in a block of 8; 16 are one block in f16 and two in f32."""
    rows = [40, 9] if heads == 2 else [40]
    q, k, v = latent(len(rows), heads, 41, dtype=dtype)
    lens, options = int32(rows), dict(backend=backend, policy=SplitPolicy.pinned(3))
    got = attend(q, k, v, lens, **options)
    assert_parity(got, oracle(q, k, v, lens))
    assert_same(attend(q, k, v.clone(), lens, **options), got, "V apart")
    other = make_inputs(len(rows), heads, 1, V_DIM, 41, dtype=dtype, seed=7)[2]
    assert_parity(attend(q, k, other, lens, **options), oracle(q, k, other, lens))


@both_backends
@both_dtypes
def test_pages(dtype: torch.dtype, backend: str) -> None:
    lens = [150, 0, 65]
    q, k, v = latent(3, 4, 150, dtype=dtype)
    want = attend(q, k, v, int32(lens), backend=backend)
    assert_parity(want, oracle(q, k, v, int32(lens)))
    table, pages = page_order(3, 150, 64)
    pool = to_pages(poison_tails(k, lens, NAN), table, pages, 64)
    views = {"V in K": pool[..., :V_DIM], "V apart": pool[..., :V_DIM].clone()}
    for name, values in views.items():
        assert_same(attend(q, pool, values, int32(lens), block_table=table, backend=backend), want, name)


@pytest.mark.parametrize("options", ["causal", "window", "softcap and sinks", "mask", "starts", "scales"])
def test_options(options: str) -> None:
    chosen: dict[str, Any] = {
        "causal": {},
        "window": dict(window=11),
        "softcap and sinks": dict(softcap=2.0, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
        "mask": dict(mask=torch.arange(40) % 3 != 0),
        "starts": dict(starts=int32([3, 30])),
        "scales": dict(k_scale=0.5, v_scale=torch.tensor([0.25])),
    }[options]
    for dtype in (F32, F16):
        q, k, v = latent(2, 4, 40, q_len=2, dtype=dtype)
        lens = int32([40, 3])
        got = attend(q, k, v, lens, backend="triton", policy=SplitPolicy.pinned(2), **chosen)
        assert_parity(got, oracle(q, k, v, lens, **chosen))


def test_the_schedule_changes_no_byte() -> None:
    lens = int32([16 * 17, 0, 16 * 5 - 1, 1])
    q, k, v = latent(4, 2, 16 * 17, dtype=F16)
    problem = DecodeProblem(4, 2, 1, K_DIM, V_DIM, capacity=16 * 17, q_dtype="f16", kv_dtype="f16")
    plan = reschedule(with_small_splits(plan_decode(problem, DeviceSpec.named("h200"), backend="triton"), 256), 1, 1)
    want = launch_plan(plan, q, k, v, lens)
    assert_parity(want, oracle(q, k, v, lens))
    for schedule in ((4, 1), (16, 1), (4, 9)):
        for values in (v, v.clone()):
            assert_same(launch_plan(reschedule(plan, *schedule), q, k, values, lens), want, schedule)


@both_backends
def test_v_within_k_is_not_read_a_second_time(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = latent(1, 2, 24)
    want = attend(q, k, v, 20, backend=backend)
    module: Any = triton_launch if backend == "triton" else rowwise
    right = module.tile_arguments
    monkeypatch.setattr(module, "tile_arguments", lambda **given: right(**given) | {"v_cache": torch.full_like(k, NAN)})
    assert_same(attend(q, k, v, 20, backend=backend), want)
    assert attend(q, k, v.clone(), 20, backend=backend)[0].isnan().all()


@pytest.mark.parametrize("column", [0, 511, 512, 575])
@both_dtypes
def test_every_column_of_k_counts(column: int, dtype: torch.dtype) -> None:
    q, k, v = latent(1, 2, 24, dtype=dtype)
    q, v = q.zero_(), v.clone()
    q[..., column], k[..., column] = 8.0, torch.linspace(-9, 9, 24, dtype=dtype)[None, :, None]
    assert_parity(attend(q, k, v, 24, backend="triton"), oracle(q, k, v, 24))
