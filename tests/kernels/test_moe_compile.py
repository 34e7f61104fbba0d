"""The kernels of experts and latents compile for every architecture without spilling, at published sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from compiled import Usage, _Recorder, compile_kernel

from splitkv import DeviceSpec
from splitkv.models import latent_kernels, moe_kernels
from splitkv.models.config import Experts, Latent
from splitkv.models.state import LatentKVCache

KERNELS = ("router_kernel", "choose_kernel", "gate_up_kernel", "down_kernel")
SIZES = {
    "Qwen3.5-35B-A3B": (2048, Experts(256, 8, 512, 1, True, True, 1.0, 1, 1, frozenset())),
    "DeepSeek-V2-Lite": (2048, Experts(64, 6, 1408, 2, False, False, 1.0, 1, 1, frozenset())),
    "DeepSeek-V2": (5120, Experts(160, 6, 1536, 2, False, False, 16.0, 8, 3, frozenset())),
}


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def usages(module: Any, names: tuple[str, ...], launch: Any, device: str, monkeypatch: Any) -> dict[str, Usage]:
    """What each kernel needs on a device, compiled as `launch` launches it."""
    kernels = {name: getattr(module, name) for name in names}
    recorders = {name: _Recorder() for name in kernels}
    for name, recorder in recorders.items():
        monkeypatch.setattr(module, name, recorder)
    launch()
    found = {}
    for name, recorder in recorders.items():
        assert recorder.arguments is not None
        found[name] = compile_kernel(kernels[name], recorder.arguments, DeviceSpec.named(device).capability)
        assert found[name].spilled_bytes == 0 and found[name].registers <= 160, f"{name}: {found[name]}"
    return found


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_latent_kernels_fit(
    dtype: torch.dtype, kv_dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, sizes = 16, Latent(None, 512, 64, 128, 128)  # DeepSeek-V2-Lite
    cache = LatentKVCache(2, 64, 1, 576, v_head_dim=512, dtype=kv_dtype, device="meta")
    kv_b = tensor(heads, 256, 512, dtype=dtype)

    def launch() -> None:
        rotation = tensor(2, 1, 32, dtype=torch.float32), tensor(2, 1, 32, dtype=torch.float32)
        given = tensor(2, heads * 192, dtype=dtype), tensor(2, 576, dtype=dtype), kv_b
        positions = tensor(2, dtype=torch.int32)
        latent_kernels.absorb(*given, (tensor(512, dtype=dtype), 1e-6), rotation, positions, cache, sizes)
        latent_kernels.values(tensor(2, heads, 512, dtype=dtype), kv_b, sizes)

    usages(latent_kernels, ("absorb_kernel", "values_kernel"), launch, device, monkeypatch)


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("model", SIZES)
def test_kernels_fit(model: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, experts = SIZES[model]
    total = experts.count + experts.shared
    weights = tensor(total, 2 * experts.width, hidden), tensor(total, hidden, experts.width)

    def launch() -> None:
        moe_kernels.step(tensor(2, hidden), tensor(experts.count + experts.gated, hidden), *weights, experts)

    found = usages(moe_kernels, KERNELS, launch, device, monkeypatch)
    for name in ("gate_up_kernel", "down_kernel"):
        assert "ld.global.v4.b32" in found[name].ptx, f"{name} reads in small pieces"
