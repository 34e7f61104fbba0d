"""Every architecture, without a GPU: the CUDA kernels compile with NVRTC, nothing spills, shared memory fits."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs

from splitkv import DecodeProblem, DeviceSpec, plan_decode
from splitkv.backends import cuda_build, cuda_launch
from splitkv.models import cuda_product
from splitkv.models.state import TORCH_DTYPES
from splitkv.problem import compiles_cuda

if not compiles_cuda():
    pytest.skip("NVRTC is not installed", allow_module_level=True)

DEVICES = ("a100", "rtx4090", "h200", "b200", "gb10")  # sm_80, 89, 90, 100, 121
GEOMETRIES = {
    "16/4x256": dict(num_q_heads=16, num_kv_heads=4, head_dim=256),
    "32/8x128": dict(num_q_heads=32, num_kv_heads=8, head_dim=128),
    "32/2x128": dict(num_q_heads=32, num_kv_heads=2, head_dim=128),
    "24/4x256": dict(num_q_heads=24, num_kv_heads=4, head_dim=256),
    "14/2x64": dict(num_q_heads=14, num_kv_heads=2, head_dim=64),
    "16/16x192/128": dict(num_q_heads=16, num_kv_heads=16, head_dim=192, v_head_dim=128),
}
ALONE, LOADED = dict(batch=1), dict(batch=200, page_size=16)


def launch_of(problem: DecodeProblem, device: DeviceSpec, mask: torch.dtype | None = None) -> cuda_launch.CudaLaunch:
    """What the launcher would run, on tensors of the real strides but no memory."""
    plan = plan_decode(problem, device, backend="cuda")
    q_dtype, kv_dtype = TORCH_DTYPES[problem.q_dtype], TORCH_DTYPES[problem.kv_dtype]
    rows = problem.batch, problem.capacity
    if problem.page_size is not None:
        rows = problem.batch * problem.capacity // problem.page_size, problem.page_size
    meta = dict(device="meta")
    cache = torch.empty(*rows, problem.num_kv_heads, problem.head_dim, dtype=kv_dtype, **meta)
    queries = (problem.batch, problem.q_len, problem.num_q_heads)
    return cuda_launch.prepare(
        q=torch.empty(*queries, problem.head_dim, dtype=q_dtype, **meta),
        k_cache=cache,
        v_cache=torch.empty(*rows, problem.num_kv_heads, problem.v_head_dim, dtype=kv_dtype, **meta),
        seq_lens=torch.empty(problem.batch, dtype=torch.int32, **meta),
        block_table=None if problem.page_size is None else torch.empty(problem.batch, 2, dtype=torch.int32, **meta),
        softmax_scale=1.0,
        window=0,
        softcap=0.0 if mask is None else 20.0,
        mask=None if mask is None else torch.empty(*queries[:2], 1, 1, dtype=mask, **meta),
        k_scale=1.0,
        v_scale=1.0,
        out=torch.empty(*queries, problem.v_head_dim, dtype=q_dtype, **meta),
        lse=None,
        plan=plan,
    )


def usage(cubin: bytes, folder: Path) -> tuple[int, int]:
    """(registers, bytes of stack: spills) of a compiled kernel."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    told = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found, told
    return int(found[1]), int(found[2])


SIXTEEN_AND_EIGHT_BITS = (("f16", "loaded"), ("fp8_e5m2", "alone"))
SHORTEST = {
    "16/4x256": SIXTEEN_AND_EIGHT_BITS,
    "32/2x128": SIXTEEN_AND_EIGHT_BITS,
    "24/4x256": (("f32", "alone"), ("f32", "loaded")),
}
"""Where registers are shortest: on every device."""
CASES = [
    (device, geometry, dtype, layout)
    for device, geometry, dtype, layout in itertools.product(DEVICES, GEOMETRIES, TORCH_DTYPES, ("alone", "loaded"))
    if (device == "h200" and dtype in ("f32", "bf16", "fp8_e4m3") and (geometry, dtype) != ("32/2x128", "f32"))
    or (dtype, layout) in SHORTEST.get(geometry, ())
]


@pytest.mark.parametrize(("device_name", "geometry", "dtype", "layout"), CASES)
def test_cuda_kernels_fit(device_name: str, geometry: str, dtype: str, layout: str, tmp_path: Path) -> None:
    device = DeviceSpec.named(device_name)
    q_dtype = "bf16" if dtype.startswith("fp8") else dtype
    problem = DecodeProblem(
        **GEOMETRIES[geometry], **(ALONE if layout == "alone" else LOADED), q_dtype=q_dtype, kv_dtype=dtype
    )
    launch = launch_of(problem, device)
    assert launch._shared_bytes <= device.shared_memory_bytes
    split = cuda_build.compile_cubin(launch._source, launch._split, device.capability)
    registers, spilled = usage(split, tmp_path)
    assert registers <= 255
    assert spilled <= (0 if device_name != "gb10" else 32)  # a few words of a unit's bounds, on sm_121
    assert usage(cuda_build.compile_cubin(cuda_launch.MERGE, launch._merge, device.capability), tmp_path)[1] == 0


@pytest.mark.parametrize("mask", [torch.bool, torch.float32, torch.bfloat16])
def test_options_compile_without_spills(mask: torch.dtype, tmp_path: Path) -> None:
    device = DeviceSpec.named("h200")
    problem = DecodeProblem(4, 8, 4, 256, q_len=4, q_dtype="bf16", kv_dtype="bf16", page_size=16)
    launch = launch_of(problem, device, mask)
    assert usage(cuda_build.compile_cubin(launch._source, launch._split, device.capability), tmp_path)[1] == 0


def test_a_kernel_that_does_not_compile_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"cuda_merge\.cu does not compile for sm_90: .*error"):
        cuda_build.compile_cubin(cuda_launch.MERGE, (("DV", -1), ("OUT_TYPE", 99), ("MAX_RUN", "nonsense (")), (9, 0))  # type: ignore[arg-type]


def test_arguments_have_the_size_that_the_kernels_expect() -> None:
    for file, packed in (
        ("backends/cuda_common.cuh", cuda_launch.PARAMS),
        ("models/cuda_product.cu", cuda_product.PARAMS),
    ):
        assert packed.format == format_of((cuda_build.PACKAGE / file).read_text())


def format_of(source: str) -> str:
    """Of `struct Params`, for Python's struct."""
    fields = source[source.index("struct Params {") : source.index("};", source.index("struct Params {"))]
    counts = {"*": 0, "i64": 0, "int": 0, "float": 0}
    for line in fields.splitlines()[1:]:
        names = line.split(";")[0].strip()
        kind = "*" if "*" in names else names.split()[0]
        counts[kind] += names.count(",") + 1
    return f"={counts['*']}q{counts['i64']}q{counts['int']}i{counts['float']}f"


PRODUCTS = [(4096, False), (4096, True), (12_288, False), (1024, True), (896, True), (17_408, False), (1000, False)]


@pytest.mark.parametrize("device_name", ["h200", "b200", "rtx5090", "gb10"])  # sm_90, 100, 120, 121
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_products_fit(rows: int, device_name: str, tmp_path: Path) -> None:
    device = DeviceSpec.named(device_name)
    for columns, paired in PRODUCTS:
        place = cuda_product.layout(columns, rows, paired, device.shared_memory_bytes)
        if place is None:
            assert rows > 1 and rows * columns > 8000
            continue
        assert place.shared_bytes <= device.shared_memory_bytes and place.stages >= cuda_product.LEAST_STAGES
        f16, bf16, norm = torch.float16, torch.bfloat16, torch.float32 if paired else None
        dtype, add = (bf16 if paired else f16), not paired
        variant = cuda_product.Variant(columns, rows, dtype, dtype, norm, add=add, paired=paired)
        cubin = cuda_build.compile_cubin(cuda_product.SOURCE, variant.defines(place), device.capability)
        registers, spilled = usage(cubin, tmp_path)
        assert spilled == 0 and registers <= 112  # two blocks' worth


@pytest.mark.parametrize("columns", [8, 896, 1000, 1024, 4096, 5120, 9216, 12_288, 17_408])
def test_products_read_every_column_once(columns: int) -> None:
    for rows, paired in itertools.product((1, 4, 16), (False, True)):
        place = cuda_product.layout(columns, rows, paired, DeviceSpec.named("h200").shared_memory_bytes)
        if place is not None:
            pieces = -(-columns // place.chunk)
            # The order of a row's sums follows from its columns alone: pieces begin at whole rounds of the warps.
            assert pieces == 1 or place.chunk % (32 * cuda_product.WARPS) == 0
            assert (pieces - 1) * place.chunk < columns and place.chunk * 2 % 16 == 0
