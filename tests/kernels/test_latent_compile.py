"""Absorbed MLA (head_dim 576, V the first 512 columns of K) on every architecture, without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from compiled import compile_kernel, kernel_launches

from splitkv import DecodeProblem, DeviceSpec, plan_decode

DEVICES = ("a100", "rtx4090", "h200", "b200", "rtx5090", "gb10")  # sm_80, 89, 90, 100, 120, 121
SHAPES = {
    "16 heads": dict(batch=1, num_q_heads=16),
    "16 heads, loaded, paged": dict(batch=64, num_q_heads=16, page_size=64),
    "128 heads": dict(batch=1, num_q_heads=128),
    "16 heads x 4 queries, loaded, paged": dict(batch=64, num_q_heads=16, q_len=4, page_size=64),
}


def problem_of(shape: str, dtype: str) -> DecodeProblem:
    q_dtype = "bf16" if dtype.startswith("fp8") else dtype
    return DecodeProblem(**SHAPES[shape], num_kv_heads=1, head_dim=576, v_head_dim=512, q_dtype=q_dtype, kv_dtype=dtype)


@pytest.mark.parametrize("v_in_k", [True, False], ids=["V in K", "V apart"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3", "f32"])
@pytest.mark.parametrize("device_name", DEVICES)
def test_kernels_fit(device_name: str, dtype: str, shape: str, v_in_k: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = DeviceSpec.named(device_name)
    if dtype == "fp8_e4m3" and device.capability < (8, 9):
        dtype = "f16"  # this GPU has no such type; attention.py refuses it
    plan = plan_decode(problem_of(shape, dtype), device)
    launches = kernel_launches(plan, monkeypatch, v_in_k=v_in_k)
    for name in ("split_kernel", "rowwise_kernel") if shape == "16 heads" else ("split_kernel",):
        kernel, arguments = launches[name]
        usage = compile_kernel(kernel, arguments, device.capability)
        assert arguments["V_IN_K"] == v_in_k
        assert usage.spilled_bytes == 0, f"{name}: {usage}"
        assert usage.shared_bytes <= device.shared_memory_bytes, f"{name}: {usage}"
        assert ("mma" in usage.ptx) == (dtype != "f32"), f"{name}: f32 true f32, the rest on the tensor cores"


def test_the_merge_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = DeviceSpec.named("h200")
    plan = plan_decode(problem_of("16 heads", "bf16"), device)
    kernel, arguments = kernel_launches(plan, monkeypatch)["merge_kernel"]
    assert compile_kernel(kernel, arguments, device.capability).spilled_bytes == 0


def test_one_row_fills_an_h200() -> None:
    for shape in ("16 heads", "128 heads"):
        plan = plan_decode(problem_of(shape, "bf16"), DeviceSpec.named("h200"))
        assert plan.num_splits == 128
        assert plan.waves >= 0.9
