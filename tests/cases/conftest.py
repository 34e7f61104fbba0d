"""Each case runs on every backend of this process: cpu always; triton and rowwise on CUDA tensors, or in Triton's
interpreter where TRITON_INTERPRET=1 (make test runs this folder both ways)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreting import INTERPRETED, quick_interpreter, silence

import splitkv

__all__ = ["quick_interpreter"]
HERE = Path(__file__).parent
GPU = torch.cuda.is_available() and not INTERPRETED
BACKENDS = ["triton", "rowwise"] if INTERPRETED else ["cpu", "triton", "rowwise"] if GPU else ["cpu"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    silence([item for item in items if HERE in item.path.parents])


class Decode:
    """decode_attention on one backend: tensors go to its device, and the answer comes back."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.device = "cuda" if GPU and backend != "cpu" else "cpu"

    @property
    def dtypes_16(self) -> tuple[torch.dtype, ...]:
        """The interpreter's bf16 arithmetic is wrong."""
        return (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        moved = {name: self._move(value) for name, value in options.items()}
        result = splitkv.decode_attention(*map(self._move, arguments), backend=self.backend, **moved)
        return tuple(part.cpu() for part in result) if isinstance(result, tuple) else result.cpu()

    def _move(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, torch.Tensor) else value


@pytest.fixture(params=BACKENDS)
def decode(request: pytest.FixtureRequest) -> Decode:
    return Decode(request.param)
