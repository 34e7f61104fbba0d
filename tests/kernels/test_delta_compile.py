"""The delta-net step's kernels compile for every architecture without spilling, at Qwen3.5's sizes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from compiled import _Recorder, compile_kernel

from splitkv import DeviceSpec
from splitkv.models import delta_kernels
from splitkv.models.config import DeltaNet
from splitkv.models.delta_net import NORM_EPS

SIZES = DeltaNet(16, 32, 128, 128, 4)  # Qwen3.5-9B


@pytest.mark.parametrize("device", ["a100", "rtx4090", "h200", "b200"])
def test_kernels_fit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    f32 = torch.float32
    weights = {"weight": tensor(SIZES.channels, 4), "rate": tensor(32, dtype=f32), "dt_bias": tensor(32, dtype=f32)}
    kernels = {name: getattr(delta_kernels, name) for name in ("conv_kernel", "state_kernel")}
    recorders = {name: _Recorder() for name in kernels}
    for name, recorder in recorders.items():
        monkeypatch.setattr(delta_kernels, name, recorder)
    states = tensor(2, SIZES.channels, 3), tensor(2, 32, 128, 128, dtype=f32)
    rows = tensor(2, SIZES.channels), tensor(2, 32), tensor(2, 32)
    delta_kernels.step(*rows, *states, **weights, sizes=SIZES, eps=NORM_EPS)
    for name, recorder in recorders.items():
        usage = compile_kernel(kernels[name], recorder.arguments, DeviceSpec.named(device).capability)
        assert usage.spilled_bytes == 0 and usage.registers <= 128, f"{name}: {usage}"
