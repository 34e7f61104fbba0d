"""Each case runs on every backend of this process: cpu always; triton and rowwise on CUDA tensors, or in Triton's
interpreter where TRITON_INTERPRET=1 (make test runs this folder both ways). Faults are planted where tensors are on
the CPU: in the C kernel, and in the Triton kernels as the interpreter runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreting import INTERPRETED, quick_interpreter, silence
from planting import Fault

import splitkv
from splitkv import attention
from splitkv.prepared import CallMemo

__all__ = ["quick_interpreter"]
HERE = Path(__file__).parent
GPU = torch.cuda.is_available() and not INTERPRETED
LOCAL = ["triton", "rowwise"] if INTERPRETED else ["cpu"]
BACKENDS = LOCAL + (["triton", "rowwise"] if GPU else [])
FAULTY = LOCAL[:1]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    silence(here)
    if INTERPRETED:  # what runs on no backend has run in the other process
        twice = [item for item in here if not {"decode", "decode_here", "plant"} & set(item.fixturenames)]  # type: ignore[attr-defined]
        config.hook.pytest_deselected(items=twice)
        items[:] = [item for item in items if item not in twice]


@pytest.fixture(autouse=True)
def _nothing_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are planted in plans and kernels: no test runs a call that an earlier one prepared."""
    monkeypatch.setattr(attention, "_CALLS", CallMemo())


class Decode:
    """decode_attention on one backend: tensors go to its device with their strides, and the answer comes back."""

    def __init__(self, backend: str, device: str = "cpu") -> None:
        self.backend, self.device = backend, device

    @property
    def interpreted(self) -> bool:
        """Whether every key costs a thousand times what it costs elsewhere."""
        return INTERPRETED

    @property
    def dtypes_16(self) -> tuple[torch.dtype, ...]:
        """The interpreter's bf16 arithmetic is wrong."""
        return (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        moved = {name: self.move(value) for name, value in options.items()}
        result = splitkv.decode_attention(*map(self.move, arguments), backend=self.backend, **moved)
        return tuple(part.cpu() for part in result) if isinstance(result, tuple) else result.cpu()

    def move(self, value: Any) -> Any:
        if self.device == "cpu" or not isinstance(value, torch.Tensor) or not value.untyped_storage().nbytes():
            return value.to(self.device) if isinstance(value, torch.Tensor) else value
        whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())  # type: ignore[call-overload]
        return whole.to(self.device).as_strided(value.shape, value.stride(), value.storage_offset())


@pytest.fixture(params=BACKENDS)
def decode(request: pytest.FixtureRequest) -> Decode:
    return Decode(request.param, "cuda" if GPU and request.param != "cpu" else "cpu")


@pytest.fixture(params=LOCAL)
def decode_here(request: pytest.FixtureRequest) -> Decode:
    """On CPU tensors alone: for what tests/gpu does in another way, or does not need."""
    return Decode(request.param)


@pytest.fixture(params=FAULTY)
def plant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Fault], Decode]:
    """Plants a fault and returns the decode that has it."""

    def planted(fault: Fault) -> Decode:
        fault.plant(request.param, monkeypatch, tmp_path)
        return Decode(request.param)

    return planted
