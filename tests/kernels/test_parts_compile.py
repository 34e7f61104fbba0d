"""The merge of several ranks' parts compiles for every architecture, in every output type, and spills nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from compiled import _Recorder, compile_kernel

from splitkv import DeviceSpec
from splitkv.backends import triton_parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device_name", ["a100", "rtx4090", "h200", "b200", "rtx5090"])
def test_merge_of_parts_compiles_everywhere(
    device_name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for v_head_dim, sunk in ((256, True), (512, False), (48, False)):
        recorder = _Recorder()
        monkeypatch.setattr(triton_parts, "parts_kernel", recorder)
        triton_parts.merge_parts(
            outs=torch.empty(2, 16, v_head_dim, dtype=dtype, device="meta"),
            lses=torch.empty(2, 16, device="meta"),
            sinks=torch.empty(16, device="meta") if sunk else None,
            out=torch.empty(16, v_head_dim, dtype=dtype, device="meta"),
            lse=torch.empty(16, device="meta"),
        )
        monkeypatch.undo()
        assert recorder.arguments is not None
        usage = compile_kernel(triton_parts.parts_kernel, recorder.arguments, DeviceSpec.named(device_name).capability)
        assert usage.spilled_bytes == 0, f"{v_head_dim}: {usage}"
