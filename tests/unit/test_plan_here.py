"""Planning and running agree on the backend, whatever this installation can compile and SPLITKV_BACKEND says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitkv import (
    DecodeAttention,
    DecodeProblem,
    DeviceSpec,
    UnsupportedError,
    attention,
    plan_decode,
    workspace_bytes,
)
from splitkv.attention import choose_backend, plan_for

H200 = DeviceSpec.named("h200")
GPU = torch.device("cuda", 0)
TAKEN = DecodeProblem(1, 8, 2, 128, capacity=20_000, q_dtype="f16", kv_dtype="f16")
REFUSED = replace(TAKEN, q_dtype="f32")
LOADED = replace(TAKEN, batch=64)  # the two backends' schedules take other scratch


def inputs(problem: DecodeProblem) -> Any:
    """As much of DecodeInputs as the choice reads, as if on a GPU."""
    tensor = SimpleNamespace(is_cuda=True, device=GPU, shape=(1, 16), stride=lambda: (16, 1), data_ptr=lambda: 0)
    return SimpleNamespace(problem=problem, q=tensor, k_cache=tensor, v_cache=tensor)


@pytest.fixture(params=[True, False], ids=["NVRTC", "no NVRTC"])
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DeviceSpec:
    """This machine's GPU, and whether CUDA can be compiled for it."""
    device = replace(H200, name="here", compiles_cuda=request.param)
    monkeypatch.setattr(attention, "_device_spec", lambda on: device)
    for name in ("SPLITKV_BACKEND", "SPLITKV_POLICY", "SPLITKV_GQA_PACK"):
        monkeypatch.delenv(name, raising=False)
    return device


@pytest.mark.parametrize("variable", ["", "auto", " Triton ", "rowwise"])
@pytest.mark.parametrize("problem", [TAKEN, REFUSED, LOADED], ids=["taken", "refused", "loaded"])
def test_the_plan_is_that_of_the_backend_that_runs(
    problem: DecodeProblem, variable: str, here: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITKV_BACKEND", variable)
    name = choose_backend("auto", inputs(problem))
    runs = plan_for(problem, GPU, "auto", name)
    assert runs.backend == ("cuda" if name == "cuda" else "triton")
    for planned in (plan_for(problem, GPU, "auto"), plan_decode(problem, here)):
        assert planned == runs
    assert workspace_bytes(problem, here) == runs.workspace_bytes


def test_what_is_compared_differs() -> None:
    assert plan_decode(LOADED, H200).workspace_bytes != plan_decode(LOADED, H200, backend="triton").workspace_bytes
    assert plan_decode(TAKEN, H200).backend == "cuda"


def test_a_loop_s_scratch_is_that_of_its_backend(here: DeviceSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeAttention, "_scratch", lambda self, plan: None)  # no GPU to allocate on
    monkeypatch.setattr(torch, "empty", lambda *_, device, **__: SimpleNamespace(device=torch.device(device)))
    loop = DecodeAttention(LOADED, device=GPU)
    assert loop.plan.backend == ("cuda" if here.compiles_cuda else "triton")
    assert loop.workspace_bytes == plan_for(LOADED, GPU, "auto", loop.plan.backend).workspace_bytes
    monkeypatch.setenv("SPLITKV_BACKEND", "triton")
    assert DecodeAttention(LOADED, device=GPU).plan == plan_for(LOADED, GPU, "auto", "triton")


def test_cuda_by_name_is_refused_for_the_right_reason(here: DeviceSpec) -> None:
    missing = "backend: cuda (needs|expects) cuda-bindings and NVRTC"
    if here.compiles_cuda:
        assert choose_backend("cuda", inputs(TAKEN)) == "cuda"
    else:
        with pytest.raises(UnsupportedError, match=missing):
            choose_backend("cuda", inputs(TAKEN))
        with pytest.raises(ValueError, match=f"{missing}, which here has not"):
            plan_decode(TAKEN, here, backend="cuda")
    with pytest.raises(UnsupportedError, match="f32 queries over f32 caches alone" if here.compiles_cuda else missing):
        choose_backend("cuda", inputs(REFUSED))


def test_a_named_backend_stands_above_the_variable(here: DeviceSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITKV_BACKEND", "triton")
    if here.compiles_cuda:
        assert choose_backend("cuda", inputs(TAKEN)) == "cuda"
        assert plan_decode(TAKEN, here, backend="cuda").backend == "cuda"


def test_devices_by_name_are_taken_to_compile() -> None:
    assert plan_decode(TAKEN, H200) == plan_decode(TAKEN, H200, backend="cuda")
