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
    """Most of the time of these tests, saved.

    Tensors here are tiny, so a second thread only waits. The interpreter of Triton 3.6 swaps the functions of
    triton.language for its own at every call of every jit function, though they stay swapped: once is enough. Its
    check for integer overflow doubles the work: `check_overflow` turns it on where that is the question. And it
    spells the type of every value out anew, which takes longer than to compute the value: `_types_made_once`.
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
        _types_made_once(interpreter, patch)
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


def _types_made_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """What follows from a shape or an element type alone is made by Triton once, and then shared: nothing alters it."""
    core = interpreter.tl.core
    make_block, make_tensor, tuple_type, numpy_dtype = (
        core.block_type.__init__, core.tensor.__init__, core._type_for_tuple_values, interpreter._get_np_dtype,
    )  # fmt: skip
    blocks, tensors, tuples, dtypes = {}, {}, {}, {}
    equal = core.tuple.__eq__
    answers = {value: core.constexpr(value) for value in (True, False)}

    def block_init(block: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *shape
        if key not in blocks or not _integers(shape):
            make_block(block, element_ty, shape)
            blocks[key] = block.shape, block.numel, block.name
        block.element_ty = element_ty
        block.shape, block.numel, block.name = blocks[key]

    def tensor_init(tensor: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if key not in tensors:
            make_tensor(tensor, handle, type)
            tensors[key] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = tensors[key]

    def type_of_tuple(values: Any, fields: Any = None) -> Any:
        if fields is not None or not _integers(values):
            return tuple_type(values, fields)
        key = (*values,)
        if key not in tuples:
            tuples[key] = tuple_type(values)
        return tuples[key]

    def same_values(values: Any, other: Any) -> Any:
        if not _integers(values.values) or not _integers(other):
            return equal(values, other)
        return answers[values.values == [*other]]

    def dtype_in_numpy(type: Any) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(type)
        return dtypes[name]

    patch.setattr(core.block_type, "__init__", block_init)
    patch.setattr(core.tensor, "__init__", tensor_init)
    patch.setattr(core.tuple, "__eq__", same_values)
    patch.setattr(core, "_type_for_tuple_values", type_of_tuple)
    patch.setattr(interpreter, "_get_np_dtype", dtype_in_numpy)


def _integers(values: Any) -> bool:
    for value in values:  # noqa: SIM110  # a generator takes twice as long
        if type(value) is not int:
            return False
    return True
