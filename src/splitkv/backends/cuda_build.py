"""Compile the CUDA kernels with NVRTC, once per machine and variant, and load them. Needs no nvcc and no headers.

Cubins are cached under a hash of everything that shapes them and moved into place whole (whole_file.py).
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..whole_file import whole_file
from .cache_files import cache_directory
from .cuda_driver import checked, take_context


class Source(NamedTuple):
    """A kernel, <name>_kernel, and its files in this package, which are compiled as one."""

    name: str
    files: tuple[str, ...]


PACKAGE = Path(__file__).parents[1]
TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3, torch.float32: 4}
"""Dtypes as cuda_basics.cuh numbers them."""
OPTIONS = ("--std=c++17", "-fmad=false", "-default-device")

Defines = tuple[tuple[str, int], ...]
Kernel = Any
"""The driver's handle of a loaded kernel."""


def compile_cubin(source: Source, defines: Defines, capability: tuple[int, int]) -> bytes:
    """The machine code of a kernel for a compute capability, from the cache or compiled now; needs no GPU.

    Raises RuntimeError with the compiler's message.
    """
    from cuda.bindings import nvrtc

    text = "\n".join((PACKAGE / file).read_text() for file in source.files)
    file = source.files[-1]
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", *OPTIONS, *(f"-D{k}={v}" for k, v in defines)]
    version = checked(nvrtc.nvrtcVersion())
    digest = hashlib.sha256(repr((text, options, version)).encode()).hexdigest()[:24]
    path = cache_directory() / f"cuda-{source.name}-{digest}.cubin"
    if path.exists():
        return path.read_bytes()
    program = checked(nvrtc.nvrtcCreateProgram(text.encode(), file.encode(), 0, [], []))[0]
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))[0]
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{file} does not compile for sm_{capability[0]}{capability[1]}: {log.decode().strip()}")
        cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))[0]
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    with whole_file(path) as temporary:
        temporary.write_bytes(cubin)
    return cubin


@cache
def load_kernel(
    source: Source, defines: Defines, capability: tuple[int, int], device: int, shared_bytes: int
) -> Kernel:
    """The kernel on a device, which must be the current one, with room for this much dynamic shared memory."""
    from cuda.bindings import driver

    take_context(device)
    module = checked(driver.cuModuleLoadData(compile_cubin(source, defines, capability)))[0]
    function = checked(driver.cuModuleGetFunction(module, f"{source.name}_kernel".encode()))[0]
    attributes = driver.CUfunction_attribute
    if shared_bytes:
        checked(
            driver.cuFuncSetAttribute(
                function, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
            )
        )
    # One division of an SM's memory for all kernels: changing it between two would wait for the SM to empty.
    checked(driver.cuFuncSetAttribute(function, attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100))
    return function
