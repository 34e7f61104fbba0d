"""The kernels in Triton's interpreter, on CPU tensors: run only where TRITON_INTERPRET=1 is set from the start."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from interpreting import INTERPRETED, quick_interpreter, silence

__all__ = ["quick_interpreter"]
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    silence(here)
    if not INTERPRETED:
        for item in here:
            item.add_marker(pytest.mark.skip(reason="run with TRITON_INTERPRET=1"))


@pytest.fixture
def check_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer product or sum that leaves its type's range is an error, not a wrapped value."""
    from triton.runtime.interpreter import interpreter_builder as builder

    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=True, debug=True))
