"""The kernels in Triton's interpreter, on CPU tensors: run only where TRITON_INTERPRET=1 is set from the start."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    for item in here:  # what Triton's interpreter itself gives rise to, thousands of times
        item.add_marker(
            pytest.mark.filterwarnings("ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton")
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    for item in here:
        item.add_marker(pytest.mark.skip(reason="run with TRITON_INTERPRET=1"))


@pytest.fixture(autouse=True, scope="module")
def _quick_interpreter() -> Iterator[None]:
    """Two thirds of the time of these tests, saved.

    Tensors here are tiny, so a second thread only waits. The interpreter of Triton 3.6 swaps the functions of
    triton.language for its own at every call of every jit function, though they stay swapped: once is enough. And
    its check for integer overflow doubles the work: `check_overflow` turns it on where that is the question.
    """
    from triton.runtime import interpreter

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
            patch.setattr(interpreter, "_patch_lang", _once_per_module(interpreter))
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def check_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer product or sum that leaves its type's range is an error, not a wrapped value."""
    from triton.runtime.interpreter import interpreter_builder as builder

    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=True, debug=True))


def _once_per_module(interpreter: Any) -> Any:
    patch_language, done = interpreter._patch_lang, set()
    languages = {id(interpreter.tl), id(interpreter.tl.core)}

    def patch_once(function: Any) -> Any:
        seen = frozenset(languages.intersection(map(id, function.__globals__.values())))
        if seen not in done:
            done.add(seen)
            patch_language(function)
        return interpreter._LangPatchScope()  # nothing to restore

    return patch_once
