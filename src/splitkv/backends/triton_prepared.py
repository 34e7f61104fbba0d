"""Launch Triton kernels again without Triton's own look-up: 2 us of host time where that takes 35 (75 arguments).

The first launch of a `TritonLaunch` goes through Triton, which compiles and returns the compiled kernel. Later ones
hand that kernel's C launcher the same arguments with other addresses. That is safe where all that Triton specialises
on stays: constants, types, whether an integer is 1 or a multiple of 16, whether an address is a multiple of 16. All
but addresses and the uniform length are fixed here, the latter is not specialised on, and whoever keeps a prepared
launch keeps it under the alignments (prepared.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from . import TENSORS

DIRECT_VERSIONS = ((3, 6), (3, 9))
"""First and last Triton whose C launcher was read, and takes what `direct_launch` gives it."""

SOURCES = {"k_scales": "k_scale", "v_scales": "v_scale", "partial_out": "workspace"}
"""Kernel parameter to the tensor whose address it takes, where the names differ."""

WORKSPACE = TENSORS.index("workspace")
LENGTH = len(TENSORS)
"""A launch's values are the addresses, the uniform length at this index, and the second half of the workspace."""
SECOND_HALF = LENGTH + 1


@dataclass(frozen=True)
class KernelCall:
    """One launch of one kernel: its arguments by name, the tensors among them, and Triton's options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Pointer:
    """What Triton reads of a tensor: its type and address."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


class TritonLaunch:
    """The kernels of one call, launched one after the other on the current stream (backends.PreparedLaunch)."""

    def __init__(self, calls: Sequence[KernelCall], tensors: Mapping[str, Any]) -> None:
        self._device: int = tensors["q"].device.index
        arguments = calls[0].arguments
        self._offset = 0
        if len(calls) > 1:  # split, and merge
            self._offset = arguments["partial_ml"].data_ptr() - arguments["partial_out"].data_ptr()
        self._kernels = [PreparedKernel(call, tensors) for call in calls]
        self.variant: Hashable = tuple(kernel.variant for kernel in self._kernels)

    def __call__(self, addresses: Sequence[int], uniform_len: int) -> None:
        values = (*addresses, uniform_len, addresses[WORKSPACE] + self._offset)
        if torch.cuda.current_device() == self._device:
            self._launch(values)
        else:
            with torch.cuda.device(self._device):
                self._launch(values)

    def _launch(self, values: tuple[int, ...]) -> None:
        stream = driver.active.get_current_stream(self._device)
        listening = _hooked(knobs.runtime.launch_enter_hook) or _hooked(knobs.runtime.launch_exit_hook)
        for kernel in self._kernels:
            kernel(values, stream, listening)


class PreparedKernel:
    """One kernel of a prepared launch. Holds no tensor."""

    def __init__(self, call: KernelCall, tensors: Mapping[str, Any]) -> None:
        self._kernel, self._grid, self._options = call.kernel, call.grid, call.options
        self._names: list[str] = call.kernel.arg_names
        self._dtypes = {name: value.dtype for name, value in call.arguments.items() if isinstance(value, Tensor)}
        tensors_end, length = len(self._dtypes), self._names.index("uniform_len")
        if set(self._names[:tensors_end]) != set(self._dtypes):
            raise TypeError(f"{call.kernel.fn.__name__}: expected its tensors before its other parameters")
        self._pick = itemgetter(*(_source(name, tensors) for name in self._names[:tensors_end]))
        self._before = tuple(call.arguments[name] for name in self._names[tensors_end:length])
        self._after = tuple(call.arguments[name] for name in self._names[length + 1 :])
        self._compiled: Any = None
        self._direct: Callable[[int, tuple[Any, ...]], None] | None = None
        self.variant: Hashable = (
            call.kernel.fn.__name__,
            tuple(call.options.items()),
            tuple(_specialisation(parameter, call.arguments[parameter.name]) for parameter in call.kernel.params),
        )

    def __call__(self, values: tuple[int, ...], stream: int, listening: bool) -> None:
        """Launch on this stream of the current device. listening: a profiler waits for Triton's word."""
        arguments = (*self._pick(values), *self._before, values[LENGTH], *self._after)
        if self._direct is not None and not listening:
            self._direct(stream, arguments)
            return
        named = {
            name: Pointer(self._dtypes[name], value) if name in self._dtypes else value
            for name, value in zip(self._names, arguments, strict=True)
        }
        self._compiled = self._kernel[self._grid](**named, **self._options)  # kept: some Tritons unload it at its end
        self._direct = direct_launch(self._compiled, self._grid)


def direct_launch(compiled: Any, grid: tuple[int, ...]) -> Callable[[int, tuple[Any, ...]], None] | None:
    """A function of a stream and of the kernel's arguments, constants included, that launches it on the current device.
    None where this Triton or this kernel wants more than that."""
    version = triton_version()
    if compiled is None:  # one of Triton's hooks wants the launch for itself
        return None
    if not DIRECT_VERSIONS[0] <= version <= DIRECT_VERSIONS[1] or driver.active.get_current_target().backend != "cuda":
        return None
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
        return None
    launch, function, metadata = launcher.launch, compiled.function, compiled.packed_metadata
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
    x, y, z = grid
    if version == (3, 6):

        def direct(stream: int, arguments: tuple[Any, ...]) -> None:
            launch(
                x, y, z, stream, function, cooperative, dependent, None, None, metadata, None, None, None, *arguments
            )

        return direct
    annotations, signature = launcher.arg_annotations, launcher.kernel_signature

    def direct_from_3_7(stream: int, arguments: tuple[Any, ...]) -> None:
        launch(
            x, y, z, stream, function, cooperative, dependent, metadata, None, None, None, None, None, annotations,
            signature, arguments,
        )  # fmt: skip

    return direct_from_3_7


def triton_version() -> tuple[int, int]:
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's, where it is not."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def _hooked(hook: Any) -> bool:
    return bool(getattr(hook, "calls", hook))


def _source(name: str, tensors: Mapping[str, Any]) -> int:
    """Index of a pointer's address among a launch's values; absent tensors are stood in for by q."""
    if name == "partial_ml":
        return SECOND_HALF if isinstance(tensors["workspace"], Tensor) else TENSORS.index("q")
    source = SOURCES.get(name, name)
    return TENSORS.index(source if isinstance(tensors[source], Tensor) else "q")


def _specialisation(parameter: Any, value: Any) -> Hashable:
    """What Triton compiles a kernel for, of one argument."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if parameter.is_constexpr:
        return value
    if isinstance(value, int):
        wide = value >= 2**31
        return wide if parameter.do_not_specialize else (wide, value == 1, value % 16 == 0)
    return float
