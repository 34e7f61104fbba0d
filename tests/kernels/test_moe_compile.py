"""The experts' kernels compile for every architecture without spilling, at published sizes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from compiled import _Recorder, compile_kernel

from splitkv import DeviceSpec
from splitkv.models import moe_kernels
from splitkv.models.config import Experts

KERNELS = ("router_kernel", "choose_kernel", "gate_up_kernel", "down_kernel")
SIZES = {
    "Qwen3.5-35B-A3B": (2048, Experts(256, 8, 512, 1, True, True, 1.0, 1, 1, frozenset())),
    "DeepSeek-V2-Lite": (2048, Experts(64, 6, 1408, 2, False, False, 1.0, 1, 1, frozenset())),
    "DeepSeek-V2": (5120, Experts(160, 6, 1536, 2, False, False, 16.0, 8, 3, frozenset())),
}


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("model", SIZES)
def test_kernels_fit(model: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, experts = SIZES[model]

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    kernels = {name: getattr(moe_kernels, name) for name in KERNELS}
    recorders = {name: _Recorder() for name in kernels}
    for name, recorder in recorders.items():
        monkeypatch.setattr(moe_kernels, name, recorder)
    total = experts.count + experts.shared
    weights = tensor(total, 2 * experts.width, hidden), tensor(total, hidden, experts.width)
    moe_kernels.step(tensor(2, hidden), tensor(experts.count + experts.gated, hidden), *weights, experts)
    for name, recorder in recorders.items():
        assert recorder.arguments is not None
        usage = compile_kernel(kernels[name], recorder.arguments, DeviceSpec.named(device).capability)
        assert usage.spilled_bytes == 0 and usage.registers <= 160, f"{name}: {usage}"
        if name in ("gate_up_kernel", "down_kernel"):
            assert "ld.global.v4.b32" in usage.ptx, f"{name} reads in small pieces"
