"""Compile the kernels for a GPU that is not here, exactly as the launcher would, and read what they use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from splitkv.backends import rowwise, triton_launch
from splitkv.models.state import TORCH_DTYPES
from splitkv.plan import DecodePlan

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl", "maxnreg")


def ttgir(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> str:
    """A kernel with its layouts chosen: triton.compile's first stages, which take a tenth of its time."""
    backend = make_backend(target)
    parsed = backend.parse_options(options | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    )
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    metadata = {"target": target, **parsed.__dict__}
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    return str(module)


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel needs: registers per thread, spilled bytes, shared memory bytes per block."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str = field(repr=False)


class _Recorder:
    """Stands in for a kernel and keeps the arguments of its launch."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> _Recorder:
        return self

    def __call__(self, **arguments: Any) -> None:
        self.arguments = arguments


def kernel_launches(
    plan: DecodePlan, monkeypatch: Any, *, lens_dtype: torch.dtype = torch.int32, v_in_k: bool = False
) -> dict[str, tuple]:
    """{kernel name: (kernel, arguments)} that the plan would launch, on tensors of the real strides but no memory.
    v_in_k: V is the first columns of K."""
    problem = plan.problem
    pages = problem.page_size or problem.capacity
    outer = problem.batch if problem.page_size is None else 1024

    def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    kv = TORCH_DTYPES[problem.kv_dtype]
    q_dtype = TORCH_DTYPES[problem.q_dtype]
    heads, kv_heads = problem.num_q_heads, problem.num_kv_heads
    recorders = {name: _Recorder() for name in ("split_kernel", "merge_kernel", "rowwise_kernel")}
    kernels = {
        "split_kernel": triton_launch.split_kernel,
        "merge_kernel": triton_launch.merge_kernel,
        "rowwise_kernel": rowwise.rowwise_kernel,
    }
    k_cache = tensor(outer, pages, kv_heads, problem.head_dim, dtype=kv)
    v_cache = tensor(outer, pages, kv_heads, problem.v_head_dim, dtype=kv)
    table = None
    if problem.page_size:
        table = tensor(problem.batch, problem.capacity // problem.page_size, dtype=torch.int32)
    arguments = dict(
        q=tensor(problem.batch, problem.q_len, heads, problem.head_dim, dtype=q_dtype),
        k_cache=k_cache,
        v_cache=k_cache[..., : problem.v_head_dim] if v_in_k else v_cache,
        seq_lens=tensor(problem.batch, dtype=lens_dtype),
        block_table=table,
        softmax_scale=0.0625,
        window=0,
        softcap=0.0,
        sinks=None,
        starts=None,
        mask=None,
        k_scale=1.0,
        v_scale=1.0,
        out=tensor(problem.batch, problem.q_len, heads, problem.v_head_dim, dtype=q_dtype),
        lse=tensor(problem.batch, problem.q_len, heads, dtype=torch.float32),
        workspace=tensor(plan.workspace_bytes, dtype=torch.uint8),
        plan=plan,
    )
    with monkeypatch.context() as patch:
        patch.setattr(triton_launch, "split_kernel", recorders["split_kernel"])
        patch.setattr(triton_launch, "merge_kernel", recorders["merge_kernel"])
        patch.setattr(rowwise, "rowwise_kernel", recorders["rowwise_kernel"])
        triton_launch.launch(**arguments)
        rowwise.launch(**arguments)
    return {name: (kernels[name], rec.arguments) for name, rec in recorders.items() if rec.arguments is not None}


def compile_kernel(kernel: Any, arguments: dict[str, Any], capability: tuple[int, int]) -> Usage:
    """Compile one recorded launch for a compute capability and read its resources from the machine code."""
    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name.isupper() or (isinstance(value, int) and value == 1 and not kernel.params[index].do_not_specialize):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not kernel.params[index].do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    compiled = triton.compile(source, target=target, options=options)
    registers, spilled = _resources(compiled.asm["cubin"])
    return Usage(registers, spilled, compiled.metadata.shared, compiled.asm["ptx"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, stack bytes) by the cuobjdump that Triton ships."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)\s+STACK:(\d+)", text).groups()  # type: ignore[union-attr]
    return int(registers), int(stack)
