"""The decode step's kernels compile for every architecture without spilling, at Qwen3.5-9B's sizes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from compiled import Usage, _Recorder, compile_kernel

from splitkv import ContiguousKVCache, DeviceSpec
from splitkv.models import delta_kernels, place_kernels, product_kernels, sampling_kernels, step_kernels
from splitkv.models.config import DeltaNet
from splitkv.models.delta_net import NORM_EPS

F32, BF16 = torch.float32, torch.bfloat16
DEVICES = ("a100", "h200", "rtx5090")
HIDDEN, WIDE = 4096, 12288


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Usage]:
    """What the kernel needs that a launcher would launch on a device, dependent launches where it has them."""

    def compile_launch(device: str, module: ModuleType, name: str, launch: Callable[[], Any]) -> Usage:
        capability = DeviceSpec.named(device).capability
        kernel, recorder = getattr(module, name), _Recorder()
        pdl = capability >= (9, 0)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, recorder)
            patch.setattr(module, "dependent_launch", lambda _: (pdl, {"launch_pdl": True} if pdl else {}))
            launch()
        usage = compile_kernel(kernel, recorder.arguments, capability)
        assert ("griddepcontrol.wait" in usage.ptx) is pdl
        return usage

    return compile_launch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["norm", "add", "factor", "paired"])
@pytest.mark.parametrize("rows", [1, 16])
def test_products(rows: int, case: str, device: str, compiled: Callable[..., Usage]) -> None:
    options: dict[str, Any] = {"add": case in ("add", "factor"), "paired": case == "paired"}
    if rows == 1 and case in ("norm", "paired"):
        options["norm"] = (tensor(HIDDEN, dtype=F32), 1e-6)
    if rows == 1 and case == "factor":
        options["factor"] = tensor(1, HIDDEN)
    weight = tensor(2 * WIDE if case == "paired" else HIDDEN, HIDDEN)
    out = tensor(rows, WIDE if case == "paired" else HIDDEN)
    usage = compiled(
        device,
        product_kernels,
        "vector_kernel" if rows == 1 else "rows_kernel",
        lambda: product_kernels.product(tensor(rows, HIDDEN), weight, out, **options),
    )
    assert usage.spilled_bytes == 0 and usage.registers <= 128
    assert usage.shared_bytes <= DeviceSpec.named(device).shared_memory_bytes
    # Weights are read 16 bytes at a time.
    assert ".v4.b32" in usage.ptx if rows == 1 else "cp.async.cg.shared.global" in usage.ptx


@pytest.mark.parametrize("device", DEVICES)
def test_delta_net(device: str, compiled: Callable[..., Usage]) -> None:
    sizes = DeltaNet(16, 32, 128, 128, 4)
    weights = {"weight": tensor(sizes.channels, 4), "norm": tensor(128), "sizes": sizes}
    weights |= {"rate": tensor(32, dtype=F32), "dt_bias": tensor(32, dtype=F32)}
    arguments = (
        tensor(2, sizes.channels + 32 * 128 + 64),
        tensor(2, dtype=torch.int32),
        tensor(2, 4, sizes.channels),
        tensor(2, 32, 128, 128, dtype=F32),
    )
    usage = compiled(
        device,
        delta_kernels,
        "delta_kernel",
        lambda: delta_kernels.step(*arguments, **weights, unit_eps=NORM_EPS, norm_eps=1e-6),
    )
    assert usage.spilled_bytes == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn], ids=str)
def test_norms_rotation_and_append(kv_dtype: torch.dtype, device: str, compiled: Callable[..., Usage]) -> None:
    cache = ContiguousKVCache(2, 1024, 4, 256, dtype=kv_dtype, device="meta")
    norms = (tensor(256, dtype=F32), tensor(256, dtype=F32), 1e-6)
    rotation = (tensor(2, 1, 32, dtype=F32), tensor(2, 1, 32, dtype=F32))
    positions = tensor(2, dtype=torch.int32)
    usage = compiled(
        device,
        place_kernels,
        "place_kernel",
        lambda: place_kernels.place(tensor(2, 10240), norms, rotation, positions, cache, 16, gated=True),
    )
    assert usage.spilled_bytes == 0


LAUNCHES = {
    "norm_kernel": lambda: step_kernels.norm(tensor(2, HIDDEN), tensor(HIDDEN, dtype=F32), 1e-6),
    "swiglu_kernel": lambda: step_kernels.swiglu(tensor(2, 2 * WIDE)),
    "begin_kernel": lambda: step_kernels.begin(
        tensor(2, dtype=torch.int64),
        tensor(248320, HIDDEN),
        tensor(32, dtype=F32),
        1.0,
        tensor(2, dtype=torch.int32),
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAUNCHES)
def test_between_products(name: str, device: str, compiled: Callable[..., Usage]) -> None:
    usage = compiled(device, step_kernels, name, LAUNCHES[name])
    # Cosines of large angles take a table on the stack, and no registers are spilled to it.
    assert usage.spilled_bytes <= (40 if name == "begin_kernel" else 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["blocks_kernel", "rows_kernel"])
def test_argmax(name: str, device: str, compiled: Callable[..., Usage], monkeypatch: pytest.MonkeyPatch) -> None:
    for other in {"blocks_kernel", "rows_kernel"} - {name}:
        monkeypatch.setattr(sampling_kernels, other, _Recorder())
    logits = tensor(2, 248320, dtype=F32)
    assert compiled(device, sampling_kernels, name, lambda: sampling_kernels.argmax(logits)).spilled_bytes == 0
