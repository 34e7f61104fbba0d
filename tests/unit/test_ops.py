"""The registered operator: torch's own checks of it, and torch.compile over the public call, on the CPU backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from splitkv import SplitPolicy, decode_attention

OP = torch.ops.splitkv.decode_attention.default
DEFAULTS = {"uniform_len": 0, "policy": "auto", "backend": "auto"}
BATCH, Q_HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, CAPACITY = 2, 4, 2, 32, 16, 160


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SPLITKV_POLICY", "SPLITKV_BACKEND", "SPLITKV_GQA_PACK", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tensors(q_len: int | None = None) -> dict[str, Any]:
    """q, caches and lengths; the V head size differs from K's, so a shape that took one for the other shows."""
    q = normal(BATCH, Q_HEADS, HEAD_DIM) if q_len is None else normal(BATCH, q_len, Q_HEADS, HEAD_DIM)
    caches = {
        "k_cache": normal(BATCH, CAPACITY, KV_HEADS, HEAD_DIM),
        "v_cache": normal(BATCH, CAPACITY, KV_HEADS, V_HEAD_DIM),
    }
    return {"q": q, **caches, "seq_lens": lengths(CAPACITY, 21)}


def pages() -> dict[str, Tensor]:
    k, v = normal(7, 32, KV_HEADS, HEAD_DIM), normal(7, 32, KV_HEADS, V_HEAD_DIM)
    return {
        "k_cache": k,
        "v_cache": v,
        "block_table": torch.tensor([[6, 0, 3, 1, 4], [5, 2, 0, 0, 0]], dtype=torch.int32),
    }


def mask() -> Tensor:
    return normal(Q_HEADS, 1, CAPACITY) > -1


HALF_CALL = {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in tensors().items()}
FP8 = {name: tensors()[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
SCALES = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor(0.25)}
CALLS: dict[str, dict[str, Any]] = {
    "contiguous": tensors(),
    "paged": {**tensors(), **pages()},
    "int_length": {**tensors(), "seq_lens": None, "uniform_len": 100},
    "tensor_scales": {**tensors(), **SCALES},
    "fp8": {**tensors(), **FP8, **SCALES},
    "number_scales": {**tensors(), "k_scale_value": 0.5, "v_scale_value": 2.0},
    "q_len_3": tensors(3),
    "bf16": HALF_CALL,
    "options": {
        **tensors(), "softmax_scale": 0.3, "window": 50, "softcap": 20.0, "sinks": normal(Q_HEADS),
        "starts": lengths(3, 0), "mask": mask(), "policy": "pinned(4)", "backend": "cpu",
    },
}  # fmt: skip


def positional(call: dict[str, Any]) -> tuple[Any, ...]:
    names = [argument.name for argument in OP._schema.arguments]
    assert set(call) <= set(names)
    return tuple((DEFAULTS | call).get(name) for name in names)


@pytest.mark.parametrize("label", CALLS)
def test_opcheck(label: str) -> None:
    # torch's schema check compares inputs before and after, which it cannot do for fp8 on the CPU.
    some = {"test_utils": ("test_faketensor", "test_aot_dispatch_dynamic")} if label == "fp8" else {}
    torch.library.opcheck(OP, positional(CALLS[label]), **some)


def test_schema_mutates_nothing() -> None:
    assert not OP._schema.is_mutable
    assert [str(value.type) for value in OP._schema.returns] == ["Tensor", "Tensor"]


def test_operator_is_the_call() -> None:
    for label in ("contiguous", "paged", "q_len_3"):
        expected = decode_attention(**CALLS[label], return_lse=True)
        assert all(map(torch.equal, OP(*positional(CALLS[label])), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dims", [(32, 16), (576, 512), (192, 128)])
@pytest.mark.parametrize("q_len", [None, 5])
def test_fake_tensors_have_the_real_shapes(dtype: torch.dtype, head_dims: tuple[int, int], q_len: int | None) -> None:
    head_dim, v_head_dim = head_dims
    heads = (2, 4) if q_len is None else (2, q_len, 4)
    with FakeTensorMode():
        q = torch.empty(*heads, head_dim, dtype=dtype)
        k, v = torch.empty(2, 64, 1, head_dim), torch.empty(2, 64, 1, v_head_dim)
        out, lse = OP(*positional({"q": q, "k_cache": k, "v_cache": v, "seq_lens": lengths(64, 1)}))
    assert out.shape == (*heads, v_head_dim) and out.dtype == dtype and out.is_contiguous()
    assert lse.shape == heads and lse.dtype == torch.float32 and lse.is_contiguous()


# ---- torch.compile -----------------------------------------------------------------------------------------


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def step(call: dict[str, Any]) -> Any:
    """Something before and after, so that the operator is a node among others."""
    result = decode_attention(**{**call, "q": call["q"] * 2})
    return tuple(x + 1 for x in result) if isinstance(result, tuple) else result + 1


COMPILED: dict[str, dict[str, Any]] = {
    "lengths": tensors(),
    "lse": {**tensors(), "return_lse": True},
    "paged_lse": {**tensors(), **pages(), "return_lse": True},
    "q_len_3": {**tensors(3), "return_lse": True},
    "int_length": {**tensors(), "seq_lens": 100},
    "scales": {**tensors(), **FP8, **SCALES, "softmax_scale": 0.3},
    "number_scales": {**tensors(), "k_scale": 0.5, "v_scale": 2},
    "options": {**tensors(), "window": 50, "softcap": 20.0, "sinks": normal(Q_HEADS), "mask": mask()},
    "policy": {**tensors(), "policy": SplitPolicy.pinned(3), "backend": "cpu", "starts": lengths(3, 0)},
}


@pytest.mark.parametrize("label", COMPILED)
def test_compiled_equals_eager(label: str) -> None:
    function, counter = compiled(step)
    actual, expected = function(COMPILED[label]), step(COMPILED[label])
    if not COMPILED[label].get("return_lse"):
        actual, expected = (actual,), (expected,)
    assert all(map(torch.equal, actual, expected)) and len(actual) == len(expected)
    assert counter.frame_count == 1


def test_compiled_writes_out_in_place_and_returns_it() -> None:
    function, _ = compiled(decode_attention)
    expected = decode_attention(**tensors(), return_lse=True)
    buffer = torch.full((BATCH, 3, Q_HEADS, V_HEAD_DIM), torch.nan)
    out = buffer[:, 1]  # a view with gaps between its rows
    result, lse = function(**tensors(), out=out, return_lse=True)
    assert result is out
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert buffer[:, ::2].isnan().all()


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (torch.empty(BATCH, Q_HEADS, V_HEAD_DIM, dtype=torch.float16), TypeError, "out: .*float32.*float16"),
        (torch.empty(1, Q_HEADS, V_HEAD_DIM).expand(BATCH, -1, -1), ValueError, "out: .*stride of 0"),
        (torch.empty(3, BATCH, Q_HEADS, V_HEAD_DIM), ValueError, "out: .*shape"),
    ],
)
def test_compiled_refuses_what_eager_refuses(out: Tensor, error: type[Exception], words: str) -> None:
    """copy_ would have converted, and broadcast."""
    for function in (decode_attention, torch.compile(decode_attention, backend="aot_eager")):
        with pytest.raises(error, match=words):
            function(**tensors(), out=out)


def test_compiled_refuses_bad_inputs_when_it_runs() -> None:
    function, _ = compiled(decode_attention)
    with pytest.raises(TypeError, match=r"seq_lens: .*int32, int64.*float32"):
        function(**{**tensors(), "seq_lens": torch.ones(BATCH)})


def test_growing_lengths_do_not_recompile() -> None:
    function, counter = compiled(decode_attention)
    call = tensors()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lens in (lengths(1, 0), lengths(2, 1), lengths(63, 64), lengths(64, 65), lengths(160, 160)):
            call["seq_lens"] = lens
            assert torch.equal(function(**call), decode_attention(**call))
        for _ in range(5):  # and in place, as a decode loop does
            call["seq_lens"].sub_(7)
            assert torch.equal(function(**call), decode_attention(**call))
    assert counter.frame_count == 1


def test_growing_int_length_recompiles_once() -> None:
    """Dynamo takes the first value for a constant and the second for a variable."""
    function, counter = compiled(decode_attention)
    call = tensors()
    for length in (40, 41, 42, 99, 160):
        call["seq_lens"] = length
        assert torch.equal(function(**call), decode_attention(**call))
    assert counter.frame_count <= 2
