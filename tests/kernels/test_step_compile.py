"""The decode step's kernels compile for every architecture without spilling, at published sizes: Qwen3.5-9B's, and of
experts and latents those of others."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from compiled import Usage, _Recorder, compile_kernel

from splitkv import ContiguousKVCache, DeviceSpec
from splitkv.models import (
    delta_kernels,
    latent_kernels,
    moe_kernels,
    place_kernels,
    product_kernels,
    sampling_kernels,
    step_kernels,
)
from splitkv.models.config import DeltaNet, Experts, Latent
from splitkv.models.delta_net import NORM_EPS
from splitkv.models.state import LatentKVCache

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
@pytest.mark.parametrize("case", ["norm", "add", "factor", "paired", "head"])
def test_products(case: str, device: str, compiled: Callable[..., Usage]) -> None:
    options: dict[str, Any] = {"add": case in ("add", "factor"), "paired": case == "paired"}
    if case in ("norm", "paired", "head"):
        options["norm"] = (tensor(HIDDEN, dtype=F32), 1e-6)
    if case == "factor":
        options["factor"] = tensor(1, HIDDEN)
    size = {"norm": 12352, "paired": WIDE, "head": 248320}.get(case, HIDDEN)
    weight = tensor(2 * size if case == "paired" else size, HIDDEN)
    out = tensor(1, size, dtype=F32 if case == "head" else BF16)
    usage = compiled(
        device,
        product_kernels,
        "vector_kernel",
        lambda: product_kernels.product(tensor(1, HIDDEN), weight, out, **options),
    )
    assert usage.spilled_bytes == 0 and usage.registers <= 128
    assert usage.shared_bytes <= DeviceSpec.named(device).shared_memory_bytes
    # Weights are read 16 bytes at a time, into registers or past them.
    assert "evict_first.v4" in usage.ptx.replace(".L2::cache_hint", "") or "cp.async.cg.shared.global" in usage.ptx


def loads_after_wait(usage: Usage) -> list[str]:
    """Loads from global memory that stand after the wait for the kernel before; none where there is no wait."""
    return re.findall(r"\bld\.[\w.:]*global", usage.ptx.partition("griddepcontrol.wait")[2])


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
    # q and k, v and z, two gates and the position: no thread loads what another has, as it would if the layouts of the
    # state and of its keys and values were those of the loads too.
    assert loads_after_wait(usage) == ([] if device == "a100" else ["ld.volatile.global"] * 5)


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
    # Nothing is stored before all is loaded: a store would have to wait for what it stores.
    assert max(usage.ptx.rfind("ld.global"), usage.ptx.rfind("ld.volatile.global")) < usage.ptx.index("st.global")
    assert loads_after_wait(usage) == ([] if device == "a100" else ["ld.volatile.global"] * 9)


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
    # What a kernel reads before its wait may be another's of the step before: only one is still running then.
    if "griddepcontrol" in usage.ptx:
        assert usage.ptx.index("griddepcontrol.wait") < usage.ptx.index("griddepcontrol.launch_dependents")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["blocks_kernel", "rows_kernel"])
def test_argmax(name: str, device: str, compiled: Callable[..., Usage], monkeypatch: pytest.MonkeyPatch) -> None:
    for other in {"blocks_kernel", "rows_kernel"} - {name}:
        monkeypatch.setattr(sampling_kernels, other, _Recorder())
    logits = tensor(2, 248320, dtype=F32)
    assert compiled(device, sampling_kernels, name, lambda: sampling_kernels.argmax(logits)).spilled_bytes == 0


EXPERTS = {
    "Qwen3.5-35B-A3B": (2048, Experts(256, 8, 512, 1, True, True, 1.0, 1, 1, frozenset())),
    "DeepSeek-V2-Lite": (2048, Experts(64, 6, 1408, 2, False, False, 1.0, 1, 1, frozenset())),
    "DeepSeek-V2": (5120, Experts(160, 6, 1536, 2, False, False, 16.0, 8, 3, frozenset())),
}
EXPERT_KERNELS = ("router_kernel", "choose_kernel", "gate_up_kernel", "down_kernel")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", EXPERT_KERNELS)
@pytest.mark.parametrize("model", EXPERTS)
def test_experts(
    model: str, name: str, device: str, compiled: Callable[..., Usage], monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in {*EXPERT_KERNELS} - {name}:
        monkeypatch.setattr(moe_kernels, other, _Recorder())
    hidden, experts = EXPERTS[model]
    total = experts.count + experts.shared
    weights = tensor(total, 2 * experts.width, hidden), tensor(total, hidden, experts.width)
    router, norm = tensor(experts.count + experts.gated, hidden), (tensor(hidden, dtype=F32), 1e-6)
    usage = compiled(
        device,
        moe_kernels,
        name,
        lambda: moe_kernels.step(tensor(2, hidden), router, *weights, experts, norm=norm, add=True),
    )
    assert usage.spilled_bytes == 0 and usage.registers <= 168, usage
    if name in ("gate_up_kernel", "down_kernel"):
        assert "ld.global.v4.b32" in usage.ptx  # weights are read 16 bytes at a time


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("dtype", "rows"), [(BF16, 1), (F32, 2)], ids=str)
def test_latents(
    rows: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: str, compiled: Callable[..., Usage]
) -> None:
    heads, sizes = 16, Latent(None, 512, 64, 128, 128)  # DeepSeek-V2-Lite
    cache = LatentKVCache(rows, 64, 1, 576, v_head_dim=512, dtype=kv_dtype, device="meta")
    kv_b, norm = tensor(heads, 256, 512, dtype=dtype), (tensor(512, dtype=dtype), 1e-6)
    rotation = tensor(rows, 1, 32, dtype=F32), tensor(rows, 1, 32, dtype=F32)
    given = tensor(rows, heads * 192, dtype=dtype), tensor(rows, 576, dtype=dtype), kv_b, norm, rotation
    launches = {
        "absorb_kernel": lambda: latent_kernels.absorb(*given, tensor(rows, dtype=torch.int32), cache, sizes),
        "values_kernel": lambda: latent_kernels.values(tensor(rows, heads, 512, dtype=dtype), kv_b, sizes),
    }
    for name, launch in launches.items():
        usage = compiled(device, latent_kernels, name, launch)
        assert usage.spilled_bytes == 0 and usage.registers <= 168, f"{name}: {usage}"
