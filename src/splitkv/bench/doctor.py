"""`splitkv doctor`: what of this machine works, found out by trying it."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, cast

import splitkv

from . import machine, record

SCHEMA = "splitkv.doctor.v1"
OK, WARN, FAIL, ABSENT = "ok", "warn", "fail", "absent"
BACKENDS = {"cpu": ("cpu",), "cuda": ("triton", "rowwise", "cpu")}
"""Backends that can run where the default device is this one; the first is what backend="auto" takes."""
CPU_STATUS_MODULE = "splitkv.backends.cpu"
CPU_COMPILED = "native"
COMPILERS = ("cc", "gcc", "clang")
TOLERANCE = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}
"""Largest |out - float64| of the tiny decode that counts as working; its output is about 0.1 to 1."""
GIB = 1 << 30


@dataclass(frozen=True)
class Check:
    """One line of the report. status: ok, warn (works, with a catch), fail, absent (not there, not
    needed)."""

    name: str
    status: str
    detail: str


def examine() -> dict[str, Any]:
    """Every check, the backend that backend="auto" takes here and why, and whether it works (`passed`)."""
    device, chosen, why = choose()
    checks = list(_software())
    checks += _cuda_device() if device == "cuda" else [_no_cuda_device()]
    checks += _host()
    decodes = {backend: _decode_check(backend) for backend in dict.fromkeys((chosen, *BACKENDS[device]))}
    passed = decodes[chosen].status != FAIL
    return {
        "schema": SCHEMA,
        **record.provenance(),
        "command": record.command_line("doctor", {"json": True}),
        "device": device,
        "backend": chosen,
        "why": why,
        "passed": passed,
        "checks": [asdict(check) for check in (*checks, *decodes.values())],
    }


def choose() -> tuple[str, str, str]:
    """(device, backend, why) of a call with backend="auto" on this machine's default device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend, named = machine.default_backend(device)
    if named:
        return device, backend, "SPLITKV_BACKEND says so"
    if backend == "cuda":
        return device, backend, "PyTorch sees a CUDA GPU; f32 caches and large groups go to the Triton kernels"
    if device == "cuda":
        return device, backend, "PyTorch sees a CUDA GPU, and NVRTC is missing: pip install 'splitkv[gpu]'"
    return device, backend, "PyTorch sees no CUDA GPU, and tensors in main memory go to the CPU kernel"


def _software() -> Iterator[Check]:
    import torch

    yield Check("splitkv", OK, splitkv.__version__)
    yield Check("python", OK, machine.python_summary())
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Check("torch", OK, f"{torch.__version__} ({build}), {torch.get_num_threads()} threads")
    triton = machine.package_version("triton")
    needed = torch.cuda.is_available()
    absent = "not installed; GPU kernels need it: pip install 'splitkv[gpu]'"
    yield Check("triton", OK if triton else FAIL if needed else ABSENT, triton or absent)
    settings = [f"{name}={os.environ[name]}" for name in record.VARIABLES if name in os.environ]
    yield Check("environment", WARN if settings else OK, ", ".join(settings) or "no SPLITKV_ variable is set")


def _cuda_device() -> Iterator[Check]:
    import torch

    index = torch.cuda.current_device()
    properties: Any = torch.cuda.get_device_properties(index)
    driver = machine.nvidia_smi().get("driver", "unknown")
    others = torch.cuda.device_count() - 1
    more = f", and {others} more" if others else ""
    yield Check("gpu", OK, f"{properties.name}, driver {driver}{more}")
    capability = (properties.major, properties.minor)
    arch = f"sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs"
    if capability < (8, 0):
        yield Check("architecture", WARN, f"{arch}: older than sm_80, where nothing here is tested")
    else:
        yield Check("architecture", OK, arch)
    shared, l2 = properties.shared_memory_per_block_optin >> 10, properties.L2_cache_size >> 20
    yield Check("shared memory", OK, f"{shared} KiB per block, L2 {l2} MiB")
    free, total = torch.cuda.mem_get_info()
    yield Check("gpu memory", OK, f"{free / GIB:.1f} of {total / GIB:.1f} GiB free")


def _no_cuda_device() -> Check:
    import torch

    if torch.version.cuda is None:
        return Check("gpu", ABSENT, "this PyTorch is a CPU build and would not see one")
    with warnings.catch_warnings(record=True) as caught:  # a driver that is too old says so in a warning
        warnings.simplefilter("always")
        torch.cuda.is_available()
    reason = str(caught[0].message).splitlines()[0] if caught else "PyTorch sees none"
    return Check("gpu", ABSENT, reason)


def _host() -> Iterator[Check]:
    cache = machine.last_level_cache_bytes() >> 20
    yield Check("cpu", OK, f"{machine.cpu_name()}, {machine.usable_cores()} usable cores, cache {cache} MiB")
    free, total = machine.host_memory_bytes()
    yield Check("memory", OK, f"{free / GIB:.1f} of {total / GIB:.1f} GiB available")
    yield _memory_pages()
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    status, detail = _cpu_kernel()
    needed = status != OK
    missing = f"none of {', '.join(COMPILERS)} found"
    yield Check("c compiler", OK if compiler else WARN if needed else ABSENT, compiler or missing)
    yield Check("cpu kernel", status, detail)


def _memory_pages() -> Check:
    pages = machine.memory_pages()
    if pages.startswith("2 MiB"):
        return Check("memory pages", OK, f"{pages} for caches and weights on the CPU")
    remedy = f"; the CPU reads faster with madvise in {machine.HUGE_PAGES}" if machine.HUGE_PAGES.exists() else ""
    return Check("memory pages", ABSENT, f"{pages}{remedy}")


def _cpu_kernel() -> tuple[str, str]:
    """Whether backend "cpu" runs compiled, by its own account. Imported by name: asking how a backend fares
    is this command's business alone, and everything else in bench keeps to the public names."""
    try:
        kind, detail = import_module(CPU_STATUS_MODULE).cpu_status()
    except (ImportError, AttributeError) as error:
        return FAIL, f"gives no account of itself: {error}"
    return (OK if kind == CPU_COMPILED else WARN), f"{kind}: {detail}" if detail else kind


# ---- a tiny real decode ------------------------------------------------------------------------------------


def _decode_check(backend: str) -> Check:
    """Two rows of 37 and 300 keys, 8/2 heads of 64, in three dtypes, against the float64 oracle."""
    name = f"decode: {backend}"
    try:
        worst = {kv_dtype: _decode_error(backend, kv_dtype) for kv_dtype in TOLERANCE}
    except Exception as error:  # whatever a broken installation raises is the finding
        return Check(name, FAIL, f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0])
    bad = [kv_dtype for kv_dtype, error in worst.items() if not error <= TOLERANCE[kv_dtype]]
    errors = ", ".join(f"{kv_dtype} {error:.1e}" for kv_dtype, error in worst.items())
    if bad:
        return Check(name, FAIL, f"max abs error against float64: {errors}; too much in {', '.join(bad)}")
    return Check(name, OK, f"max abs error against float64: {errors}")


def _decode_error(backend: str, kv_dtype: str) -> float:
    import torch

    from .cases import torch_dtype

    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 8, 64), (2, 320, 2, 64), (2, 320, 2, 64))
    q, k, v = (torch.randn(shape, generator=generator).to(torch_dtype(kv_dtype)) for shape in shapes)
    lengths = torch.tensor([37, 300], dtype=torch.int32)
    exact = cast(torch.Tensor, splitkv.reference_attention(q, k, v, lengths))
    device = "cpu" if backend == "cpu" else "cuda"
    moved = [tensor.to(device) for tensor in (q, k, v, lengths)]
    out = cast(torch.Tensor, splitkv.decode_attention(*moved, backend=backend))
    return float((out.cpu().double() - exact).abs().max())
