"""Every architecture, without a GPU: kernels compile, nothing spills, shared memory fits."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from compiled import compile_kernel, kernel_launches

from splitkv import DecodeProblem, DeviceSpec, plan_decode

DEVICES = ("a100", "rtx4090", "h200", "b200", "rtx5090", "gb10")  # sm_80, 89, 90, 100, 120, 121
GEOMETRIES = {
    "qwen3.5-9b": dict(num_q_heads=16, num_kv_heads=4, head_dim=256),
    "qwen3.5-27b": dict(num_q_heads=24, num_kv_heads=4, head_dim=256),
    "llama-8b": dict(num_q_heads=32, num_kv_heads=8, head_dim=128),
    "qwen2.5-0.5b": dict(num_q_heads=14, num_kv_heads=2, head_dim=64),
    "group-64": dict(num_q_heads=64, num_kv_heads=1, head_dim=128),
    "192/128": dict(num_q_heads=16, num_kv_heads=16, head_dim=192, v_head_dim=128),
}
ALONE, LOADED = dict(batch=1), dict(batch=64, page_size=16)
PROBLEMS = {
    f"{name} {dtype} {'alone' if layout is ALONE else 'loaded, paged'}": DecodeProblem(
        **GEOMETRIES[name], **layout, q_dtype=dtype, kv_dtype=dtype
    )
    for name in GEOMETRIES
    for dtype in ("f32", "bf16")
    for layout in (ALONE, LOADED)
    if layout is LOADED or name in ("qwen3.5-9b", "llama-8b")
}
PROBLEMS["qwen3.5-9b f16 alone"] = DecodeProblem(**GEOMETRIES["qwen3.5-9b"], **ALONE, q_dtype="f16", kv_dtype="f16")


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("device_name", DEVICES)
def test_kernels_fit(device_name: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, problem = DeviceSpec.named(device_name), PROBLEMS[name]
    launches = kernel_launches(plan_decode(problem, device, backend="triton"), monkeypatch)
    assert set(launches) == {"split_kernel", "merge_kernel", "rowwise_kernel"}
    for kernel_name, (kernel, arguments) in launches.items():
        usage = compile_kernel(kernel, arguments, device.capability)
        assert usage.spilled_bytes == 0, f"{kernel_name}: {usage}"
        assert usage.shared_bytes <= device.shared_memory_bytes, f"{kernel_name}: {usage}"
        if problem.q_dtype == "f32":
            assert "mma" not in usage.ptx, f"{kernel_name}: f32 must stay true f32"
        elif kernel_name == "split_kernel":
            assert "mma" in usage.ptx, "16-bit products belong on the tensor cores"


def test_problems_cover_every_schedule() -> None:
    runs = {plan_decode(problem, DeviceSpec.named("h200"), backend="triton").max_run for problem in PROBLEMS.values()}
    assert runs == {1, 4, 16}
