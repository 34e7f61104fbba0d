"""The append kernels compile for every architecture, in every storage type, and keep to their registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from compiled import _Recorder, compile_kernel

from splitkv import DeviceSpec
from splitkv.backends import triton_append

DEVICES = ("a100", "rtx4090", "h200", "b200", "rtx5090")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def launches(monkeypatch: pytest.MonkeyPatch, n: int, dtype: torch.dtype, dims: tuple[int, int]) -> dict[str, Any]:
    """What an append of bf16 tokens to a paged cache launches: {kernel: arguments}."""

    def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    recorders = {name: _Recorder() for name in ("append_kernel", "advance_kernel")}
    with monkeypatch.context() as patch:
        for name, recorder in recorders.items():
            patch.setattr(triton_append, name, recorder)
        triton_append.append(
            k=tensor(3, n, 4, dims[0], dtype=torch.bfloat16),
            v=tensor(3, n, 4, dims[1], dtype=torch.bfloat16),
            k_cache=tensor(64, 16, 4, dims[0], dtype=dtype),
            v_cache=tensor(64, 16, 4, dims[1], dtype=dtype),
            seq_lens=tensor(8),
            dropped=tensor(8, dtype=torch.int64),
            rows=tensor(3),
            lens=tensor(3),
            block_table=tensor(8, 32),
            bounds=tensor(8, 2),
            k_scale=tensor(4, dtype=torch.float32),
            v_scale=0.5,
        )
    return {name: recorder.arguments for name, recorder in recorders.items() if recorder.arguments}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device_name", DEVICES)
def test_append_compiles_everywhere(device_name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    capability = DeviceSpec.named(device_name).capability
    for n, dims in ((1, (128, 128)), (1, (576, 512)), (500, (256, 256))):
        recorded = launches(monkeypatch, n, dtype, dims)
        assert set(recorded) == ({"append_kernel"} if n == 1 else {"append_kernel", "advance_kernel"})
        for name, arguments in recorded.items():
            usage = compile_kernel(getattr(triton_append, name), arguments, capability)
            # ptxas may save two registers where it calls the slow path of an exact division.
            assert usage.spilled_bytes <= 8, f"{name} {n} {dims}: {usage}"
            assert usage.shared_bytes <= 8192, f"{name}: {usage}"
