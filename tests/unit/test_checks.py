"""Bad input is refused before anything is launched, by a message that names the argument, what was expected, what came.

REFUSED is the contract's section "Errors" as a table: what is changed in a valid call, the exception, its words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from splitkv import UnsupportedError, attention, checks, decode_attention, decode_loop, prepared
from splitkv.attention import plan_for

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 2, 4, 2, 64, 32
HALF, BF16, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
INT, LONG, BYTE = torch.int32, torch.int64, torch.uint8
META = torch.device("meta")


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def geometry(
    q_heads: int = Q_HEADS, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM, v_head_dim: int | None = None
) -> dict[str, Tensor]:
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    return {
        "q": zeros(BATCH, q_heads, head_dim),
        "k_cache": zeros(BATCH, CAPACITY, kv_heads, head_dim),
        "v_cache": zeros(BATCH, CAPACITY, kv_heads, v_head_dim),
    }


def cast(dtype: torch.dtype, *names: str) -> dict[str, Tensor]:
    return {name: geometry()[name].to(dtype) for name in names}


def every_second(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor whose last stride is 2."""
    return zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


VALID: dict[str, Any] = {**geometry(), "seq_lens": torch.tensor([32, 7], dtype=INT)}
PAGED = {
    "k_cache": zeros(5, 8, KV_HEADS, HEAD_DIM),
    "v_cache": zeros(5, 8, KV_HEADS, HEAD_DIM),
    "block_table": zeros(BATCH, 4, dtype=INT),
}
SPLIT = {"policy": "pinned(4)"}  # the plan of VALID needs a workspace
PROBLEM = checks.check_inputs(**VALID).problem
NEEDED = plan_for(PROBLEM, torch.device("cpu"), "pinned(4)").workspace_bytes

Row = tuple[dict[str, Any], type[Exception], list[str]]
REFUSED: dict[str, Row] = {}


def refuse(error: type[Exception], **rows: tuple[dict[str, Any], list[str]]) -> None:
    for label, (change, words) in rows.items():
        assert label not in REFUSED
        REFUSED[label] = (change, error, words)


refuse(
    TypeError,
    q_list=({"q": [1.0]}, ["q:", "torch.Tensor", "list"]),
    k_none=({"k_cache": None}, ["k_cache:", "torch.Tensor", "NoneType"]),
    v_numpy=({"v_cache": np.zeros(3)}, ["v_cache:", "torch.Tensor", "ndarray"]),
    q_f64=(cast(torch.float64, "q"), ["q:", "float32, float16, bfloat16", "torch.float64"]),
    q_int=(cast(INT, "q"), ["q:", "float32, float16, bfloat16", "torch.int32"]),
    q_fp8=(cast(FP8, "q"), ["q:", "float32, float16, bfloat16", "torch.float8_e4m3fn"]),
    k_uint8=(cast(BYTE, "k_cache", "v_cache"), ["k_cache:", "float8_e4m3fn, float8_e5m2", "torch.uint8"]),
    k_f64=(cast(torch.float64, "k_cache"), ["k_cache:", "float32", "torch.float64"]),
    v_uint8=(cast(BYTE, "v_cache"), ["v_cache:", "float8_e4m3fn, float8_e5m2", "torch.uint8"]),
    v_other=(cast(HALF, "v_cache"), ["v_cache:", "k_cache's dtype torch.float32", "torch.float16"]),
    k_other=(
        {**cast(FP8, "k_cache"), **cast(torch.float8_e5m2, "v_cache")},
        ["v_cache:", "k_cache's dtype torch.float8_e4m3fn", "torch.float8_e5m2"],
    ),
    lens_none=({"seq_lens": None}, ["seq_lens:", "an int or a torch.Tensor", "NoneType"]),
    lens_list=({"seq_lens": [32, 7]}, ["seq_lens:", "an int or a torch.Tensor", "list"]),
    lens_bool=({"seq_lens": True}, ["seq_lens:", "an int", "bool"]),
    lens_numpy_bool=({"seq_lens": np.bool_(True)}, ["seq_lens:", "an int", "bool"]),
    lens_float=({"seq_lens": 7.0}, ["seq_lens:", "an int", "float"]),
    lens_numpy_float=({"seq_lens": np.float32(7)}, ["seq_lens:", "an int", "float32"]),
    lens_f32=({"seq_lens": zeros(BATCH)}, ["seq_lens:", "int32, int64", "torch.float32"]),
    lens_int16=({"seq_lens": zeros(BATCH, dtype=torch.int16)}, ["seq_lens:", "int32, int64", "torch.int16"]),
    table_list=({**PAGED, "block_table": [[0] * 4] * 2}, ["block_table:", "torch.Tensor", "list"]),
    table_int64=({**PAGED, "block_table": zeros(2, 4, dtype=LONG)}, ["block_table:", "int32", "torch.int64"]),
    starts_int=({"starts": 3}, ["starts:", "torch.Tensor", "int"]),
    starts_int64=({"starts": zeros(BATCH, dtype=LONG)}, ["starts:", "int32", "torch.int64"]),
    sinks_float=({"sinks": 0.5}, ["sinks:", "torch.Tensor", "float"]),
    sinks_half=({"sinks": zeros(Q_HEADS, dtype=HALF)}, ["sinks:", "float32", "torch.float16"]),
    mask_list=({"mask": [True] * CAPACITY}, ["mask:", "torch.Tensor", "list"]),
    mask_int=({"mask": zeros(CAPACITY, dtype=INT)}, ["mask:", "bool, float32, float16, bfloat16", "torch.int32"]),
    mask_f64=({"mask": zeros(CAPACITY, dtype=torch.float64)}, ["mask:", "bool, float32", "torch.float64"]),
    mask_fp8=({"mask": zeros(CAPACITY, dtype=FP8)}, ["mask:", "bool, float32", "torch.float8_e4m3fn"]),
    window_float=({"window": 4.0}, ["window:", "an int", "float"]),
    window_bool=({"window": True}, ["window:", "an int", "bool"]),
    window_text=({"window": "4"}, ["window:", "an int", "str"]),
    window_tensor=({"window": zeros(dtype=INT, device=META)}, ["window:", "an int", "Tensor"]),
    softcap_bool=({"softcap": True}, ["softcap:", "a float", "bool"]),
    softcap_false=({"softcap": False}, ["softcap:", "a float", "bool"]),
    softcap_text=({"softcap": ""}, ["softcap:", "a float", "str"]),
    softcap_tensor=({"softcap": zeros(device=META)}, ["softcap:", "a float", "Tensor"]),
    scale_text=({"softmax_scale": "0.1"}, ["softmax_scale:", "a float", "str"]),
    scale_bool=({"softmax_scale": True}, ["softmax_scale:", "a float", "bool"]),
    scale_tensor=({"softmax_scale": zeros(device=META)}, ["softmax_scale:", "a float", "Tensor"]),
    k_scale_bool=({"k_scale": True}, ["k_scale:", "a float", "bool"]),
    k_scale_list=({"k_scale": [1.0, 1.0]}, ["k_scale:", "a float", "list"]),
    v_scale_text=({"v_scale": "1"}, ["v_scale:", "a float", "str"]),
    k_scale_f64=({"k_scale": zeros(KV_HEADS, dtype=torch.float64)}, ["k_scale:", "float32", "torch.float64"]),
    v_scale_half=({"v_scale": zeros(dtype=HALF)}, ["v_scale:", "float32", "torch.float16"]),
    out_list=({"out": []}, ["out:", "torch.Tensor", "list"]),
    out_half=({"out": zeros(BATCH, Q_HEADS, HEAD_DIM, dtype=HALF)}, ["out:", "torch.float32", "torch.float16"]),
    workspace_int=({"workspace": 1 << 20}, ["workspace:", "torch.Tensor", "int"]),
    policy_int=({"policy": 4}, ["policy:", "a SplitPolicy or a str", "int"]),
    policy_none=({"policy": None}, ["policy:", "a SplitPolicy or a str", "NoneType"]),
    backend_none=({"backend": None}, ["backend:", "a str", "NoneType"]),
    backend_list=({"backend": ["cpu"]}, ["backend:", "a str", "list"]),
)
refuse(
    ValueError,
    # shapes
    q_2d=({"q": zeros(Q_HEADS, HEAD_DIM)}, ["q:", "[batch, heads, head_dim]", "q_len", "(4, 64)"]),
    q_5d=({"q": zeros(1, 1, 1, Q_HEADS, HEAD_DIM)}, ["q:", "[batch, heads, head_dim]", "(1, 1, 1, 4, 64)"]),
    k_3d=({"k_cache": zeros(32, 2, 64)}, ["k_cache:", "[batch, capacity, num_kv_heads, head_dim]", "(32, 2, 64)"]),
    v_3d=({"v_cache": zeros(32, 2, 64)}, ["v_cache:", "[batch, capacity, num_kv_heads, head_dim]", "(32, 2, 64)"]),
    pages_3d=({**PAGED, "k_cache": zeros(8, 2, 64)}, ["k_cache:", "[num_pages, page_size, num_kv", "(8, 2, 64)"]),
    v_capacity=({"v_cache": zeros(2, 31, 2, 64)}, ["v_cache:", "k_cache's shape (2, 32, 2)", "(2, 31, 2)"]),
    v_heads=({"v_cache": zeros(2, 32, 1, 64)}, ["v_cache:", "k_cache's shape (2, 32, 2)", "(2, 32, 1)"]),
    v_batch=({"v_cache": zeros(1, 32, 2, 64)}, ["v_cache:", "k_cache's shape (2, 32, 2)", "(1, 32, 2)"]),
    k_head_dim=({"q": zeros(BATCH, Q_HEADS, 32)}, ["k_cache:", "q's head_dim 32", "got 64"]),
    k_batch=({"q": zeros(3, Q_HEADS, HEAD_DIM)}, ["k_cache:", "batch 3", "got 2"]),
    batch_0=({n: x[:0] for n, x in VALID.items()}, ["q:", "at least 1 row", "batch 0"]),
    heads_7_2=(geometry(7, 2), ["q:", "multiple of 2 KV heads", "got 7"]),
    heads_4_0=(geometry(4, 0), ["q:", "multiple of 0 KV heads", "got 4"]),
    heads_0_1=(geometry(0, 1), ["q:", "multiple of 1 KV heads", "got 0"]),
    heads_2_4=(geometry(2, 4), ["q:", "multiple of 4 KV heads", "got 2"]),
    lens_shape=({"seq_lens": zeros(3, dtype=INT)}, ["seq_lens:", "(2,), one per batch", "(3,)"]),
    lens_0d=({"seq_lens": zeros(dtype=INT)}, ["seq_lens:", "(2,)", "got ()"]),
    lens_2d=({"seq_lens": zeros(2, 1, dtype=INT)}, ["seq_lens:", "(2,)", "(2, 1)"]),
    table_1d=({**PAGED, "block_table": zeros(8, dtype=INT)}, ["block_table:", "[2, max_pages]", "(8,)"]),
    table_batch=({**PAGED, "block_table": zeros(3, 4, dtype=INT)}, ["block_table:", "[2, max_pages]", "(3, 4)"]),
    page_size_0=(
        {**PAGED, "k_cache": zeros(5, 0, 2, 64), "v_cache": zeros(5, 0, 2, 64)},
        ["k_cache:", "page_size of at least 1", "got 0"],
    ),
    starts_shape=({"starts": zeros(3, dtype=INT)}, ["starts:", "(2,), one per batch", "(3,)"]),
    sinks_shape=({"sinks": zeros(2)}, ["sinks:", "(4,), one per num_q_heads", "(2,)"]),
    mask_keys=({"mask": zeros(31)}, ["mask:", "broadcastable to (2, 4, 1, 32)", "(31,)"]),
    mask_heads=({"mask": zeros(3, 1, 32)}, ["mask:", "broadcastable to (2, 4, 1, 32)", "(3, 1, 32)"]),
    mask_batch=({"mask": zeros(4, 1, 1, 1)}, ["mask:", "broadcastable to (2, 4, 1, 32)", "(4, 1, 1, 1)"]),
    mask_5d=({"mask": zeros(1, 2, 4, 1, 32)}, ["mask:", "broadcastable to (2, 4, 1, 32)", "(1, 2, 4, 1, 32)"]),
    k_scale_shape=({"k_scale": zeros(4)}, ["k_scale:", "shape (2,), one per KV head", "(4,)"]),
    v_scale_2d=({"v_scale": zeros(2, 1)}, ["v_scale:", "shape (2,), one per KV head", "(2, 1)"]),
    v_scale_empty=({"v_scale": zeros(0)}, ["v_scale:", "shape (2,)", "(0,)"]),
    out_v_dim=({"out": zeros(2, 4, 32)}, ["out:", "(2, 4, 64)", "(2, 4, 32)"]),
    out_4d=({"out": zeros(2, 1, 4, 64)}, ["out:", "(2, 4, 64)", "(2, 1, 4, 64)"]),
    workspace_short=(
        {**SPLIT, "workspace": zeros(NEEDED - 1, dtype=BYTE)},
        ["workspace:", f"at least {NEEDED} bytes", f"got {NEEDED - 1}"],
    ),
    workspace_floats=(
        {**SPLIT, "workspace": zeros(NEEDED // 4 - 1)},
        ["workspace:", f"at least {NEEDED} bytes", f"got {NEEDED - 4}"],
    ),
    workspace_2d=({**SPLIT, "workspace": zeros(NEEDED, 2)}, ["workspace:", "1-D", f"({NEEDED}, 2)"]),
    # strides and addresses
    q_stride=({"q": every_second(2, 4, 64)}, ["q:", "stride 1", "(512, 128, 2)"]),
    k_stride=({"k_cache": zeros(2, 32, 64, 2).transpose(2, 3)}, ["k_cache:", "stride 1", "(4096, 128, 1, 2)"]),
    v_stride=({"v_cache": zeros(2, 32, 64, 2).transpose(2, 3)}, ["v_cache:", "stride 1", "(4096, 128, 1, 2)"]),
    table_stride=({**PAGED, "block_table": every_second(2, 4, dtype=INT)}, ["block_table:", "stride 1", "(8, 2)"]),
    lens_stride=({"seq_lens": every_second(2, dtype=INT)}, ["seq_lens:", "stride 1", "(2,)"]),
    lens_expanded=({"seq_lens": zeros(1, dtype=INT).expand(2)}, ["seq_lens:", "stride 1", "(0,)"]),
    starts_stride=({"starts": every_second(2, dtype=INT)}, ["starts:", "stride 1", "(2,)"]),
    sinks_stride=({"sinks": every_second(4)}, ["sinks:", "stride 1", "(2,)"]),
    out_stride=({"out": every_second(2, 4, 64)}, ["out:", "stride 1", "(512, 128, 2)"]),
    out_rows_alias=({"out": zeros(1, 4, 64).expand(2, 4, 64)}, ["out:", "no stride of 0", "(0, 64, 1)"]),
    out_heads_alias=({"out": zeros(2, 1, 64).expand(2, 4, 64)}, ["out:", "no stride of 0", "(64, 0, 1)"]),
    workspace_stride=(
        {**SPLIT, "workspace": every_second(NEEDED, dtype=BYTE)},
        ["workspace:", "contiguous", "(2,)"],
    ),
    workspace_address=(
        {**SPLIT, "workspace": zeros(NEEDED + 16, dtype=BYTE)[1:]},
        ["workspace:", "16-byte aligned", "0x"],
    ),
    # ranges
    lens_negative=({"seq_lens": -1}, ["seq_lens:", "0..32 (the capacity)", "got -1"]),
    lens_long=({"seq_lens": 33}, ["seq_lens:", "0..32 (the capacity)", "got 33"]),
    lens_numpy_long=({"seq_lens": np.int64(33)}, ["seq_lens:", "0..32 (the capacity)", "got 33"]),
    lens_over_pages=({**PAGED, "seq_lens": 33}, ["seq_lens:", "0..32 (the capacity)", "got 33"]),
    window_negative=({"window": -1}, ["window:", "at least 0", "got -1"]),
    softcap_negative=({"softcap": -1.0}, ["softcap:", "at least 0", "got -1.0"]),
    softcap_nan=({"softcap": math.nan}, ["softcap:", "finite", "got nan"]),
    softcap_inf=({"softcap": math.inf}, ["softcap:", "finite", "got inf"]),
    scale_nan=({"softmax_scale": math.nan}, ["softmax_scale:", "finite", "got nan"]),
    scale_inf=({"softmax_scale": -math.inf}, ["softmax_scale:", "finite", "got -inf"]),
    scale_f32=({"softmax_scale": 1e39}, ["softmax_scale:", "finite float32", "got 1e+39"]),
    scale_huge=({"softmax_scale": 10**400}, ["softmax_scale:", "finite float32", "got 1000"]),
    k_scale_inf=({"k_scale": math.inf}, ["k_scale:", "finite", "got inf"]),
    v_scale_nan=({"v_scale": math.nan}, ["v_scale:", "finite", "got nan"]),
    # devices: a message lists where every tensor is
    q_device=({"q": zeros(2, 4, 64, device=META)}, ["one device", "q on meta", "k_cache on cpu", "seq_lens on cpu"]),
    k_device=({"k_cache": zeros(2, 32, 2, 64, device=META)}, ["one device", "q on cpu", "k_cache on meta"]),
    v_device=({"v_cache": zeros(2, 32, 2, 64, device=META)}, ["one device", "q on cpu", "v_cache on meta"]),
    lens_device=({"seq_lens": zeros(2, dtype=INT, device=META)}, ["one device", "q on cpu", "seq_lens on meta"]),
    table_device=(
        {**PAGED, "block_table": zeros(2, 4, dtype=INT, device=META)},
        ["one device", "q on cpu", "block_table on meta"],
    ),
    starts_device=({"starts": zeros(2, dtype=INT, device=META)}, ["one device", "q on cpu", "starts on meta"]),
    sinks_device=({"sinks": zeros(4, device=META)}, ["one device", "q on cpu", "sinks on meta"]),
    mask_device=({"mask": zeros(32, device=META)}, ["one device", "q on cpu", "mask on meta"]),
    k_scale_device=({"k_scale": zeros(device=META)}, ["one device", "q on cpu", "k_scale on meta"]),
    v_scale_device=({"v_scale": zeros(2, device=META)}, ["one device", "q on cpu", "v_scale on meta"]),
    out_device=({"out": zeros(2, 4, 64, device=META)}, ["one device", "q on cpu", "out on meta"]),
    workspace_device=({"workspace": zeros(NEEDED, device=META)}, ["one device", "q on cpu", "workspace on meta"]),
    # policies and backends
    policy_name=({"policy": "fast"}, ["policy:", "auto, waves, capacity, length, legacy", "'fast'"]),
    policy_empty=({"policy": ""}, ["policy:", "auto", "''"]),
    policy_zero=({"policy": "pinned(0)"}, ["policy:", "a number of splits", "'pinned(0)'"]),
    backend_name=({"backend": "tpu"}, ["backend:", "auto, cpu, cuda, triton, rowwise", "'tpu'"]),
    cuda_on_cpu=({"backend": "cuda"}, ["backend:", "cuda expects CUDA tensors", "got cpu"]),
    triton_on_cpu=({"backend": "triton"}, ["backend:", "triton expects CUDA tensors", "cpu"]),
    rowwise_on_cpu=({"backend": "rowwise"}, ["backend:", "rowwise expects CUDA tensors", "cpu"]),
    cpu_elsewhere=(
        {**{n: x.to(META) for n, x in VALID.items()}, "backend": "cpu"},
        ["backend:", "cpu expects tensors on the CPU", "meta"],
    ),
)
SUPPORTED_DIMS = ["multiple of 16 from 16 to 256", "576 with a v_head_dim of 512"]
refuse(
    UnsupportedError,
    **{
        f"head_dims_{k}_{v}": (geometry(head_dim=k, v_head_dim=v), [f"{name}:", *SUPPORTED_DIMS, f"(K {k}, V {v})"])
        for k, v, name in [
            *((size, size, "k_cache") for size in (0, 8, 46, 63, 65, 272, 512)),
            *((64, size, "v_cache") for size in (0, 46, 63, 65, 512)),
            *((576, size, "k_cache") for size in (128, 256, 576)),
        ]
    },
    q_len_0=({"q": zeros(2, 0, 4, 64)}, ["q:", "q_len is 1 to 16", "got 0"]),
    q_len_17=({"q": zeros(2, 17, 4, 64)}, ["q:", "q_len is 1 to 16", "got 17"]),
)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What the call would have launched: (backend, arguments) of each launch."""
    for name in ("SPLITKV_POLICY", "SPLITKV_BACKEND", "SPLITKV_GQA_PACK", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    recorded: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(prepared, "preparer", lambda name: lambda **_: None)
    monkeypatch.setattr(prepared, "launcher", lambda name: lambda **kw: recorded.append((name, kw)))
    yield recorded


@pytest.mark.parametrize("label", REFUSED)
def test_refused_by_name_before_any_launch(label: str, launches: list[Any]) -> None:
    change, error, words = REFUSED[label]
    with pytest.raises(error) as caught:
        decode_attention(**{**VALID, **change})
    assert type(caught.value) is error
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in {message!r}"
    assert launches == []


def test_unsupported_is_a_value_error() -> None:
    assert issubclass(UnsupportedError, ValueError)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_f32_kernels_refuse_what_they_would_sum_in_another_order(
    name: str, monkeypatch: pytest.MonkeyPatch, launches: Any
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tensor = VALID[name].float()
    late = torch.empty(tensor.numel() + 1)[1:].view(tensor.shape)
    apart = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 5)[..., : tensor.shape[-1]]
    call = {**VALID, **{key: VALID[key].float() for key in ("q", "k_cache", "v_cache")}}
    for odd in (late, apart):
        with pytest.raises(
            UnsupportedError, match=f"{name}: supported where products are in float32 .* got address 0x"
        ):
            decode_attention(**{**call, name: odd}, backend="triton")
    assert launches == []
    decode_attention(**{**call, name: apart})  # the CPU kernel takes any
    assert [chosen for chosen, _ in launches] == ["cpu"]


def test_backend_variable_is_refused_as_the_argument_is(monkeypatch: pytest.MonkeyPatch, launches: Any) -> None:
    monkeypatch.setenv("SPLITKV_BACKEND", "tpu")
    with pytest.raises(ValueError, match="backend: expected auto, cpu, cuda, triton, rowwise, got 'tpu'"):
        decode_attention(**VALID)
    assert launches == []


# ---- what is accepted, and what reaches the launcher -------------------------------------------------------

STRIDED = torch.randn(BATCH, CAPACITY, KV_HEADS, 3, HEAD_DIM)
ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"window": 0, "softcap": 0.0, "softmax_scale": 1 / 8, "k_scale": 1.0, "mask": None}),
    "q_len_16": ({"q": zeros(2, 16, 4, 64)}, {}),
    "int_length": ({"seq_lens": 32}, {"seq_lens": 32}),
    "no_keys": ({"seq_lens": 0}, {"seq_lens": 0}),
    "numpy_lengths": ({"seq_lens": np.int32(7), "window": np.int64(3)}, {"seq_lens": 7, "window": 3}),
    "int64_lengths": ({"seq_lens": torch.tensor([1, 2])}, {}),
    "numpy_floats": (
        {"softmax_scale": np.float32(0.5), "softcap": np.float64(2)},
        {"softmax_scale": 0.5, "softcap": 2.0},
    ),
    "ints_for_floats": ({"softmax_scale": 1, "softcap": 30, "k_scale": 2}, {"softcap": 30.0, "k_scale": 2.0}),
    "zero_is_off": ({"window": 0, "softcap": 0}, {"window": 0, "softcap": 0.0}),
    "window_of_71_bits": ({"window": 2**70 + 5}, {"window": CAPACITY}),
    "window_wider": ({"window": 33}, {"window": CAPACITY}),
    "mixed_dtypes": ({**cast(BF16, "q"), **cast(FP8, "k_cache", "v_cache")}, {}),
    "negative_scale": ({"softmax_scale": -0.5, "k_scale": 0.0}, {"softmax_scale": -0.5, "k_scale": 0.0}),
    "strided_kv": ({"k_cache": STRIDED[..., 0, :], "v_cache": STRIDED[..., 2, :]}, {}),
    "expanded_kv_heads": ({"k_cache": zeros(2, 32, 1, 64).expand(2, 32, 2, 64)}, {}),
    "latent": (geometry(4, 1, 576, 512), {}),
    "192_128": (geometry(4, 2, 192, 128), {}),
    "paged": (PAGED, {}),
    "page_of_1": ({**PAGED, "k_cache": zeros(5, 1, 2, 64), "v_cache": zeros(5, 1, 2, 64)}, {}),
    "no_pages": ({**PAGED, "k_cache": zeros(0, 8, 2, 64), "v_cache": zeros(0, 8, 2, 64)}, {}),
    "no_columns": ({**PAGED, "block_table": zeros(2, 0, dtype=INT), "window": 4}, {"window": 0}),
    "no_capacity": ({"k_cache": zeros(2, 0, 2, 64), "v_cache": zeros(2, 0, 2, 64), "mask": zeros(1)}, {}),
    "strided_out": ({"out": zeros(4, 2, 64).transpose(0, 1)}, {}),
    "one_row_expanded_out": ({n: x[:1] for n, x in VALID.items()} | {"out": zeros(4, 64).expand(1, 4, 64)}, {}),
    "workspace_exact": ({**SPLIT, "workspace": zeros(NEEDED, dtype=BYTE)}, {}),
    "workspace_floats": ({**SPLIT, "workspace": zeros(NEEDED // 4)}, {}),
    "workspace_not_needed": ({"policy": "off", "workspace": zeros(0, dtype=BYTE)}, {}),
}


@pytest.mark.parametrize("label", ACCEPTED)
def test_accepted_and_normalised(label: str, launches: list[Any]) -> None:
    change, expected = ACCEPTED[label]
    decode_attention(**{**VALID, **change})
    [(backend, arguments)] = launches
    assert backend == "cpu"
    assert arguments["q"].ndim == arguments["out"].ndim == 4
    for name, value in expected.items():
        assert arguments[name] == value and type(arguments[name]) is type(value), name


@pytest.mark.parametrize("dim", range(16, 257, 16))
def test_every_multiple_of_16_is_a_head_dim(dim: int, launches: list[Any]) -> None:
    decode_attention(**{**VALID, **geometry(head_dim=dim, v_head_dim=272 - dim)})
    assert launches[0][1]["out"].shape == (BATCH, 1, Q_HEADS, 272 - dim)


@pytest.mark.parametrize("shape", [(), (1,), (32,), (1, 32), (4, 1, 1), (2, 1, 1, 32), (2, 4, 1, 32)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, HALF, BF16])
def test_masks_broadcast(shape: tuple[int, ...], dtype: torch.dtype, launches: list[Any]) -> None:
    decode_attention(**VALID, mask=zeros(*shape, dtype=dtype))
    assert launches[0][1]["mask"].shape == (2, 4, 1, 32)


@pytest.mark.parametrize("scale", [torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([2.0, 2.0])])
def test_tensor_scales_become_one_per_kv_head(scale: Tensor, launches: list[Any]) -> None:
    decode_attention(**VALID, k_scale=scale, v_scale=scale)
    for name in ("k_scale", "v_scale"):
        passed = launches[0][1][name]
        assert passed.tolist() == [2.0, 2.0] and passed.data_ptr() == scale.data_ptr()  # a view: no copy, no wait


# ---- no waiting for the GPU --------------------------------------------------------------------------------

READS_A_VALUE = r"(?<!DeviceSpec)\.(item|tolist|cpu|numpy|nonzero|equal|allclose|synchronize)\("


@pytest.mark.parametrize("module", [checks, attention, prepared, decode_loop], ids=lambda module: module.__name__)
def test_source_reads_no_tensor_value(module: Any) -> None:
    text = Path(module.__file__).read_text()
    assert re.findall(READS_A_VALUE, text) == []


def test_checks_need_no_values() -> None:
    """Meta tensors have shapes but no data, so a check that read a value would raise."""
    optional = {
        "starts": zeros(BATCH, dtype=INT),
        "sinks": zeros(Q_HEADS),
        "mask": zeros(CAPACITY, dtype=torch.bool),
        "k_scale": zeros(),
        "v_scale": zeros(KV_HEADS),
    }
    for caches in ({}, PAGED):
        call = {name: tensor.to(META) for name, tensor in {**VALID, **optional, **caches}.items()}
        inputs = checks.check_inputs(**call, window=3, softcap=2.0)
        checks.check_out(call["q"].clone(), call["q"], HEAD_DIM)
        checks.check_workspace(zeros(99, device=META), 99, call["q"])
        assert inputs.problem.capacity == CAPACITY
