"""What folders that run in Triton's interpreter share: its warnings silenced, its repeated work saved."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def silence(items: list[pytest.Item]) -> None:
    """Hide what Triton's interpreter itself gives rise to, thousands of times."""
    for item in items:
        item.add_marker(
            pytest.mark.filterwarnings("ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton")
        )


@pytest.fixture(autouse=True, scope="module")
def quick_interpreter() -> Iterator[None]:
    """Two thirds of the time of these tests, saved.

    Tensors here are tiny, so a second thread only waits. The interpreter of Triton 3.6 swaps the functions of
    triton.language for its own at every call of every jit function, though they stay swapped: once is enough. And
    its check for integer overflow doubles the work: `check_overflow` turns it on where that is the question.
    """
    if not INTERPRETED:
        yield
        return
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
