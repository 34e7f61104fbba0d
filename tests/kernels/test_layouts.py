"""The layouts in which the kernels sum fix the bytes: they must be the same whatever is beside the geometry.

No GPU needed: the TTGIR of every variant of a launch is read for the layouts of its float sums and of its products.
Where products are in f32, caches that are not read in 16-byte vectors would be summed in another layout; they are
refused (checks.check_vector_layout), so they are no variant here.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from compiled import OPTIONS, POINTERS, kernel_launches, ttgir
from helpers import reschedule
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from splitkv import DecodeProblem, DeviceSpec, plan_decode

GEOMETRIES = {
    "24/4, 256": (24, 4, 256, 256),
    "16/4, 256": (16, 4, 256, 256),
    "32/8, 128": (32, 8, 128, 128),
    "4/4, 128": (4, 4, 128, 128),
    "16/1, 128": (16, 1, 128, 128),
    "24/4, 48": (24, 4, 48, 48),
    "16/1, 576/512": (16, 1, 576, 512),
}


TTGIR: dict[str, str] = {}
"""What was compiled, by kernel, signature, constants, attributes and options: many variants are the same launch."""


def summed_in(kernel: Any, arguments: dict[str, Any], unaligned: tuple[str, ...] = ()) -> set[str]:
    """Types, with their layouts written out, of every float sum and every product that a launch compiles to."""
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value, free = arguments[name], kernel.params[index].do_not_specialize
        if name.isupper() or (isinstance(value, int) and value == 1 and not free):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(index,)] = [] if name in unaligned else [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            attributes[(index,)] = [["tt.divisibility", 16]] if value % 16 == 0 and not free else []
        else:
            signature[name] = "fp32"
    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    launch = repr((kernel.fn.__name__, signature, constants, attributes, options))
    if launch not in TTGIR:
        source = ASTSource(kernel, signature, constants, attributes)
        TTGIR[launch] = ttgir(source, GPUTarget("cuda", 90, 32), options)
    text = TTGIR[launch]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.M))
    sums = re.findall(r'"tt\.reduce"\(%[\w#]+\) <\{[^}]*\}> \(\{(.*?)\}\) : \(([^)]*)\)', text, re.S)
    types = [kind for body, kind in sums if "arith.addf" in body]
    types += [line.split(" : ")[1] for line in re.findall(r"(?:tt\.dot|warp_group_dot) .*", text)]
    return {
        re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), re.sub(r" loc\(.*", "", kind)) for kind in types
    }


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("f32", "f32"), ("bf16", "bf16"), ("f32", "bf16")], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_sums_have_one_layout(geometry: str, dtype: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, kv_heads, dim, v_dim = GEOMETRIES[geometry]
    device = DeviceSpec.named("h200")

    def launches(max_run: int = 1, page_size: int | None = None, v_in_k: bool = False) -> dict[str, tuple]:
        problem = DecodeProblem(1, heads, kv_heads, dim, v_dim, q_dtype=dtype, kv_dtype=kv_dtype, page_size=page_size)
        return kernel_launches(
            reschedule(plan_decode(problem, device, backend="triton"), max_run, 132), monkeypatch, v_in_k=v_in_k
        )

    kernel, arguments = launches()["split_kernel"]
    want = summed_in(kernel, arguments)
    odd = dict(k_stride_t=kv_heads * dim + 5, v_stride_t=kv_heads * dim + 5, k_stride_h=dim + 1, v_stride_h=dim + 1)
    variants = {
        "rowwise": summed_in(*launches()["rowwise_kernel"]),
        "runs of 4": summed_in(*launches(4)["split_kernel"]),
        "runs of 16": summed_in(*launches(16)["split_kernel"]),
        "pages of 16": summed_in(*launches(1, 16)["split_kernel"]),
        "pages of 1": summed_in(*launches(4, 1)["split_kernel"]),
        "unaligned q": summed_in(kernel, arguments, ("q",)),
        "heads first": summed_in(kernel, arguments | dict(k_stride_t=dim, k_stride_h=dim * 262_144)),
    }
    if v_dim < dim:
        variants["V in K"] = summed_in(*launches(v_in_k=True)["split_kernel"])
        variants["V in K, pages"] = summed_in(*launches(4, 16, v_in_k=True)["split_kernel"])
    if dtype != "f32":
        variants |= {
            "odd strides": summed_in(kernel, arguments | odd),
            "unaligned caches": summed_in(kernel, arguments, ("k_cache", "v_cache")),
        }
    assert {name for name, got in variants.items() if got != want} == set()


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("f32", "fp8_e4m3"), ("bf16", "bf16")], ids=str)
@pytest.mark.parametrize(("kind", "mask_dtype"), [("bool", torch.int8), ("additive", torch.float32)], ids=str)
def test_a_mask_s_strides_change_no_sum(
    kind: str, mask_dtype: torch.dtype, dtype: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the fuzzer: a mask whose heads lie side by side had f32 sums of another order."""
    problem = DecodeProblem(1, 32, 4, 32, 32, q_dtype=dtype, kv_dtype=kv_dtype)
    plan = plan_decode(problem, DeviceSpec.named("h200"), backend="triton")
    kernel, arguments = kernel_launches(plan, monkeypatch)["split_kernel"]
    arguments |= dict(MASK=kind, mask=torch.empty(16, dtype=mask_dtype))
    strides = {
        "rows of keys": (4096, 4096, 4096, 1),
        "one row for all heads": (4096, 0, 0, 1),
        "keys in columns": (4096 * 64, 64, 1, 64),
        "heads side by side": (4096 * 64, 1, 64, 64),
        "odd": (4099, 4099, 4099, 1),
    }
    sums = {}
    for name, steps in strides.items():
        of_mask = {f"mask_stride_{axis}": step for axis, step in zip("bhin", steps, strict=True)}
        sums[name] = summed_in(kernel, arguments | of_mask)
    assert {name for name, got in sums.items() if got != sums["rows of keys"]} == set()
