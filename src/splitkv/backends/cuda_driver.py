"""Launches of loaded CUDA kernels by the driver's own function, through ctypes.

cuda-bindings' cuLaunchKernelEx builds objects at every call. Here configurations are made once, by cuda-bindings, and a
launch hands over addresses: 1 us of Python for two kernels, the driver's own time aside.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

DRIVER = "libcuda.so.1"
INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: this thread has none yet. PyTorch gives a thread one when it needs it itself."""


class Launches:
    """Kernels that take the same arguments, one after the other on a stream, and memory for these arguments.

    device: whose they are. params: the bytes of the arguments, `pointers` addresses first and a 32-bit length at
    `length_at`. For one launch at a time: the driver copies arguments while it launches.
    """

    def __init__(
        self, device: int, kernels: Sequence[tuple[Any, Any]], params: bytes, pointers: int, length_at: int
    ) -> None:
        self._device, self._launch = device, launch_function()
        self._configs = [config for config, _ in kernels]  # they own what the addresses below point to
        self._kernels = [pointers_to(config, function) for config, function in kernels]
        self._params = ctypes.create_string_buffer(params, len(params))
        self._pointers: Any = (ctypes.c_int64 * pointers).from_buffer(self._params)
        self._length = ctypes.c_int32.from_buffer(self._params, length_at)
        self._to_params = ctypes.c_void_p(ctypes.addressof(self._params))
        self._arguments = ctypes.c_void_p(ctypes.addressof(self._to_params))

    def __call__(self, addresses: Sequence[int], uniform_len: int) -> None:
        """Raises RuntimeError with the driver's status."""
        self._pointers[:] = addresses
        self._length.value = uniform_len
        launch, arguments = self._launch, self._arguments
        for config, function in self._kernels:
            if status := launch(config, function, arguments, None):
                launch_again(status, self._device, config, function, arguments)


def launch_once(device: int, config: Any, function: Any, params: bytes) -> None:
    """A kernel that takes one struct. Raises RuntimeError with the driver's status."""
    copy = ctypes.create_string_buffer(params, len(params))
    to_params = ctypes.c_void_p(ctypes.addressof(copy))
    arguments, launch = ctypes.c_void_p(ctypes.addressof(to_params)), launch_function()
    pointers = pointers_to(config, function)
    if status := launch(*pointers, arguments, None):
        launch_again(status, device, *pointers, arguments)


def pointers_to(config: Any, function: Any) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """What the driver is given of a CUlaunchConfig and a CUfunction, to be made once."""
    return ctypes.c_void_p(int(config.getPtr())), ctypes.c_void_p(int(function))


def launch_again(
    status: int, device: int, config: ctypes.c_void_p, function: ctypes.c_void_p, arguments: ctypes.c_void_p
) -> None:
    """After a launch that failed with this status: once more if it lacked a context. Raises RuntimeError."""
    if status == INVALID_CONTEXT:
        take_context(device)
        status = launch_function()(config, function, arguments, None)
    if status:
        raise RuntimeError(f"CUDA: {status_name(status)}")


def launch_config(
    grid: tuple[int, int, int], threads: int, shared_bytes: int, stream: int, dependent: bool, cluster: int = 1
) -> Any:
    """A CUlaunchConfig. dependent: starts while the kernel before it ends, and waits for it by itself. cluster: blocks
    side by side in x that are held close to each other."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, stream
    attributes = []
    if dependent:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    if cluster > 1:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attributes[-1].value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


@cache
def launch_function() -> Callable[[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, None], int]:
    """The driver's cuLaunchKernelEx(config, function, addresses of the arguments, extra) -> status.

    Without argtypes, which cost 0.2 us a launch: it takes c_void_p and None alone. It lets other threads run meanwhile:
    a launch waits where the stream's queue is full.
    """
    function: Any = ctypes.CDLL(DRIVER).cuLaunchKernelEx  # returns an int
    return function


def take_context(device: int) -> None:
    """Gives this thread the device's context if it has none. Raises RuntimeError with the driver's status."""
    from cuda.bindings import driver

    if int(checked(driver.cuCtxGetCurrent())[0]) == 0:
        context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(device))[0]))[0]
        checked(driver.cuCtxSetCurrent(context))


def checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What follows the status of a driver or compiler call. Raises RuntimeError where that is not success."""
    if result[0].value:
        raise RuntimeError(f"CUDA: {result[0].name}")
    return result[1:]


def status_name(status: int) -> str:
    """CUDA_ERROR_… of a status; its number where this cuda-bindings does not know it."""
    from cuda.bindings import driver

    try:
        return driver.CUresult(status).name
    except ValueError:
        return f"status {status}"
